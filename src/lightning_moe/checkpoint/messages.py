"""Words that error messages share."""

from __future__ import annotations

from collections.abc import Iterable


def listed(items: Iterable[str], most: int = 4) -> str:
    """The first few of some names, in order, and how many more there are."""
    items = sorted(items)
    more = f" and {len(items) - most} more" if len(items) > most else ""
    return ", ".join(items[:most]) + more


def quoted(names: Iterable[str]) -> list[str]:
    """Names as they stand in a message."""
    return [f"`{name}`" for name in names]
