"""Checkpoint formats of other projects: export, import, and the check of what was written."""
