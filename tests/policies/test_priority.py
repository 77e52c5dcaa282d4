"""`policy=priority`: a smaller number goes first, and earlier among equals."""

import pytest

from policies.ordering import Priority
from tests.core.drive import Server


@pytest.mark.parametrize("batching", ["prefill_first", "unified", "static"])
def test_the_urgent_go_first_and_by_arrival_among_equals(batching: str) -> None:
    server = Server(batching=batching, policy=Priority(displace=False), max_seqs=1)
    for name, priority in (("a", 5), ("b", 1), ("c", 5), ("d", 1), ("e", -2.5)):
        server.add(name, 4, priority=priority, output=2)
    assert server.waiting == ["e", "b", "d", "a", "c"]
    assert server.drain() == ["e", "b", "d", "a", "c"]


def test_arrival_counts_before_the_order_of_adding() -> None:
    server = Server(policy=Priority(displace=False))
    server.add("added first", 4, arrival=3.0)
    server.add("came first", 4, arrival=1.0)
    assert server.waiting == ["came first", "added first"]


@pytest.mark.parametrize("displace", [None, True, False])
@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("batching", ["prefill_first", "unified"])
def test_all_are_served_in_the_end(batching: str, preemption: str, displace: bool | None) -> None:
    """Eight of mixed urgency arrive over time at memory for three: no request is lost or stuck."""
    server = Server(
        8, cpu_blocks=6, batching=batching, preemption=preemption, policy=Priority(displace)
    )
    ended: list[str] = []
    for number in range(8):
        server.add(str(number), 4 + number, priority=(number * 5) % 4, output=9)
        ended += server.step().get("finished", [])
    ended += server.drain()
    assert sorted(ended) == [str(number) for number in range(8)]
    assert (server.free, server.memory.cpu_free) == (8, 6)


def test_the_most_urgent_is_never_preempted() -> None:
    server = Server(6, batching="unified", policy="priority")
    for name in "abc":
        server.add(name, 8, priority=ord(name), output=12)
    requests = dict(server.scheduler.requests)
    assert server.drain() == ["a", "b", "c"]
    assert requests["a"].preemptions == 0
    assert requests["c"].preemptions > 0
