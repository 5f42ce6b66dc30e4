"""Drafter modules, their configuration, draft vocabularies and the artifact on disk.

This package holds no training or decoding loop and imports no other package of draftsmith.
"""
