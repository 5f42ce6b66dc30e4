"""Training data: tables of tokens, packed batches, feature stores, and texts the target writes."""
