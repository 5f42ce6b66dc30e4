"""Plans of a training run: memory and communication of its steps, before it runs."""
