"""Numbers that another processor gives, beside those in a file."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


def differing(found: Any, known: Any) -> list[str]:
    """The places of nested lists and mappings at which they differ.

    Numbers may differ in their last digits, as processors do: of a difference, those are the last
    digits of what is subtracted, which is around 1.
    """
    ours, theirs = _leaves(found), _leaves(known)
    if ours.keys() != theirs.keys():
        return sorted(ours.keys() ^ theirs.keys())
    return [place for place, leaf in ours.items() if not _close(leaf, theirs[place])]


def _leaves(value: Any, place: str = "") -> dict[str, Any]:
    if not isinstance(value, Mapping | list) or not value:
        return {place: value}
    found: dict[str, Any] = {}
    for key, inner in value.items() if isinstance(value, Mapping) else enumerate(value):
        found |= _leaves(inner, f"{place}/{key}")
    return found


def _close(found: Any, known: Any) -> bool:
    if {type(found), type(known)} in ({float}, {float, int}):
        return math.isclose(found, known, rel_tol=1e-9, abs_tol=1e-12)
    return bool(found == known)
