"""Arms with given metrics by seed, for tests of rankings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from pagedsim.metrics.arms import Arms, Run
from pagedsim.metrics.pareto import Criterion, Standing

Values = Mapping[str, Sequence[float]]
"""By key of the summary, a value a seed."""


def arms_with(values: Mapping[str, Values], config: Mapping[str, object] | None = None) -> Arms:
    """Arms of which nothing is known but these numbers; all requests finished unless they say."""
    runs = [
        Run(arm, seed, Path(), dict(config or {}), {"finished": 10} | summary)
        for arm, keys in values.items()
        for seed, summary in enumerate(_by_seed(keys))
    ]
    return Arms("small", "Small", "What?", Path(), "", runs, metrics=("e2e_mean", "ttft_p99"))


def standing_of(values: Mapping[str, Values], *criteria: str) -> Standing:
    """How they stand by these keys."""
    return Standing(arms_with(values), [Criterion(key) for key in criteria])


def _by_seed(keys: Values) -> list[dict[str, object]]:
    return [dict(zip(keys, row, strict=True)) for row in zip(*keys.values(), strict=True)]
