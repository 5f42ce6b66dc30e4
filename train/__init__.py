"""Training of drafters: configuration, data, the frozen target's features, objectives, the training
loop, checkpoints, and the console commands."""
