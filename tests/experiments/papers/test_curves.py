"""Sustained rates, crossings and normalized latencies by hand."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from experiments.papers.curves import (
    at,
    crossing,
    ends_of_batches,
    gain,
    normalized_latency,
    sustained,
)
from pagedsim.core import ConfigError
from pagedsim.metrics.arms import Run
from tests.metrics.tables import requests_of
from tests.run.studies import run_of


def test_a_rate_is_sustained_up_to_the_bound() -> None:
    curve = {4.0: 10.0, 1.0: 0.1, 2.0: 1.0, 3.0: 0.9}
    assert sustained(curve, 0.1) == 1.0
    assert sustained(curve, math.sqrt(0.1)) == pytest.approx(1.5)  # halfway in the logarithm
    assert sustained(curve, 3.0) == pytest.approx(3 + math.log(3 / 0.9) / math.log(10 / 0.9))
    assert sustained({1: 0.1, 2: 1.0, 3: 0.2, 4: 2.0}, 0.5) < 2  # the first passage counts
    curves = {"paged": {2.0: 0.1, 4.0: 10.0}, "static": {1.0: 0.1, 2.0: 10.0}}
    assert gain(curves, "paged", "static", 1.0) == pytest.approx(2)


@pytest.mark.parametrize("bound", [0.05, 20.0])
def test_a_bound_that_no_rate_brackets(bound: float) -> None:
    assert math.isnan(sustained({1: 0.1, 2: 10.0}, bound))


def test_curves_cross_where_the_first_falls_below_the_second() -> None:
    small, large = {1.0: 2.0, 2.0: 2.0, 3.0: 2.0}, {1.0: 1.0, 2.0: 2.0, 3.0: 4.0}
    assert crossing({"small": small, "large": large}) == pytest.approx(2.0)
    assert math.isnan(crossing({"small": large, "large": small}))


def test_between_two_rates_a_latency_lies_on_a_line_in_its_logarithm() -> None:
    assert at({1.0: 1.0, 3.0: 4.0}, 2.0) == pytest.approx(2.0)
    assert math.isnan(at({1.0: 1.0, 3.0: 4.0}, 3.5))


class Served(Run):
    """A batch of two requests, which end after 3 and 4 s, and a request before the warm-up."""

    def requests(self, *columns: str) -> pa.Table:
        return requests_of(
            {"arrival": 0.0, "scheduled": 0.0, "finished": 1.0, "output_tokens": 1},
            {"arrival": 2.0, "scheduled": 2.0, "finished": 5.0, "output_tokens": 1},
            {"arrival": 2.0, "scheduled": 2.0, "finished": 6.0, "output_tokens": 2},
        ).select(columns)


def test_normalized_latency_is_of_arrivals_after_the_warm_up() -> None:
    run = Served("x", 0, Path(), {}, {})
    assert normalized_latency(run, 1.0) == pytest.approx((3 / 1 + 4 / 2) / 2)
    assert normalized_latency(run) == pytest.approx((1 + 3 / 1 + 4 / 2) / 3)
    assert normalized_latency(run, 1.0, together=True) == pytest.approx((4 / 1 + 4 / 2) / 2)
    with pytest.raises(ConfigError, match="warm_up=3: must be shorter"):
        normalized_latency(run, 3.0)


def test_a_batch_ends_with_its_last() -> None:
    # By rows: batches of the first and the third, of the second, of the last two.
    scheduled = np.array([0.0, 5.0, 1.0, 9.0, 9.5])
    finished = np.array([5.0, 9.0, 3.0, 12.0, 11.0])
    assert ends_of_batches(scheduled, finished).tolist() == [5, 9, 5, 12, 12]


@pytest.mark.usefixtures("hydra")
def test_batches_of_a_real_run(tmp_path: Path) -> None:
    small = ["workload.requests=40", "workload.rate=5", "server.max_seqs=4", "batching=static"]
    static = [*small, "memory=reserved_oracle", "memory.blocks=15728"]
    run = run_of(tmp_path, ["experiment=paper_fig12"], static)
    table = run.requests("scheduled", "finished")
    scheduled, finished = (np.asarray(table[name].to_numpy()) for name in table.column_names)
    ends = ends_of_batches(scheduled, finished)
    batches = [np.flatnonzero(ends == end) for end in np.unique(ends)]
    assert all(1 <= len(batch) <= 4 for batch in batches) and len(batches[-2]) == 4
    for before, after in pairwise(batches):
        assert finished[before].max() <= scheduled[after].min()
