from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedsim.config import Qoe
from pagedsim.core import ConfigError
from pagedsim.metrics.qoe import Reader, decoded
from pagedsim.metrics.summary import summarise
from tests.metrics.tables import NAN, SIZES, requests_of, steps_of

READER = Reader(ttft=1.0, tokens_per_s=0.5)  # tokens at best 1, 3, 5 ... seconds after the arrival


def qoe(*rows: dict[str, Any], ends: list[float], reader: Reader = READER) -> dict[str, Any]:
    steps = steps_of(*({"end": end, "decode_seqs": 1} for end in ends))
    return summarise(requests_of(*rows), steps, **SIZES, reader=reader)


def test_tokens_in_time_are_perfect() -> None:
    """Early ones are read no sooner than at best, and make up for a gap."""
    early = {"first_token": 0.5, "finished": 5.0, "output_tokens": 3}
    assert qoe(early, ends=[0.7, 5.0])["qoe"] == 1
    assert qoe({"first_token": 1.0, "finished": 1.0}, ends=[])["qoe"] == 1


def test_a_late_first_token_delays_all_that_follow() -> None:
    """Tokens at 2, 2.1 and 2.2 are read at 2, 4 and 6, where 1, 3 and 5 were best."""
    row = {"first_token": 2.0, "finished": 2.2, "output_tokens": 3}
    assert qoe(row, ends=[2.1, 2.2])["qoe"] == pytest.approx(1 - 3 / (2 + 4 + 6))


def test_a_gap_delays_from_then_on() -> None:
    """Read at 1, 7 (there only then) and 9: late by 0, 4 and 4."""
    row = {"first_token": 0.5, "finished": 7.5, "output_tokens": 3}
    assert qoe(row, ends=[7.0, 7.5])["qoe"] == pytest.approx(1 - 8 / (1 + 7 + 9))


def test_an_answer_of_one_token_is_late_by_its_ttft_alone() -> None:
    assert qoe({"first_token": 4.0, "finished": 4.0}, ends=[])["qoe"] == pytest.approx(1 / 4)
    at_once = Reader(ttft=0.0, tokens_per_s=1.0)
    row = {"arrival": 1.0, "first_token": 1.0}
    assert qoe(row, ends=[], reader=at_once)["qoe"] == 1


def test_it_is_the_mean_over_finished_requests_and_told_of_each_client() -> None:
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


def test_readers_are_as_the_paper_has_them_unless_told() -> None:
    assert Reader() == Reader(ttft=1.3, tokens_per_s=4.8) == Reader(**asdict(Qoe()))


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"ttft": -1}, r"qoe\.ttft=-1: must be a number of at least 0"),
        ({"tokens_per_s": 0}, r"qoe\.tokens_per_s=0: must be a number above 0"),
    ],
)
def test_a_reader_that_cannot_be_is_refused(settings: dict[str, float], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        Reader(**settings)


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
def test_it_is_what_reading_token_by_token_gives(
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
def test_who_missed_steps_has_its_tokens_spread_over_them(
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


def test_tokens_that_come_together_are_there_together() -> None:
    """Of four in two parts, at 1 and 7, two are read at 1 and 3, two at 7 and 9."""
    found = READER.qoe_of_times(np.zeros(1), np.array([4]), [np.array([1.0, 7.0])])
    assert found == pytest.approx([1 - (2 + 2) / (1 + 3 + 7 + 9)])


def test_it_is_the_same_however_many_tokens_are_looked_at_in_one_go(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    draw = np.random.default_rng(1)
    ends, tokens = np.cumsum(draw.exponential(0.2, 400)), draw.integers(2, 200, 30)
    first = np.sort(draw.uniform(0, 20, 30))
    last = first + tokens * draw.uniform(0.2, 0.4, 30)  # not a token a step
    answers = (first - 1, first, last, tokens, *decoded(ends, first, last), ends)
    whole = READER.qoe(*answers)
    monkeypatch.setattr("pagedsim.metrics.qoe._AT_ONCE", 7)
    assert READER.qoe(*answers).tolist() == whole.tolist()
