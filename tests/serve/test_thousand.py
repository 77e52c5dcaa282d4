"""A thousand streams at once take as long as their simulation says, and lose nothing.

Times are the server's own, of the model's clock, and the simulation has the arrivals that the
server saw: so a machine that others use, too, changes what it is asked, and not what it may answer.
What clients see beside that is `bench`'s affair (docs/serving.md).
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, Literal

import pytest
from hydra import compose
from omegaconf import OmegaConf

from pagedsim.core import Request, SamplingParams
from pagedsim.metrics.recorder import Recorder
from pagedsim.run.backend import RunConfig
from pagedsim.run.simulated import Simulation
from pagedsim.serve.factory import made
from pagedsim.sim.simulate import simulate
from tests.serve.serving import Answer, ask, serving

STEP = 0.1
"""Seconds; no step of these takes longer. Who comes while the event loop is held up for a moment
may miss one that the simulation gives it."""


@dataclass(frozen=True)
class Row:
    """One request."""

    arrival: float
    prompt: int
    output: int
    priority: int = 0


class Rows:
    """The same for a simulation."""

    mode: Literal["open"] = "open"
    users = None
    think_time = 0.0
    turns = None

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = rows

    def requests(self) -> Iterator[tuple[Request, int]]:
        numbered = sorted(enumerate(self.rows), key=lambda one: one[1].arrival)
        for number, row in numbered:
            params = SamplingParams(max_tokens=row.output)
            prompt, name = [5] * row.prompt, f"cmpl-{number:04}"
            arrival, priority = row.arrival, row.priority
            yield Request(name, prompt, params, arrival=arrival, priority=priority), row.output


@dataclass(frozen=True)
class Times:
    """Of one request, in the model's seconds."""

    arrival: float
    ttft: float
    tpot: float


def configured(words: Sequence[str]) -> dict[str, Any]:
    config: Any = OmegaConf.to_container(compose("serve", overrides=list(words)), resolve=True)
    found: dict[str, Any] = config
    return found


def simulated(config: dict[str, Any], rows: Sequence[Row]) -> list[Times]:
    """What `experiment=single` finds of these requests."""
    stage = RunConfig(config).prepare()
    assert isinstance(stage, Simulation)
    recorder = Recorder()
    simulate(stage.scheduler, Rows(rows), stage.cost, recorder, **stage.settings)
    return times_of(recorder, rows)


def served(config: dict[str, Any], rows: Sequence[Row]) -> tuple[list[Answer], list[Times]]:
    """What their clients got, and what the server says of them."""
    recorder = Recorder()
    found = made(config, recorder)
    with serving(found.engine, model=found.model) as server:
        answers = asyncio.run(sent(server.url, rows))
    return answers, times_of(recorder, rows)


async def sent(url: str, rows: Sequence[Row]) -> list[Answer]:
    begun = time.perf_counter() + 0.2

    async def client(number: int, row: Row) -> Answer:
        await asyncio.sleep(begun + row.arrival - time.perf_counter())
        return await ask(
            url,
            request_id=f"{number:04}",
            prompt=[5] * row.prompt,
            max_tokens=row.output,
            priority=row.priority,
        )

    return await asyncio.gather(*(client(*one) for one in enumerate(rows)))


def times_of(recorder: Recorder, rows: Sequence[Row]) -> list[Times]:
    """In the order of the rows, which is that of the ids."""
    table = recorder.requests_table()
    columns = [table[name].to_pylist() for name in ("first_token", "finished", "arrival")]
    return [
        Times(arrival, first - arrival, (end - first) / (row.output - 1))
        for first, end, arrival, row in zip(*columns, rows, strict=True)
    ]


def as_they_came(rows: Sequence[Row], seen: Sequence[Times]) -> list[Row]:
    return [replace(row, arrival=one.arrival) for row, one in zip(rows, seen, strict=True)]


@pytest.mark.slow
def test_a_thousand_streams_at_once(hydra: None) -> None:
    rng, at = random.Random(3), 0.0
    rows = []
    for _ in range(1000):
        at += rng.expovariate(200)
        rows.append(Row(at, rng.randint(20, 200), rng.randint(60, 140)))
    config = configured(
        ["model=opt-13b", "memory.blocks=40000", "server.max_seqs=1024", "batching=unified"]
    )
    answers, seen = served(config, rows)
    for row, answer in zip(rows, answers, strict=True):
        assert answer.whole and answer.reason == "length"
        assert answer.text == "".join(f" {n}" for n in range(1, row.output + 1))
    spans = [(answer.sent, answer.times[-1]) for answer in answers]
    together = max(sum(begin <= at < end for begin, end in spans) for at, _ in spans)
    assert together > 900
    wanted = simulated(config, as_they_came(rows, seen))
    assert fmean(one.tpot for one in seen) == pytest.approx(
        fmean(one.tpot for one in wanted), rel=0.05
    )
    ttft = fmean(one.ttft for one in wanted)
    assert abs(fmean(one.ttft for one in seen) - ttft) <= max(0.05 * ttft, STEP)


@pytest.mark.slow
def test_an_urgent_request_is_served_as_soon_as_the_simulation_says(hydra: None) -> None:
    rng, at = random.Random(5), 0.0
    rows = []
    for number in range(240):
        at += rng.expovariate(30)
        rows.append(Row(at, rng.randint(50, 300), rng.randint(20, 60), priority=number % 4 and 1))
    urgent: dict[str, float] = {}
    for policy in ("fcfs", "priority"):
        config = configured(["model=llama-2-7b", "server.max_seqs=16", f"policy={policy}"])
        answers, seen = served(config, rows)
        assert all(answer.whole for answer in answers)
        wanted = simulated(config, as_they_came(rows, seen))
        for first in (True, False):
            mine = [number for number, row in enumerate(rows) if (row.priority == 0) is first]
            said = fmean(wanted[number].ttft for number in mine)
            got = fmean(seen[number].ttft for number in mine)
            assert abs(got - said) <= max(0.05 * said, STEP), (policy, first)
            if first:
                urgent[policy] = got
    assert urgent["priority"] < 0.5 * urgent["fcfs"]
