"""Training of Draft models."""
