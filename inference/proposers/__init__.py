"""Proposers, one drafting method a file, and the tree builders that they share."""
