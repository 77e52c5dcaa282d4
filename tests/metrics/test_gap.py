"""Gaps between tokens, against those of a model that does record every token."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from pagedsim.metrics.gap import token_gaps, weighted_mean, weighted_percentiles

Floats = NDArray[np.float64]


def gaps(ends: list[float], *requests: tuple[float, float, int, int]) -> list[tuple[float, float]]:
    first, last, tokens, preemptions = (np.asarray(c) for c in zip(*requests, strict=True))
    values, weights = token_gaps(
        np.asarray(ends), first.astype(float), last.astype(float), tokens, preemptions
    )
    order = np.argsort(values, kind="stable")
    return list(zip(values[order].tolist(), weights[order].tolist(), strict=True))


def test_no_request_has_no_gap() -> None:
    empty, none = np.zeros(0), np.zeros(0, dtype=np.int64)
    for ends in (empty, np.asarray([1.0, 2.0])):
        values, weights = token_gaps(ends, empty, empty, none, none)
        assert (len(values), len(weights)) == (0, 0)
        assert np.isnan(weighted_mean(values, weights))
        assert np.isnan(weighted_percentiles(values, weights, (50.0,))).all()


def test_the_first_gap_runs_from_the_prefill() -> None:
    assert gaps([1.0, 2.0, 4.0], (1.5, 4.0, 3, 0)) == [(0.5, 1.0), (2.0, 1.0)]


@pytest.mark.parametrize("start", [0.0, 10.0])
def test_a_request_that_missed_steps_has_one_long_gap_a_preemption(start: float) -> None:
    # Eight steps of a second, of which it missed three in one pause.
    ends = [start + t for t in range(1, 9)]
    ((short, often), *more) = gaps(ends, (start, start + 8.0, 6, 1))
    assert (short, often) == pytest.approx((1.0, 0.5))
    total = [(short, often), *more]
    assert sum(weight for _, weight in total) == pytest.approx(5)
    assert sum(value * weight for value, weight in total) == pytest.approx(8.0)
    assert total[-1] == pytest.approx((4.0, 1.0))


def test_a_request_that_was_held_back_has_a_long_gap_for_each_step_missed() -> None:
    # Eight steps of a second and five gaps, although it was not preempted.
    total = gaps([float(t) for t in range(1, 9)], (0.0, 8.0, 6, 0))
    assert total[-1] == (2.0, 3.0)
    assert sum(weight for value, weight in total if value == 1.0) == pytest.approx(2)
    assert sum(value * weight for value, weight in total) == pytest.approx(8.0)


def test_a_token_may_come_after_the_last_decode_step() -> None:
    # Recomputed, it is sampled by a prefill: four ordinary gaps, and one until then.
    assert gaps([1.0, 2.0, 3.0, 4.0], (0.0, 6.5, 6, 1)) == [(1.0, 1.0)] * 4 + [(2.5, 1.0)]


def test_recomputed_tokens_can_come_without_a_decode_step() -> None:
    assert gaps([9.0], (1.0, 5.0, 3, 2)) == [(2.0, 2.0)]


def test_a_rebuilt_request_whose_steps_are_all_ordinary_has_no_long_gap() -> None:
    # It lost its memory and came back between two decode steps: as many gaps as steps, all told.
    assert gaps([6.0, 7.0, 8.0], (5.0, 8.0, 4, 1)) == [(1.0, 1.0), (1.0, 1.0), (1.0, 1.0)]


def test_fewer_steps_than_ordinary_gaps_leave_no_room_for_a_long_one() -> None:
    # Five gaps in the time of two steps: beside four ordinary ones a pause would be below zero.
    total = gaps([2.0, 3.0], (1.0, 3.0, 6, 1))
    assert total == [(1.0, 2.5), (1.0, 2.5)]


@pytest.mark.parametrize("seed", range(5))
def test_exact_without_preemptions(seed: int) -> None:
    random = np.random.default_rng(seed)
    ends = np.cumsum(random.random(200))
    every, requests = [], []
    for _ in range(50):
        begin = int(random.integers(0, 150))
        tokens = int(random.integers(2, 50))
        # Its first token came in a prefill step, somewhere between two decode steps.
        first = float(ends[begin] + random.random() * (ends[begin + 1] - ends[begin]) * 0.999)
        times = [first, *ends[begin + 1 : begin + tokens]]
        every += list(np.diff(times))
        requests.append((first, float(times[-1]), len(times), 0))
    columns = [np.asarray(column) for column in zip(*requests, strict=True)]
    values, weights = token_gaps(ends, *columns)
    percents = (0.0, 1.0, 50.0, 90.0, 99.0, 100.0)
    assert weights.sum() == pytest.approx(len(every))
    assert weighted_mean(values, weights) == pytest.approx(np.mean(every))
    got = weighted_percentiles(values, weights, percents)
    assert got == pytest.approx(np.percentile(every, percents))


def test_who_came_from_elsewhere_has_had_no_step_before() -> None:
    # Its first token at 1, it came at 4.5: steps that ended here before were not its own.
    ends = np.array([2.0, 3.0, 4.0, 5.0, 6.0, 7.0])
    first, last, tokens, preemptions = (np.array([value]) for value in (1.0, 7.0, 4, 0))
    values, weights = token_gaps(ends, first, last, tokens, preemptions, np.array([4.5]))
    found = sorted(zip(values.tolist(), weights.tolist(), strict=True))
    assert found == [(1.0, 1.0), (1.0, 1.0), (4.0, 1.0)]
