"""Times of tokens that are not recorded one by one: gaps between them, and the QoE of a reader."""

from __future__ import annotations

from dataclasses import asdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from pagedsim.core import ConfigError
from pagedsim.metrics.metric import weighted_mean, weighted_percentiles
from pagedsim.metrics.slo import Reader
from pagedsim.metrics.token_times import Resumptions, Stretches
from pagedsim.spec.roots import Qoe

Floats = NDArray[np.float64]


def stretches(
    ends: Floats, answers: list[list[float]], resumed: list[tuple[int, int]] | None = None
) -> Stretches:
    """Of answers with these token times; `resumed` has the row of each, and its tokens before."""
    first, last = (np.array([came[at] for came in answers]) for at in (0, -1))
    more = None
    if resumed:
        rows, before = (np.array(column) for column in zip(*resumed, strict=True))
        start = np.array([answers[row][number] for row, number in resumed])
        more = Resumptions(rows, before, start, np.zeros_like(rows))
    return Stretches.of(first, last, np.array(list(map(len, answers))), [ends], resumed=more)


@given(
    steps=st.lists(st.integers(1, 9), min_size=1, max_size=30),
    rows=st.lists(
        st.tuples(
            st.integers(0, 20),
            st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3), st.booleans()), max_size=4),
            st.booleans(),
        ),
        min_size=1,
        max_size=6,
    ),
)
def test_token_times_are_those_of_the_steps_that_a_request_was_in(
    steps: list[int], rows: list[tuple[int, list[tuple[int, int, bool]], bool]]
) -> None:
    """A stretch begins with a decode step, or with a prefill's step between two; before it, steps
    are missed. Some answers are of no server whose steps are known: their gaps are alike."""
    ends = np.cumsum(np.array(steps, dtype=float))
    answers: list[list[float]] = []
    resumed: list[tuple[int, int]] = []
    for skipped, more, foreign in rows:
        at, came = min(skipped, len(ends)), [0.25 + float(ends[:skipped].max(initial=0.0))]
        for number, missed, prefilled in () if foreign else more:
            came += ends[at : at + number].tolist()
            at = min(at + number + missed, len(ends) - 1)
            resumed.append((len(answers), len(came)))
            came.append(max(float(ends[at]), came[-1]) + 0.5 * prefilled)
            at += 1
        answers.append([*came, came[0] + 0.1, came[0] + 0.2] if foreign else came)
    found = stretches(ends, answers, resumed)
    assert found.spread.tolist() == [foreign for *_, foreign in rows]
    every = [np.diff(came) for came in answers]
    for row, came in enumerate(answers):
        numbers = np.arange(len(came))
        assert found.at(np.full(len(came), row), numbers) == pytest.approx(came)
    longest = [float(gaps.max(initial=0.0)) for gaps in every]
    assert found.longest_gaps() == pytest.approx(longest)
    values, weights = found.gaps(np.ones(len(answers), dtype=bool))
    repeated = np.sort(np.repeat(values, weights.astype(int)))
    assert repeated == pytest.approx(np.sort(np.concatenate(every)))
    percents = (0.0, 1.0, 50.0, 90.0, 99.0, 100.0)
    if len(repeated):
        assert weighted_mean(values, weights) == pytest.approx(np.mean(repeated))
        got = weighted_percentiles(values, weights, percents)
        assert got == pytest.approx(np.percentile(repeated, percents))
    reader = Reader(ttft=0.5, tokens_per_s=0.4)
    arrival, tokens = np.zeros(len(answers)), np.array(list(map(len, answers)))
    got = reader.qoe(arrival, tokens, found, np.arange(len(answers)))
    assert got == pytest.approx([read(reader, 0.0, came) for came in answers])


# -- quality of experience -------------------------------------------------------------------------


READER = Reader(ttft=1.0, tokens_per_s=0.5)  # tokens at best 1, 3, 5 ... seconds after the arrival


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


@given(
    first=st.floats(0, 5),
    gaps=st.lists(st.floats(0.01, 4), min_size=1, max_size=8),
)
def test_times_that_a_client_saw_give_what_steps_give(first: float, gaps: list[float]) -> None:
    times = np.cumsum([first, *gaps])
    arrival, tokens = np.zeros(1), np.array([len(times)])
    steps = READER.qoe(arrival, tokens, stretches(times[1:], [times.tolist()]), np.zeros(1, int))
    assert READER.qoe_of_times(arrival, tokens, [times]) == pytest.approx(steps)
