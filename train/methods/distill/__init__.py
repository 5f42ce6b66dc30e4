"""Distillation of draft models."""
