"""Training data: sources, chat templates, packed batches, feature stores, extraction, regeneration,
rollouts."""
