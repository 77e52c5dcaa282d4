"""Compare named arms: lists of overrides on one base, fed with the same requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Compare:
    """What to compare, and how to say it.

    `arms` maps a name to overrides, as one would type them; `baseline` is the arm that the others
    are held against (the first, if not given); `metrics` are the columns of the table.
    """

    title: str
    question: str
    arms: Mapping[str, Sequence[str]]
    baseline: str | None = None
    metrics: Sequence[str] = field(default=("ttft", "tpot", "e2e", "output_tokens_per_s"))
    swept: str | None = None
