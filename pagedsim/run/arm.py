"""What a study asks for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Arm:
    """Something to run: a name, and what it changes in the configuration."""

    name: str
    overrides: Sequence[str] = ()
    """As one would type them."""
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Dotted keys and values, put in after the overrides."""
    seeds: Sequence[int] | None = None
    """None: those of the study."""
    first: int | None = None
    """The seed that is served in any case; others are left out where they would change nothing.
    None: the first of its seeds."""
    repeats: Sequence[int] = (0,)
    """The same requests, served once for each number: what chance on a real machine does."""
