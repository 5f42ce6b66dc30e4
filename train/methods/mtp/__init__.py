"""Training of Layers for multi-token prediction."""
