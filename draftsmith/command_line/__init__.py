"""Command lines: how they are spelled, read and explained."""
