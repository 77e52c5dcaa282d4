"""Shares as a reader sees them; "–" where there is none."""

from __future__ import annotations


def percent(share: float, digits: int = 1) -> str:
    """Such as "12.5 %"."""
    return "–" if share != share else f"{100 * share:.{digits}f} %"


def signed(share: float, digits: int = 1, unit: str = " %") -> str:
    """A difference, with its sign."""
    return "–" if share != share else f"{100 * share:+.{digits}f}{unit}".replace("-", "−")
