"""A thousand streams at once take as long as their simulation says, and lose nothing."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Literal

import pytest
from hydra import compose
from omegaconf import OmegaConf

from pagedsim.core import Request, SamplingParams
from pagedsim.metrics.recorder import Recorder
from pagedsim.run.parts import backend_of
from pagedsim.run.simulated import Simulation
from pagedsim.sim.simulate import simulate
from tests.serve.children import Answer, ask, listening


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

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = rows

    def requests(self) -> Iterator[tuple[Request, int]]:
        for number, row in enumerate(self.rows):
            params = SamplingParams(max_tokens=row.output)
            prompt = [5] * row.prompt
            yield (
                Request(number, prompt, params, arrival=row.arrival, priority=row.priority),
                row.output,
            )


@dataclass(frozen=True)
class Times:
    """Of one request, in seconds."""

    ttft: float
    tpot: float


def simulated(words: Sequence[str], rows: Sequence[Row]) -> list[Times]:
    """What `experiment=single` finds of these requests."""
    config: Any = OmegaConf.to_container(compose("serve", overrides=list(words)), resolve=True)
    stage = backend_of(config).stage(config, 0)
    assert isinstance(stage, Simulation)
    recorder = Recorder()
    simulate(stage.scheduler, Rows(rows), stage.cost, recorder, **stage.settings)
    table = recorder.requests_table()
    columns = [table[name].to_pylist() for name in ("first_token", "finished", "arrival")]
    return [
        Times(first - arrival, (end - first) / (row.output - 1))
        for first, end, arrival, row in zip(*columns, rows, strict=True)
    ]


async def sent(url: str, rows: Sequence[Row]) -> tuple[list[Answer], float]:
    """What came of each, sent when it is to come; and how late this loop was, on average."""
    late: list[float] = []
    begun = time.perf_counter() + 0.2

    async def client(row: Row) -> Answer:
        await asyncio.sleep(begun + row.arrival - time.perf_counter())
        late.append(time.perf_counter() - begun - row.arrival)
        return await ask(url, prompt=[5] * row.prompt, max_tokens=row.output, priority=row.priority)

    return await asyncio.gather(*map(client, rows)), fmean(late)


def differ(got: Sequence[float], wanted: Sequence[float]) -> float:
    """By how much the mean differs, as a part of what is wanted."""
    return fmean(got) / fmean(wanted) - 1


@pytest.mark.slow
def test_a_thousand_streams_at_once(hydra: None) -> None:
    """Within 5 % of the simulation, or of how late the machine lets this client be."""
    rng, at = random.Random(3), 0.0
    rows = []
    for _ in range(1000):
        at += rng.expovariate(200)
        rows.append(Row(at, rng.randint(20, 200), rng.randint(60, 140)))
    words = (
        *("model=opt-13b", "memory.blocks=40000", "server.max_seqs=1024"),
        "batching=unified",
    )
    wanted = simulated(words, rows)
    with listening(*words) as child:
        answers, late = asyncio.run(sent(child.url, rows))
    spans = [(answer.sent, answer.times[-1]) for answer in answers]
    together = max(sum(begin <= at < end for begin, end in spans) for at, _ in spans)
    assert together > 900
    for row, answer in zip(rows, answers, strict=True):
        assert answer.whole and answer.reason == "length"
        assert answer.text == "".join(f" {n}" for n in range(1, row.output + 1))
    ttfts, tpots = [one.ttft for one in answers], [one.tpot for one in answers]
    ttft, tpot = [one.ttft for one in wanted], [one.tpot for one in wanted]
    told = f"TTFT {differ(ttfts, ttft):+.1%}, TPOT {differ(tpots, tpot):+.1%}, {late:.3f} s late"
    print(told)
    assert abs(fmean(ttfts) - fmean(ttft)) <= max(0.05 * fmean(ttft), 2 * late), told
    assert abs(differ(tpots, tpot)) <= 0.05, told


@pytest.mark.slow
def test_an_urgent_request_is_served_as_soon_as_the_simulation_says(hydra: None) -> None:
    rng, at = random.Random(5), 0.0
    rows = []
    for number in range(240):
        at += rng.expovariate(30)
        rows.append(Row(at, rng.randint(50, 300), rng.randint(20, 60), priority=number % 4 and 1))
    urgent = [row.priority == 0 for row in rows]
    ttfts: dict[str, list[float]] = {}
    for policy in ("fcfs", "priority"):
        words = ("model=llama-2-7b", "server.max_seqs=16", f"policy={policy}")
        wanted = [one.ttft for one in simulated(words, rows)]
        with listening(*words) as child:
            answers, late = asyncio.run(sent(child.url, rows))
        got = [answer.ttft for answer in answers]
        for of in (True, False):
            mine = [one for one, mark in zip(got, urgent, strict=True) if mark is of]
            said = [one for one, mark in zip(wanted, urgent, strict=True) if mark is of]
            told = f"{policy}, {of}: {fmean(mine):.3f} s, simulated {fmean(said):.3f} s"
            print(told)
            assert abs(fmean(mine) - fmean(said)) <= max(0.05 * fmean(said), 0.01 + 2 * late), told
        ttfts[policy] = [one for one, mark in zip(got, urgent, strict=True) if mark]
    assert fmean(ttfts["priority"]) < 0.5 * fmean(ttfts["fcfs"])
