"""Tables of a fleet's replicas: a row each, or a summary of many."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from pagedsim.metrics.arms import Arms, Run
from pagedsim.metrics.catalogue import Scale, label_of, scale_of
from pagedsim.metrics.result import Listing
from pagedsim.metrics.tables import NAN

MOST = 16
"""Maximum number of replicas with a row each; above it there are quartiles and extremes."""
_EXTREMES = 3
_ARMS = 4
"""Maximum number of arms with a table each; above it each has a row."""
_METRICS = (
    *("kv_utilisation_mean", "batch_size_mean", "hit_rate", "preemptions"),
    *("ttft_mean", "ttft_p99", "tpot_mean", "e2e_mean"),
)
_ONLY_IF_ANY = ("hit_rate", "preemptions")
_WORDS = ("pool", "role", "hardware")
_MEANING = (
    "Load is the tokens that steps computed, over the mean of all replicas of a role; busy is the "
    "share of the makespan that steps took"
)


class _Column(NamedTuple):
    label: str
    values: Sequence[float]
    scale: Scale

    def cell(self, value: float) -> str:
        return self.scale.text(value)

    def span(self) -> str:
        """The range of the values."""
        known = [value for value in self.values if value == value]
        if not known:
            return self.cell(NAN)
        low, high = self.scale.number(min(known)), self.cell(max(known))
        return high if min(known) == max(known) else f"{low} to {high}"


def replica_listings(study: Arms) -> list[Listing]:
    """Tables of the replicas in the first run of each arm; empty for single servers."""
    runs = [run for run in (study.of(arm)[0] for arm in study.arms) if run.replicas]
    if len(runs) > _ARMS:
        return [_ranges(runs), *_transfers(runs)]
    several = len(study.arms) > 1
    return [*(_listing(run, several) for run in runs), *_transfers(runs)]


def _listing(run: Run, several: bool) -> Listing:
    rows = run.replicas
    title = f"Replicas of {run.arm}" if several else "Replicas"
    words = [name for name in _WORDS if len({row[name] for row in rows}) > 1]
    columns = list(_columns(rows))
    head = ["", *words, *(column.label for column in columns)]
    chosen, note = _chosen(rows)
    cells = [
        [rows[index]["name"], *(rows[index][name] for name in words)]
        + [column.cell(column.values[index]) for column in columns]
        for index in chosen
    ]
    if len(chosen) < len(rows):
        blank = [""] * len(words)
        summed = [*_pools(rows, columns), *_quartiles(columns)]
        cells = [*([name, *blank, *values] for name, values in summed), *cells]
    return Listing(title, head, cells, f"{_MEANING}; seed {run.seed}.{note}")


def _columns(rows: Sequence[Mapping[str, Any]]) -> Iterator[_Column]:
    counts, shares = Scale(1.0, "", whole=True), Scale(100.0, "%")
    yield _Column("Requests", [row["requests"] for row in rows], counts)
    yield _Column("Load", [row["load"] for row in rows], shares)
    yield _Column("Busy", [row["busy"] for row in rows], shares)
    for key in _METRICS:
        values = [float(row[key]) for row in rows]
        if key not in _ONLY_IF_ANY or any(value > 0 for value in values):
            yield _Column(label_of(key), values, scale_of(key, values))


def _chosen(rows: Sequence[Mapping[str, Any]]) -> tuple[Sequence[int], str]:
    """The replicas with a row, and a note on the others."""
    if len(rows) <= MOST:
        return range(len(rows)), ""
    order = sorted(range(len(rows)), key=lambda index: -rows[index]["computed_tokens"])
    said = (
        f" Of {len(rows):,} replicas there are quartiles, of each column by itself, and those "
        f"with the {_EXTREMES} largest and the {_EXTREMES} smallest loads; summary.json has all."
    )
    return [*order[:_EXTREMES], *order[-_EXTREMES:]], said


def _pools(
    rows: Sequence[Mapping[str, Any]], columns: Sequence[_Column]
) -> Iterator[tuple[str, list[str]]]:
    pools = list(dict.fromkeys(row["pool"] for row in rows))
    for pool in pools if len(pools) > 1 else ():
        mine = [index for index, row in enumerate(rows) if row["pool"] == pool]
        means = [_mean([column.values[index] for index in mine]) for column in columns]
        cells = [column.cell(mean) for column, mean in zip(columns, means, strict=True)]
        yield f"mean of {pool}", cells


def _mean(values: Sequence[float]) -> float:
    known = [value for value in values if value == value]
    return sum(known) / len(known) if known else NAN


def _quartiles(columns: Sequence[_Column]) -> Iterator[tuple[str, list[str]]]:
    for name, percent in (("most", 100), ("P75", 75), ("median", 50), ("P25", 25), ("least", 0)):
        yield name, [column.cell(_percentile(column.values, percent)) for column in columns]


def _percentile(values: Sequence[float], percent: float) -> float:
    known = [value for value in values if value == value]
    return float(np.percentile(known, percent)) if known else NAN


def _ranges(runs: Sequence[Run]) -> Listing:
    """One row of ranges per arm."""
    every = [{one.label: one.span() for one in _columns(run.replicas)} for run in runs]
    head = list(dict.fromkeys(label for one in every for label in one))
    rows = [
        [run.arm, str(len(run.replicas)), *(one.get(label, "–") for label in head)]
        for run, one in zip(runs, every, strict=True)
    ]
    note = f"From the least to the most of an arm's replicas. {_MEANING}; seed {runs[0].seed}."
    return Listing("Replicas of each arm", ["", "Replicas", *head], rows, note)


def _transfers(runs: Sequence[Run]) -> Iterator[Listing]:
    """KV transfers between replicas, one row per arm."""
    told = [(run, run.summary["transfers"]) for run in runs if "transfers" in run.summary]
    if not told:
        return
    head = ["", "Transfers", "GB", "Mean", "Waiting", "Busiest link", "Retries", "Lost"]
    rows = [
        [
            *(run.arm, f"{facts['transfers']:,}", f"{facts['bytes'] / 1e9:,.1f}"),
            _each(facts, "seconds"),
            _each(facts, "waiting_s"),
            Scale(100.0, "%").text(facts["busy_s"] / run.summary["makespan"]),
            *(f"{facts['retries']:,}", f"{facts['lost']:,}"),
        ]
        for run, facts in told
    ]
    note = "Keys and values between replicas: how long a transfer took, how long of that it waited "
    note += "for others, and the share of the makespan that the busiest link took for its bytes"
    yield Listing("Transfers", head, rows, f"{note}; seed {runs[0].seed}.")


def _each(facts: Mapping[str, float], name: str) -> str:
    mean = facts[name] / facts["transfers"] if facts["transfers"] else NAN
    return scale_of("e2e_mean", [mean]).text(mean)
