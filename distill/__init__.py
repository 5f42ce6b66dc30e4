"""Divergences from the target's distribution, and draft models that are made from a target."""
