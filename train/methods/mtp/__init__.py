"""Training of layers for multi-token prediction (MTP)."""
