"""What a run prints is what a second accountant makes of it, from the times of its tokens and from
what each of its steps did; `python -m tests.metrics.random_runs` for more of them."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from pagedsim.metrics.definitions import METRICS
from tests.metrics import random_runs
from tests.metrics.accountant import of_requests, of_run
from tests.metrics.accounts import Books
from tests.metrics.ledger import Recording, watch
from tests.metrics.random_runs import check, configured, draw


def test_every_metric_has_its_account(tmp_path: Path) -> None:
    recording = watch(configured(["workload.requests=3"]), tmp_path)
    assert isinstance(recording, Recording)
    books = Books(recording)
    of_runs = {name for name, metric in METRICS.items() if metric.of_run}
    assert set(of_run(books)) == of_runs
    assert set(of_requests(books, books.lives)) == METRICS.keys() - of_runs


@pytest.mark.parametrize("number", range(30))
def test_random_runs_are_accounted_for(number: int, tmp_path: Path) -> None:
    case = draw(Random(number))
    assert not check(case, tmp_path), case


@pytest.mark.slow
def test_many_random_runs_are_accounted_for() -> None:
    assert random_runs.search(500, 1000) > 400
