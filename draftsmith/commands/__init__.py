"""Console commands. The module of a command is imported when the command runs."""
