"""Other projects' checkpoint formats: export to serving engines, import of public drafters, the
check of what was written."""
