"""What distillation is here: divergences between the target's distribution and a drafter's, shared
by every method."""
