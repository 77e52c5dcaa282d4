"""Vary one setting over a list of values: a comparison whose arms are the values."""

from __future__ import annotations

from collections.abc import Sequence

from experiments.studies.compare import Compare, refuse_of_an_arm
from pagedsim.core import ConfigError
from pagedsim.metrics.arms import DEFAULT_METRICS


def sweep(
    title: str,
    question: str,
    over: str,
    values: Sequence[object],
    baseline: object = None,
    metrics: Sequence[str] = DEFAULT_METRICS,
) -> Compare:
    """The comparison of `over=value` for each of `values`."""
    if not isinstance(values, (list, tuple)) or not values:
        raise ConfigError(f"values={values}: must be a list such as [8, 16]")
    if not isinstance(over, str):
        raise ConfigError(
            f"over={over}: must be the name of one setting, such as memory.block_size, with values="
        )
    refuse_of_an_arm(f"over={over}", over)
    arms = {_text(value): [f"{over}={_text(value)}"] for value in values}
    if len(arms) < len(values):
        raise ConfigError(f"values={list(values)}: must differ from each other")
    if baseline is not None and _text(baseline) not in arms:
        raise ConfigError(f"baseline={baseline}: must be one of the values {', '.join(arms)}")
    return Compare(
        title=title,
        question=question,
        arms=arms,
        baseline=None if baseline is None else _text(baseline),
        metrics=metrics,
        swept=over,
    )


def _text(value: object) -> str:
    """A value as one would type it."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)
