"""Drafting methods at work, one a file, and the tree builders that they share."""
