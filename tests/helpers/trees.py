"""Shapes of draft trees for tests."""

from __future__ import annotations

from draftsmith.inference.rounds.tree import NO_NODE, TreeShape


def wide_tree(widths: tuple[int, ...]) -> TreeShape:
    """Return the tree in which every node of depth d has `widths[d]` children."""
    # Example: widths (2, 1) give the parents -1, 0, 0, 1, 2.
    parents, level = [NO_NODE], [0]
    for width in widths:
        below = []
        for node in level:
            below += range(len(parents), len(parents) + width)
            parents += [node] * width
        level = below
    return TreeShape(tuple(parents))
