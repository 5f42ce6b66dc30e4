"""Parts of objectives that several methods share."""
