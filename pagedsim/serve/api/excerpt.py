"""The beginning of a value, for a message about it."""

from __future__ import annotations

from typing import Any

from pagedsim.core.errors import shown


def excerpt(value: object, most: int = 80) -> str:
    """A value as a text of at most `most` characters and a mark; the rest is not looked at.

    >>> excerpt([1, "two", None])
    "[1, 'two', None]"
    >>> excerpt(list(range(10**6)), 12)
    '[0, 1, 2, 3,…'
    """
    text = shown(_begin(value, [most]))
    return text if len(text) <= most else f"{text[:most]}…"


def _begin(value: Any, left: list[int]) -> Any:
    """As much of a value as has more characters than there are `left` in the end."""
    left[0] -= 1
    most = left[0] + 2
    if isinstance(value, str):
        return value[:most]
    if isinstance(value, list | tuple):
        some: list[Any] = []
        for one in value:
            if left[0] < 0:
                break
            some.append(_begin(one, left))
        return some
    if isinstance(value, dict):
        entries: dict[Any, Any] = {}
        for key, one in value.items():
            if left[0] < 0:
                break
            name = _begin(key, left)
            entries[name] = _begin(one, left)
        return entries
    return value
