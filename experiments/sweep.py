"""Vary one setting over a list of values: a comparison whose arms are the values."""

from __future__ import annotations

from collections.abc import Sequence

from experiments.compare import Compare


def sweep(
    title: str,
    question: str,
    over: str,
    values: Sequence[object],
    baseline: object = None,
    metrics: Sequence[str] = ("ttft", "tpot", "e2e", "output_tokens_per_s"),
) -> Compare:
    """The comparison of `over=value` for each of `values`."""
    return Compare(
        title=title,
        question=question,
        arms={str(value): [f"{over}={value}"] for value in values},
        baseline=None if baseline is None else str(baseline),
        metrics=metrics,
        swept=over,
    )
