"""A study's results: arms that saw the same requests, under several seeds."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa


@dataclass(frozen=True)
class Run:
    """One arm under one seed."""

    arm: str
    seed: int
    folder: Path
    config: dict[str, Any]
    requests: pa.Table
    steps: pa.Table
    summary: dict[str, Any]


@dataclass
class Study:
    """All runs of an experiment, in the order of its arms.

    `title` and `question` are for a reader; `metrics` names the columns that the study is about,
    and `clients` the classes of requests to be told apart (none: all together).
    """

    name: str
    title: str
    question: str
    folder: Path
    command: str
    runs: list[Run] = field(default_factory=list)
    metrics: tuple[str, ...] = ("ttft", "tpot", "e2e", "output_tokens_per_s")
    clients: tuple[str, ...] = ()
    baseline: str | None = None
    swept: str | None = None
    """The setting that the arms vary, where they are points of a sweep."""
    failed: dict[str, str] = field(default_factory=dict)
    """Arms that ended in an error: one line each."""

    @property
    def arms(self) -> list[str]:
        """Names of the arms, each once, in order."""
        return list(dict.fromkeys(run.arm for run in self.runs))

    @property
    def notes(self) -> list[str]:
        """What the first run of each arm has to tell a reader, each line once."""
        whose: dict[str, list[str]] = {}
        for arm in self.arms:
            runs = self.of(arm)
            some = f" (seed {runs[0].seed})" if len(runs) > 1 else ""
            for text in runs[0].summary.get("notices", ()):
                whose.setdefault(text + some, []).append(arm)
        return [
            text if arms == self.arms else f"{', '.join(arms)}: {text}"
            for text, arms in whose.items()
        ]

    def of(self, arm: str) -> list[Run]:
        """The runs of one arm, seed by seed."""
        return [run for run in self.runs if run.arm == arm]
