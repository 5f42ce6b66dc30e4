"""Training of EAGLE."""
