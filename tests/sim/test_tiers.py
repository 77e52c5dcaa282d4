"""Tiers below the GPU in simulated time: links, loads beside a step, and what a run tells."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from pagedsim.backends.base import StoppableRecorder
from pagedsim.build import make_scheduler
from pagedsim.core import Request, Scheduler, Tier, TieredMemory
from pagedsim.metrics.arms import Run
from pagedsim.policies.routing.simple import RoundRobin
from pagedsim.run.job import Job, run_job
from pagedsim.sim.cost import Roofline
from pagedsim.sim.tiering import TierSpec
from pagedsim.sim.tiers import Level, Link, Tiers, Way
from tests.cluster.fleets import served
from tests.run.studies import compose
from tests.sim.harness import Constant, Jobs, content, run
from tests.sim.shapes import replica

SECOND = Way(latency=0.0, block=1.0)
FREE = Way(0.0, 0.0)


# -- links -----------------------------------------------------------------------------------------


def test_reads_and_writes_go_beside_each_other_but_what_is_read_must_have_come() -> None:
    link = Link(read=SECOND, write=Way(0.0, 10.0))
    assert link.write([1, 2], now=0.0) == 20.0
    assert link.read([5, 6], now=1.0) == 3.0
    assert link.read([2], now=4.0) == 21.0
    assert link.read([2], now=30.0) == 31.0


# -- a server --------------------------------------------------------------------------------------


@dataclass
class Texts(Jobs):
    """Jobs that say what is in their prompts: (arrival, prompt, output), of text `texts[i]`."""

    texts: list[int] = field(default_factory=list)

    def requests(self) -> Any:
        for (request, output), text in zip(super().requests(), self.texts, strict=True):
            tokens = [text * 1000 + at for at in range(request.prompt_len)]
            yield Request(request.id, tokens, arrival=request.arrival), output


TWICE = Texts([(0.0, 13, 1), (10.0, 13, 1), (20.0, 13, 1)], texts=[1, 2, 1])


def server(*links: Link, layers: int | None = None, **more: Any) -> tuple[Scheduler, Tiers]:
    """Four blocks of 4 tokens on the GPU, over tiers with these links."""
    names = ("cpu", "disk")
    levels = [Level(Tier(n, 8), link) for n, link in zip(names, links, strict=False)]
    memory = TieredMemory(more.pop("blocks", 4), 4, [level.tier for level in levels])
    return make_scheduler(memory=memory, **more), Tiers(levels, layers)


def lasted(steps: Any) -> list[float]:
    """Seconds of each step that did anything."""
    seconds = [row["end"] - row["start"] for row in steps.to_pylist()]
    return [one for one in seconds if one]


@pytest.mark.parametrize("ahead", [False, True])
def test_a_step_waits_for_what_it_loads_and_not_for_what_it_writes(ahead: bool) -> None:
    scheduler, tiers = server(Link(read=SECOND, write=SECOND), async_scheduling=ahead)
    requests, steps = run(scheduler, TWICE, Constant(2.0), tiers=tiers)
    assert lasted(steps) == [2.0, 2.0, 5.0]
    rows = [row for row in steps.to_pylist() if row["end"] > row["start"]]
    assert [row["loaded_cpu"] for row in rows] == [0, 0, 3]
    assert [row["written_cpu"] for row in rows] == [0, 3, 3]
    assert requests["cached_tokens"].to_pylist() == [0, 0, 12]


def test_a_load_waits_for_the_write_of_its_blocks() -> None:
    scheduler, tiers = server(Link(read=SECOND, write=Way(0.0, 10.0)))
    _, steps = run(scheduler, TWICE, Constant(2.0), tiers=tiers)
    # Written from 10 s on for 30 s, while the third comes at 20; then 3 s of loading and the step.
    assert steps["end"].to_pylist()[-1] == 40.0 + 3.0 + 2.0


def test_what_is_swapped_beyond_the_cpu_takes_the_disk_s_time_as_well() -> None:
    def made(cpu: int) -> list[dict[str, Any]]:
        levels = [
            Level(Tier("cpu", cpu), Link(FREE, FREE)),
            Level(Tier("disk", 8), Link(read=SECOND, write=SECOND)),
        ]
        memory = TieredMemory(4, 4, [level.tier for level in levels])
        scheduler = make_scheduler(memory=memory, preemption="swap", batching="unified")
        jobs = Jobs([(0.0, 6, 8), (0.0, 6, 8)])
        _, steps = run(scheduler, jobs, Constant(1.0, block=0.25), tiers=Tiers(levels))
        return list(steps.to_pylist())

    (wide,) = (row for row in made(8) if row["swap_in"])
    (narrow,) = (row for row in made(1) if row["swap_in"])
    blocks = wide["swap_in"]
    assert blocks == narrow["swap_in"] > 1
    assert wide["end"] - wide["start"] == 1.0 + 0.25 * blocks
    assert narrow["end"] - narrow["start"] == 1.0 + (blocks - 1)  # the disk is the slower one


def test_replicas_that_share_a_tier_live_in_one_time() -> None:
    """What one has written the other finds from then on, and not before."""
    times, texts = (0, 1, 30, 31, 60, 61, 90, 91), [1, 2, 3, 4, 2, 1, 5, 6]
    jobs = Texts([(float(at), 13, 1) for at in times], texts=texts)

    def tables(together: bool) -> list[list[object]]:
        pool = Tier("pool", 16)
        memories = [TieredMemory(4, 4, [pool]) for _ in range(2)]
        schedulers = [make_scheduler(memory=memory) for memory in memories]
        requests, steps = served(schedulers, jobs, RoundRobin(), together=together)
        assert requests["cached_tokens"].to_pylist() == [0, 0, 0, 0, 12, 12, 0, 0]
        return [content(requests), [batch.to_pydict() for batch in steps.to_batches()]]

    assert tables(together=False) == tables(together=True)


# -- from the configuration ------------------------------------------------------------------------

CHATS = (
    *("experiment=single", "memory=tiered", "workload=chat_sessions", "workload.sessions=10"),
    *("workload.rate=2", "memory.blocks=260", "model=llama-3.1-8b", "hardware=h100"),
)


def summary_of(folder: Path, *words: str) -> dict[str, Any]:
    config: Any = OmegaConf.to_container(compose("config", overrides=[*words]), resolve=True)
    made = run_job(Job("arm", 0, config, folder), StoppableRecorder())
    assert isinstance(made, Run), made
    return dict(made.summary)


@pytest.mark.usefixtures("hydra")
def test_nothing_is_loaded_that_is_cheaper_to_compute(tmp_path: Path) -> None:
    slow = "memory.tiers.cpu.read_gb_s=0.1"
    always = summary_of(tmp_path, *CHATS, slow)
    never = summary_of(tmp_path, *CHATS, slow, "memory.load=cheaper")
    assert always["loaded_tokens"] > never["loaded_tokens"] == 0
    assert always["ttft_mean"] > 2 * never["ttft_mean"]


@pytest.mark.slow
@pytest.mark.usefixtures("hydra")
def test_replicas_of_a_fleet_may_share_a_pool(tmp_path: Path) -> None:
    """Sent round robin, a turn finds what its session left only where all replicas look."""
    words = [*CHATS, "fleet.replicas=3", "router=round_robin", "memory.tiers.cpu.gib=0"]
    words += ["memory.tiers.remote.gib=64", "memory.write=through", "workload.prefixes=null"]
    alone = summary_of(tmp_path, *words)
    shared = summary_of(tmp_path, *words, "memory.tiers.remote.shared=true")
    assert shared["cached_tokens"] > 1.5 * alone["cached_tokens"]
    assert shared["loaded_tokens"] > 1.5 * alone["loaded_tokens"]


@pytest.mark.usefixtures("hydra")
@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("memory.tiers.disk.gib=-1", "memory.tiers.disk.gib=-1: must be a number of at least 0"),
        ("memory.tiers.cpu.read_gb_s=0", "memory.tiers.cpu.read_gb_s=0: must be a number above 0"),
        ("+memory.tiers.cpu.gb=1", "memory.tiers.cpu.gb: no such setting of a tier"),
        ("memory.tiers=4", "memory.tiers=4: must be a mapping of names to settings"),
        ("memory.load=cheap", "memory.load=cheap: unknown; did you mean 'cheaper'?"),
        ("memory.layerwise=1", "memory.layerwise=1: must be true or false"),
        ("+memory.cpu_blocks=9", "memory.cpu_blocks=9: memory=tiered swaps to its tiers"),
        ("memory.tiers.cpu.gib=0", "memory.tiers: must have at least one with gib or blocks"),
    ],
)
def test_impossible_tiers_are_refused(word: str, said: str, tmp_path: Path) -> None:
    words = [*CHATS, "preemption=swap", word]
    config: Any = OmegaConf.to_container(compose("config", overrides=words), resolve=True)
    made = run_job(Job("arm", 0, config, tmp_path), StoppableRecorder())
    assert said in str(made)
    assert "\n" not in str(made)


@pytest.mark.parametrize(
    ("read", "blocks", "seconds"),
    [
        (None, 10, 10 * 2**21 / (64e9 * 0.8) + 50e-6),  # PCIe, and 5 µs a copy
        (6.5, 10, 1e-4 + 10 * 2**21 / 6.5e9),
        (900.0, 10, 1e-4 + 10 * 2**21 / (64e9 * 0.8) + 50e-6),  # no faster than the bus
    ],
)
def test_times_come_from_data_sheets(read: float | None, blocks: int, seconds: float) -> None:
    served = replica("llama-3.1-8b", "h100")
    latency = 0 if read is None else 100
    one = TierSpec("x", blocks=100, read_gb_s=read, latency_us=latency)
    link = one.level(served, Roofline(served)).link
    assert link.reading.seconds(blocks) == pytest.approx(seconds)
    assert TierSpec("x", gib=1).size(served) == 512  # blocks of 2 MiB
