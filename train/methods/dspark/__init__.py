"""Training of DSpark."""
