"""What a drafter is: modules, their configs, and what stands on disk. No loop of any kind; imports
nothing of ours."""
