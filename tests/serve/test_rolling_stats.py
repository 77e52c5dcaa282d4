"""What a server has done: in all, second by second, and lately."""

from __future__ import annotations

import pytest

from pagedsim.core import PagedMemory, Request, SamplingParams, Scheduler, Unified
from pagedsim.serve.rolling_stats import SECONDS, RollingStats


class Driven:
    """A scheduler whose every step takes a quarter of a second, and its tally."""

    def __init__(self, blocks: int = 64) -> None:
        self.scheduler = Scheduler(
            memory=PagedMemory(blocks, 4), batching=Unified(), max_batched_tokens=64
        )
        self.tally, self.now = RollingStats(), 0.0

    def add(self, name: str, prompt: int, output: int) -> None:
        params = SamplingParams(max_tokens=output)
        self.scheduler.add(Request(name, prompt, params), self.now, output)

    def step(self) -> None:
        plan = self.scheduler.plan(self.now)
        self.tally.step(plan, self.now, self.now + 0.25, self.scheduler)
        self.now += 0.25
        for request in self.scheduler.commit(plan, self.now):
            self.tally.left(request)

    def run(self) -> None:
        while self.scheduler.unfinished:
            self.step()


def test_tokens_and_departures_add_up_to_what_was_served() -> None:
    server = Driven()
    server.add("a", 6, 5)
    server.add("b", 10, 3)
    server.run()
    server.add("c", 4, 100)
    server.step()
    server.tally.left(server.scheduler.abort("c", server.now))
    tally = server.tally
    assert (tally.prompt_tokens, tally.output_tokens) == (6 + 10 + 4, 5 + 3 + 1)
    assert (tally.finished, tally.aborted, tally.rejected) == (2, 1, 0)
    assert tally.steps == 6
    assert sum(second.output_tokens for second in tally.seconds) == tally.output_tokens


def test_latencies_are_those_of_the_requests() -> None:
    server = Driven()
    server.add("a", 6, 5)
    server.run()
    assert server.tally.ttft(server.now) == (0.25, 0.25)
    assert server.tally.tpot(server.now) == (0.25, 0.25)


def test_latencies_are_forgotten_when_they_are_old() -> None:
    server = Driven()
    server.add("a", 6, 5)
    server.run()
    assert server.tally.ttft(server.now + 9) is not None
    assert server.tally.ttft(server.now + 11) is None
    assert server.tally.tpot(server.now + 11) is None


def test_the_middle_and_the_95th_percentile_are_told() -> None:
    server = Driven()
    for number in range(20):
        server.add(f"r{number}", 60, 2)  # one prompt a step, so each waits longer
    server.run()
    spread = server.tally.ttft(server.now)
    times = sorted(time for _, time in server.tally._ttfts)
    assert spread == (times[9], times[18])
    assert times[9] < times[18] < times[19]


def test_a_preemption_is_counted_and_its_prompt_is_computed_again() -> None:
    server = Driven(blocks=6)
    server.add("a", 8, 9)
    server.add("b", 8, 9)
    server.run()
    assert server.tally.preemptions == 1
    assert server.tally.prompt_tokens > 16
    assert server.tally.output_tokens == 18


def test_seconds_without_a_step_are_there_and_empty() -> None:
    server = Driven()
    server.add("a", 6, 5)  # until 1.25
    server.run()
    server.tally.look(4.5, server.scheduler)
    assert [second.output_tokens for second in server.tally.seconds] == [3, 2, 0, 0, 0]
    assert [second.running for second in server.tally.seconds] == [1, 0, 0, 0, 0]


def test_an_idle_interval_has_no_running_requests() -> None:
    server = Driven()
    server.add("a", 6, 5)
    server.run()
    server.now += 4
    server.add("b", 6, 5)
    server.step()
    seconds = list(server.tally.seconds)
    assert [(second.running, second.used) for second in seconds[2:-1]] == [(0, 0)] * 3
    assert (seconds[-1].running, seconds[-1].used) == (1, 2)


def test_a_long_silence_leaves_no_more_than_a_minute() -> None:
    server = Driven()
    server.add("a", 6, 5)
    server.run()
    server.tally.look(1e9, server.scheduler)
    assert len(server.tally.seconds) == SECONDS + 1
    assert sum(second.output_tokens for second in server.tally.seconds) == 0
    server.tally.look(3.0, server.scheduler)  # a clock that goes back changes nothing
    assert len(server.tally.seconds) == SECONDS + 1


def test_a_rate_is_the_mean_of_the_last_whole_seconds() -> None:
    server = Driven()
    server.add("a", 6, 21)
    assert server.tally.rate(lambda second: second.output_tokens) == 0
    server.run()  # ends at 5.25
    assert server.tally.rate(lambda second: second.output_tokens) == pytest.approx(4)
