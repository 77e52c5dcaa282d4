"""The page that `python -m pagedsim serve --help` prints."""

from __future__ import annotations


def page() -> str:
    """All of it."""
    return "python -m pagedsim serve"
