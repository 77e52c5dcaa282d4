"""A policy written from scratch: shortest job first, by what a predictor guessed."""

from collections.abc import Callable

import pytest

from pagedsim.core import (
    Memory,
    PagedMemory,
    Policy,
    PrefixMemory,
    Request,
    ReservedMax,
    ServerState,
)
from pagedsim.core.policy import RankChanges
from tests.core.drive import Server


class ShortestJobFirst(Policy):
    rank_changes: RankChanges = "never"

    def rank(self, request: Request, state: ServerState) -> float:
        return request.predicted_len or 0.0


LENGTHS = {"long": 9, "short": 2, "middle": 5, "shorter": 1}


@pytest.mark.parametrize("batching", ["prefill_first", "unified", "static"])
def test_the_shortest_goes_first(batching: str) -> None:
    server = Server(batching=batching, policy=ShortestJobFirst(), max_seqs=1)
    for name, length in LENGTHS.items():
        server.add(name, 4, output=length, predicted_len=length)
    assert server.waiting == ["shorter", "short", "middle", "long"]
    assert server.drain() == ["shorter", "short", "middle", "long"]


@pytest.mark.parametrize("batching", ["prefill_first", "unified", "static"])
def test_a_shorter_one_that_comes_later_overtakes_those_who_wait(batching: str) -> None:
    server = Server(batching=batching, policy=ShortestJobFirst(), max_seqs=1)
    server.add("running", 4, output=3, predicted_len=3)
    server.step()
    server.add("middle", 4, output=5, predicted_len=5)
    server.add("short", 4, output=2, predicted_len=2)
    assert server.drain() == ["running", "short", "middle"]


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("batching", ["prefill_first", "unified", "static"])
def test_the_longest_yields(batching: str, preemption: str) -> None:
    server = Server(
        6, cpu_blocks=4, batching=batching, preemption=preemption, policy=ShortestJobFirst()
    )
    for name in ("long", "short", "middle"):
        server.add(name, 8, output=LENGTHS[name], predicted_len=LENGTHS[name])
    server.step()
    assert server.step()["preempted"] == ["long"]
    assert server.drain() == ["middle", "long"]


@pytest.mark.parametrize(
    "make",
    [
        lambda: PagedMemory(64, 4),
        lambda: PrefixMemory(64, 4),
        lambda: ReservedMax(256, max_model_len=64),
    ],
    ids=["paged", "prefix", "reserved"],
)
@pytest.mark.parametrize("batching", ["prefill_first", "unified", "static"])
def test_it_takes_any_memory(batching: str, make: Callable[[], Memory]) -> None:
    memory = make()
    server = Server(memory=memory, batching=batching, policy=ShortestJobFirst(), max_seqs=2)
    for name, length in LENGTHS.items():
        server.add(name, 4, output=length, predicted_len=length)
    assert server.drain()[:2] == ["shorter", "short"]
    assert server.free == memory.total


def test_those_without_a_prediction_go_by_arrival() -> None:
    server = Server(policy=ShortestJobFirst())
    for name in "bca":
        server.add(name, 4)
    assert server.waiting == ["b", "c", "a"]
