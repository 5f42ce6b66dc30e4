"""Interfaces through which other programs decode: HTTP with a page, and transformers' generate."""
