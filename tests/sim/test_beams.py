"""A simulated beam search: the law of surviving beams, and its effects on memory and time."""

from __future__ import annotations

import pytest

from pagedsim.build import make_memory, make_scheduler
from pagedsim.core import ConfigError, Request, SamplingParams
from pagedsim.metrics.recorder import Recorder
from pagedsim.sim.beams import Beams
from pagedsim.sim.simulate import simulate
from tests.sim.harness import Constant, Jobs


def search(name: int | str, width: int) -> Request:
    return Request(name, 8, SamplingParams(n=width, beam_search=True))


@pytest.mark.parametrize("width", [2, 6])
def test_beams_die_out_at_the_expected_rate(width: int) -> None:
    """A beam has no child if its own place is refilled and no place draws it."""
    turnover, steps = 0.6, 10_000
    beams, request = Beams(turnover), search("a", width)
    dead = 0
    for _ in range(steps):
        dead += width - len(set(beams.chosen(request) or range(width)))
    drawn = turnover / width  # the chance that a place draws this beam
    expected = (turnover - drawn) * (1 - drawn) ** (width - 1)
    assert dead / steps / width == pytest.approx(expected, rel=0.05)


def test_without_turnover_every_beam_continues() -> None:
    assert Beams(0.0).chosen(search("a", 4)) is None
    for turnover in (-0.1, 1.1, float("nan")):
        with pytest.raises(ConfigError, match="beam_turnover"):
            Beams(turnover)


def test_what_a_request_draws_is_its_own() -> None:
    """Neither others nor the order of asking change it; the seed does."""

    def drawn(beams: Beams, name: int, times: int) -> list[object]:
        return [beams.chosen(search(name, 4)) for _ in range(times)]

    alone, beside = Beams(0.5, seed=3), Beams(0.5, seed=3)
    first = drawn(alone, 1, 20)
    mixed = []
    for _ in range(20):
        drawn(beside, 2, 1)
        mixed += drawn(beside, 1, 1)
    assert mixed == first
    assert drawn(Beams(0.5, seed=4), 1, 20) != first


def test_copies_take_time() -> None:
    """Two sequences part in the step after the first token: one block of theirs is copied."""
    jobs = Jobs([(0.0, 5, 3)])
    request = Request(0, 5, SamplingParams(n=2), arrival=0.0)
    jobs.requests = lambda: iter([(request, 3)])  # type: ignore[method-assign]
    recorder = Recorder()
    scheduler = make_scheduler(memory=make_memory(blocks=8, block_size=4))
    end = simulate(scheduler, jobs, Constant(1.0), recorder, copy_seconds=0.25)
    assert end == 3.25
    steps = recorder.steps_table()
    assert steps["end"].to_pylist() == [1.0, 2.25, 3.25]
    # Of the prompt's two blocks the second parts; before, until both have a token, there is one.
    assert steps["used_blocks"].to_pylist() == [2, 3, 3]
    assert steps["shared_blocks"].to_pylist() == [0, 1, 1]
