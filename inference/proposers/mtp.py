"""Kind of an MTP layer, which drafts as an EAGLE layer does: a chain, or a dynamic tree."""

from __future__ import annotations

from .eagle import KIND

__all__ = ["KIND"]
