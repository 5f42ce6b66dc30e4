"""Settings, progress and texts: modules that import nothing else of `inference`."""
