"""Prompts and conversations as people store them, read into one form."""
