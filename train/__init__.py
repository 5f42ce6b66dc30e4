"""How a drafter learns: config, data, the frozen target's features, objectives, the loop,
checkpoints, and the commands."""
