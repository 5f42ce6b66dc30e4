"""What distillation is here: divergences between the target's law and a drafter's, shared by every
method."""
