"""A storage below SGLang's host tier in simulated time: what is fetched and backed up, and when."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from pagedsim.backends.base import StoppableRecorder
from pagedsim.core import PagedsimError, Request, Scheduler
from pagedsim.metrics.arms import Run
from pagedsim.metrics.recorder import Recorder
from pagedsim.run.job import Job, run_job
from pagedsim.sglang import PrefetchSettings, SGLang, StoredHiCache
from pagedsim.sim import storage
from pagedsim.sim.environment import Environment
from pagedsim.sim.server import Server
from pagedsim.sim.simulate import simulate
from pagedsim.sim.storage import StorageJobs
from pagedsim.sim.store import Link, Store, Way
from pagedsim.sim.transfers import Transfers
from tests.run.studies import compose
from tests.sim.harness import Constant, Jobs
from tests.sim.test_transfers import Even

LONG = [1000 + at for at in range(84)]
"""A prompt of ten pages and a half."""

WAIT = PrefetchSettings(policy="wait_complete", threshold=8)


class Given(Jobs):
    """Requests with their output lengths."""

    def __init__(self, *given: tuple[Request, int]) -> None:
        super().__init__(())
        self.given = given

    def requests(self) -> Iterator[tuple[Request, int]]:
        yield from self.given


def store(pages: float = inf) -> Store:
    """Look-ups and transfers begin after 0.25 s; a page takes half a second, and is one byte."""
    return Store(Link(Way(0.25, 2.0), Way(0.25, 2.0)), 1.0, pages)


def served(content: Store, *given: tuple[Request, int], **how: Any) -> tuple[StoredHiCache, Any]:
    """The memory of a server of one sequence that has served these requests, and its steps."""
    fast_forward = how.pop("fast_forward", True)
    prefetch = PrefetchSettings(threshold=8, **how)
    memory = StoredHiCache(60, 8, host_blocks=80, prefetch=prefetch)
    scheduler = Scheduler(memory=memory, batching=SGLang(), max_seqs=1)
    recorder = Recorder()
    simulate(
        scheduler,
        Given(*given),
        Constant(),
        recorder,
        transfers=Transfers(Even(0.1)),
        storage=StorageJobs(content, memory),
        fast_forward=fast_forward,
    )
    scheduler.check()
    assert not scheduler.transferring
    return memory, recorder.steps_table()


@pytest.mark.parametrize(
    ("policy", "first_token", "cached"),
    [
        ("best_effort", 105.0 + 1.0 + 0.4, 32),
        ("timeout", 107.0 + 1.0 + 0.8, 64),
        ("wait_complete", 107.75 + 1.0 + 1.0, 80),
    ],
)
@pytest.mark.parametrize("fast_forward", [True, False])
def test_what_a_prompt_waits_for(
    monkeypatch: pytest.MonkeyPatch, policy: Any, first_token: float, cached: int, fast_forward: Any
) -> None:
    monkeypatch.setattr(storage, "PART", 4)
    content = store()
    served(content, (Request("writer", LONG), 1))
    # The look-up begins with the step at 101, and the fetch with the one at 102, whose parts of
    # four, four and two pages arrive at 104.25, 106.5 and 107.75. The other request leaves the seat
    # at 105. What has arrived is loaded in 0.1 s a page, of one layer, and the rest takes 1 s.
    other = Request("other", range(3), arrival=100.0)
    reader = Request("reader", LONG, arrival=100.5)
    settings = {"timeout_base": 2.0, "timeout_per_ki_token": 0.0} if policy == "timeout" else {}
    settings |= {"policy": policy, "fast_forward": fast_forward}
    _, steps = served(content, (other, 5), (reader, 1), **settings)
    assert reader.first_token_at == pytest.approx(first_token)
    assert reader.cached_tokens == cached
    assert sum(steps["loaded_storage"].to_pylist()) == cached // 8
    assert sum(steps["loaded_host"].to_pylist()) == cached // 8


def test_what_is_backed_up_may_leave_no_memory() -> None:
    # The third prompt takes the GPU from the second half of the second one, which goes to the host
    # and is being backed up. The first half has no room there, and what is below it must stay.
    memory = StoredHiCache(12, 8, host_blocks=5, write_policy="write_back", prefetch=WAIT)
    scheduler = Scheduler(memory=memory, batching=SGLang())
    prompts = LONG[:41], LONG[:81], range(60)
    requests = [Request(n, prompt, arrival=5.0 * n) for n, prompt in enumerate(prompts)]
    given, copies = Given(*((request, 1) for request in requests)), Transfers(Even())
    jobs = StorageJobs(Store(Link(Way(1.0, 1.0), Way(100.0, 1.0)), 1.0), memory)
    with pytest.raises(PagedsimError, match="host tier more room, or choose write_policy=write_th"):
        simulate(scheduler, given, Constant(), Recorder(), transfers=copies, storage=jobs)


def test_a_crash_loses_jobs_and_not_what_is_stored() -> None:
    memory = StoredHiCache(60, 8, host_blocks=80, prefetch=WAIT)
    scheduler = Scheduler(memory=memory, batching=SGLang())
    environment, content = Environment(), store()
    copies, jobs = Transfers(Even(0.1)), StorageJobs(content, memory)
    how = Constant(), Recorder()
    server = Server(environment, scheduler, *how, transfers=copies, storage=jobs)
    server.submit(Request("writer", LONG), 1)
    environment.run(8.0)  # all ten pages are there at 1 + 1 + 0.25 + 5
    assert server.crash() == []
    reader = Request("reader", LONG)
    server.submit(reader, 1)
    environment.run(10.0)  # its fetch ends at 8 + 0.25 + 0.25 + 5
    assert server.crash() == [reader] and jobs.next_end == inf
    scheduler.check()
    assert not scheduler.transferring and memory.host_free == 80
    again = Request("again", LONG, arrival=10.0)
    server.submit(again, 1)
    server.close()
    environment.run()
    assert again.cached_tokens == 80
    # It is fetched when what was being read is there, and then loaded and computed.
    assert again.first_token_at == pytest.approx(13.5 + 0.25 + 5.0 + 2.0)
    scheduler.check()


@pytest.mark.usefixtures("hydra")
def test_replicas_of_a_fleet_may_share_a_storage(tmp_path: Path) -> None:
    """Sent round robin, a turn finds what its session left only where all replicas look."""
    words = [
        *("experiment=single", "workload=chat_sessions", "workload.sessions=10", "workload.rate=2"),
        *("workload.prefixes=null", "model=llama-3.1-8b", "hardware=h100", "server=sglang-0.5"),
        *("offload=hicache", "memory.block_size=16", "memory.blocks=260", "offload.ratio=2"),
        *("offload.storage.gib=64", "fleet=alike", "fleet.replicas=3", "router=round_robin"),
    ]

    def summary(*more: str) -> dict[str, Any]:
        composed = compose("config", overrides=[*words, *more])
        config: Any = OmegaConf.to_container(composed, resolve=True)
        run = run_job(Job("arm", 0, config, tmp_path), StoppableRecorder())
        assert isinstance(run, Run), run
        return dict(run.summary)

    alone, shared = summary(), summary("offload.storage.shared=true")
    assert alone["tiers"]["storage"]["loaded_tokens"] == 0  # a replica's host tier has it all
    assert shared["tiers"]["storage"]["loaded_tokens"] > 5000
    assert shared["cached_tokens"] > 1.3 * alone["cached_tokens"]
