"""A storage below SGLang's host tier in simulated time: what is fetched and backed up, and when."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from pagedsim.core import Request, Scheduler
from pagedsim.metrics.recorder import Recorder
from pagedsim.sglang import PrefetchSettings, SGLang, StoredHiCache
from pagedsim.sim import storage
from pagedsim.sim.links import Link, Way
from pagedsim.sim.simulate import simulate
from pagedsim.sim.storage import StorageJobs
from pagedsim.sim.store import Store
from pagedsim.sim.transfers import Transfers
from tests.sim.harness import Constant, Jobs
from tests.sim.test_transfers import Even

LONG = [1000 + at for at in range(84)]
"""A prompt of ten pages and a half."""


class Given(Jobs):
    """Requests with their output lengths."""

    def __init__(self, *given: tuple[Request, int]) -> None:
        super().__init__(())
        self.given = given

    def requests(self) -> Iterator[tuple[Request, int]]:
        yield from self.given


def store(pages: float = float("inf")) -> Store:
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
