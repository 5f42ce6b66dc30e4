"""Training of DFlash."""
