"""Training of drafters, and the console commands."""
