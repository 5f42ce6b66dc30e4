"""One round: draft tree, verification, acceptance, and the caches and noise that they need."""
