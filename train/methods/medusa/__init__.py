"""Training of Medusa."""
