"""Times of tokens that are not recorded one by one: gaps between them, and the QoE of a reader."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from pagedsim.config import Qoe
from pagedsim.core import ConfigError
from pagedsim.metrics.metric import token_gaps, weighted_mean, weighted_percentiles
from pagedsim.metrics.slo import Reader, decoded
from pagedsim.metrics.summary import summarise
from tests.metrics.tables import NAN, SIZES, requests_of, steps_of

Floats = NDArray[np.float64]


def gaps(ends: list[float], *requests: tuple[float, float, int, int]) -> list[tuple[float, float]]:
    first, last, tokens, preemptions = (np.asarray(c) for c in zip(*requests, strict=True))
    values, weights = token_gaps(
        np.asarray(ends), first.astype(float), last.astype(float), tokens, preemptions
    )
    order = np.argsort(values, kind="stable")
    return list(zip(values[order].tolist(), weights[order].tolist(), strict=True))


def test_a_request_that_missed_steps_has_one_long_gap_a_preemption() -> None:
    # Eight steps of a second, of which it missed three in one pause.
    total = gaps([10.0 + t for t in range(1, 9)], (10.0, 18.0, 6, 1))
    assert total[0] == pytest.approx((1.0, 0.5))
    assert sum(weight for _, weight in total) == pytest.approx(5)
    assert sum(value * weight for value, weight in total) == pytest.approx(8.0)
    assert total[-1] == pytest.approx((4.0, 1.0))


@pytest.mark.parametrize(
    ("ends", "request_", "found"),
    [
        # The first gap runs from the prefill.
        ([1.0, 2.0, 4.0], (1.5, 4.0, 3, 0), [(0.5, 1.0), (2.0, 1.0)]),
        # Recomputed, a token is sampled by a prefill: four ordinary gaps, and one until then.
        ([1.0, 2.0, 3.0, 4.0], (0.0, 6.5, 6, 1), [(1.0, 1.0)] * 4 + [(2.5, 1.0)]),
        # No decode step is between its first token and its last.
        ([9.0], (1.0, 5.0, 3, 2), [(2.0, 2.0)]),
        # It lost its memory and came back between two decode steps: as many gaps as steps.
        ([6.0, 7.0, 8.0], (5.0, 8.0, 4, 1), [(1.0, 1.0)] * 3),
        # Five gaps in the time of two steps: beside four ordinary ones a pause would be below zero.
        ([2.0, 3.0], (1.0, 3.0, 6, 1), [(1.0, 2.5), (1.0, 2.5)]),
    ],
)
def test_gaps_by_hand(
    ends: list[float], request_: tuple[float, float, int, int], found: list[tuple[float, float]]
) -> None:
    assert gaps(ends, request_) == found


def test_exact_without_preemptions() -> None:
    random = np.random.default_rng(0)
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


def test_a_migrated_request_has_had_no_step_before() -> None:
    # Its first token at 1, it came at 4.5: steps that ended here before were not its own.
    ends = np.array([2.0, 3.0, 4.0, 5.0, 6.0, 7.0])
    first, last, tokens, preemptions = (np.array([value]) for value in (1.0, 7.0, 4, 0))
    values, weights = token_gaps(ends, first, last, tokens, preemptions, np.array([4.5]))
    found = sorted(zip(values.tolist(), weights.tolist(), strict=True))
    assert found == [(1.0, 1.0), (1.0, 1.0), (4.0, 1.0)]


# -- quality of experience -------------------------------------------------------------------------


READER = Reader(ttft=1.0, tokens_per_s=0.5)  # tokens at best 1, 3, 5 ... seconds after the arrival


def qoe(*rows: dict[str, Any], ends: list[float], reader: Reader = READER) -> dict[str, Any]:
    steps = steps_of(*({"end": end, "decode_seqs": 1} for end in ends))
    return summarise(requests_of(*rows), steps, **SIZES, reader=reader)


def test_qoe_is_the_mean_over_finished_requests_and_of_each_client() -> None:
    rows: list[dict[str, Any]] = [
        {"client": "a", "first_token": 0.5},
        {"client": "a", "first_token": 4.0, "finished": 4.0},
        {"client": "b", "first_token": 2.0, "finished": 2.0},
        {"client": "b", "state": "unfinished", "finished": NAN},
        {"client": "c", "state": "rejected", "first_token": NAN},
    ]
    summary = qoe(*rows, ends=[9.0])
    assert summary["qoe"] == pytest.approx((1 + 1 / 4 + 1 / 2) / 3)
    clients = summary["clients"]
    assert (clients["a"]["qoe"], clients["b"]["qoe"]) == (5 / 8, 1 / 2)
    assert np.isnan(clients["c"]["qoe"])


def test_readers_are_those_of_the_paper_by_default() -> None:
    assert Reader() == Reader(ttft=1.3, tokens_per_s=4.8) == Reader(**asdict(Qoe()))

    with pytest.raises(ConfigError, match=r"qoe\.ttft=-1: must be a number of at least 0"):
        Reader(ttft=-1)
    with pytest.raises(ConfigError, match=r"qoe\.tokens_per_s=0: must be a number above 0"):
        Reader(tokens_per_s=0)


def read(reader: Reader, arrival: float, came: list[float]) -> float:
    """The QoE of one answer, token by token."""
    at = late = whole = 0.0
    for number, time in enumerate(came):
        best = arrival + reader.ttft + number / reader.tokens_per_s
        at = max(time, best, at + 1 / reader.tokens_per_s if number else best)
        late += at - best
        whole += at - arrival
    return 1 - late / whole if whole else 1.0


TIMES = st.integers(0, 40).map(lambda number: number / 8)


@given(
    gaps=st.lists(TIMES, max_size=12),
    rows=st.lists(
        st.tuples(TIMES, TIMES, st.integers(0, 12), st.integers(0, 12)), min_size=1, max_size=5
    ),
    ttft=TIMES,
    pace=st.integers(1, 16),
)
def test_qoe_is_that_of_reading_token_by_token(
    gaps: list[float], rows: list[tuple[float, float, int, int]], ttft: float, pace: int
) -> None:
    """For answers that have a token from each step between their first and their last."""
    reader = Reader(ttft, pace / 4)
    ends = np.cumsum(np.array(gaps) + 0.125)
    answers = []
    for wait, late, skipped, steps in rows:
        first = ends[min(skipped, len(ends) - 1)] if skipped and len(ends) else late
        after = ends[ends > first][:steps]
        answers.append((first - wait, [float(first), *after.tolist()]))
    arrival = np.array([one for one, _ in answers])
    first, last = (np.array([came[at] for _, came in answers]) for at in (0, -1))
    tokens = np.array([len(came) for _, came in answers])
    found = reader.qoe(arrival, first, last, tokens, *decoded(ends, first, last), ends)
    assert found == pytest.approx([read(reader, *one) for one in answers], abs=1e-12)
    assert ((found >= 0) & (found <= 1)).all()


@given(
    tokens=st.integers(2, 12), steps=st.integers(0, 12), length=st.integers(8, 80), preempted=TIMES
)
def test_an_answer_that_missed_steps_has_its_tokens_spread_over_them(
    tokens: int, steps: int, length: int, preempted: float
) -> None:
    first, last = 1.0 + preempted, 1.0 + preempted + length / 8
    ends = np.linspace(first, last, steps + 2)[1:-1]
    gaps = tokens - 1
    places = [-(-number * steps // gaps) - 1 for number in range(1, gaps)]
    came = [float(ends[place]) if steps else last for place in places]
    begin, end = np.array([first]), np.array([last])
    between = decoded(ends, begin, end)
    (found,) = READER.qoe(np.zeros(1), begin, end, np.array([tokens]), *between, ends)
    assert found == pytest.approx(read(READER, 0.0, [first, *came, last]), abs=1e-12)


@given(
    first=st.floats(0, 5),
    gaps=st.lists(st.floats(0.01, 4), min_size=1, max_size=8),
)
def test_times_that_a_client_saw_give_what_steps_give(first: float, gaps: list[float]) -> None:
    times = np.cumsum([first, *gaps])
    arrival, tokens = np.zeros(1), np.array([len(times)])
    ends, around = times[1:], (times[:1], times[-1:])
    steps = READER.qoe(arrival, *around, tokens, *decoded(ends, *around), ends)
    assert READER.qoe_of_times(arrival, tokens, [times]) == pytest.approx(steps)
