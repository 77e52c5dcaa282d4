"""Transfers between replicas: by hand, and by queueing theory."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from math import ceil

import numpy as np
import pytest
import simpy
from hypothesis import given
from hypothesis import strategies as st

from pagedsim.cluster.link import Fabric, Network, UnknownLink
from pagedsim.cluster.placement import Option, best, limit, pair, placed
from pagedsim.sim.environment import Environment
from pagedsim.sim.hardware import Hardware
from tests.cluster.test_queueing import SEEDS, agrees, steady

GB = 1e9
Sent = tuple[float, int, int, float]
"""Time, source, target, GB."""


def ends(network: Network, sent: Sequence[Sent], seed: int = 0) -> tuple[list[float], Fabric]:
    """When each of some transfers is there, or given up."""
    environment = Environment()
    fabric = Fabric(environment, network, seed)
    over = [0.0] * len(sent)

    def one(index: int, at: float, source: int, target: int, gb: float) -> Events:
        yield environment.timeout(at)
        yield from fabric.send(source, target, gb * GB)
        over[index] = environment.now

    for index, each in enumerate(sent):
        environment.process(one(index, *each))
    environment.run()
    return over, fabric


Events = Generator[simpy.Event, None, None]


def test_a_transfer_takes_its_bytes_over_the_bandwidth_and_the_latency() -> None:
    (over,), fabric = ends(Network(2.0, latency_us=500), [(1.0, 0, 1, 3.0)])
    assert over == pytest.approx(1 + 1.5 + 0.0005)
    facts = {"transfers": 1, "bytes": 3e9, "seconds": 1.5005, "busy_s": 1.5}
    none = dict.fromkeys(("waiting_s", "retries", "lost"), 0)
    assert fabric.facts() == pytest.approx(facts | none)


@pytest.mark.parametrize("channels", [1, 2])
@pytest.mark.parametrize("sharing", ["fifo", "fair"])
@given(
    earlier=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 9)), max_size=6),
    at=st.integers(0, 40),
    gb=st.integers(1, 9),
)
def test_a_transfer_takes_as_long_as_foreseen(
    channels: int, sharing: str, earlier: list[tuple[int, int]], at: int, gb: int
) -> None:
    """First come, first served, it is known when it begins; of shares, that it takes no longer."""
    network = Network(1.0, latency_us=500, channels=channels, sharing=sharing)
    environment = Environment()
    fabric = Fabric(environment, network)

    def one(after: float, gb: float) -> Events:
        yield environment.timeout(after)
        yield from fabric.send(0, 1, gb * GB)

    def foreseen() -> Events:
        yield environment.timeout(at + 0.5)
        seconds = fabric.seconds(0, 1, gb * GB)
        yield from fabric.send(0, 1, gb * GB)
        took = environment.now - at - 0.5
        assert took == pytest.approx(seconds) or (sharing == "fair" and took < seconds)

    for after, size in earlier:
        if after <= at:
            environment.process(one(after, size))
    environment.run(environment.process(foreseen()))


@pytest.mark.parametrize(
    ("sharing", "expected"),
    [
        ("fifo", [2.0, 3.0]),
        # 0.5 s alone, then each half: the short one is over after 2 s more, when the long one
        # has 0.5 GB left.
        ("fair", [3.0, 2.5]),
    ],
)
def test_two_transfers_on_one_link(sharing: str, expected: list[float]) -> None:
    sent = [(0.0, 0, 1, 2.0), (0.5, 2, 3, 1.0)]
    over, fabric = ends(Network(1.0, topology="shared", sharing=sharing), sent)
    assert over == pytest.approx(expected)
    assert fabric.facts()["busy_s"] == pytest.approx(3)
    assert fabric.facts()["waiting_s"] == pytest.approx(sum(expected) - 0.5 - 3)
    assert ends(Network(1.0, sharing=sharing), sent)[0] == pytest.approx([2, 1.5])  # four NICs
    two_channels = Network(1.0, topology="shared", sharing=sharing, channels=2)
    assert ends(two_channels, sent)[0] == pytest.approx([2, 1.5])


def test_fair_shares_are_max_min() -> None:
    """Three into replica 9 get a third each, which leaves a sender two thirds for another."""
    sent = [(0, 0, 9, 1 / 3), (0, 1, 9, 1 / 3), (0, 2, 9, 1 / 3), (0, 0, 8, 2 / 3)]
    assert ends(Network(1.0, sharing="fair"), sent)[0] == pytest.approx([1, 1, 1, 1])


def test_within_a_node_there_are_links_of_its_own() -> None:
    network = Network(1.0, topology="shared", node_replicas=4, node_gb_s=10.0)
    sent = [(0, 0, 3, 10), (0, 4, 7, 10), (0, 3, 4, 1), (0, 7, 0, 1), (0, 2, 2, 5)]
    assert ends(network, sent)[0] == pytest.approx([1, 1, 1, 2, 0])


@pytest.mark.parametrize("sharing", ["fifo", "fair"])
def test_an_interrupted_transfer_frees_its_links(sharing: str) -> None:
    environment = Environment()
    fabric = Fabric(environment, Network(1.0, topology="shared", sharing=sharing))
    over: list[float] = []

    def one(gb: float) -> Events:
        try:
            yield from fabric.send(0, 1, gb * GB)
        except simpy.Interrupt:
            return
        over.append(environment.now)

    first, waiting = environment.process(one(10)), environment.process(one(10))
    environment.process(one(1))

    def interrupt() -> Events:
        yield environment.timeout(0.75)
        waiting.interrupt()
        first.interrupt()

    environment.process(interrupt())
    environment.run()
    assert over == pytest.approx([1.75 if sharing == "fifo" else 1.5])
    assert fabric.links["network", 0].idle_since == pytest.approx(over[0])


LOAD, SERVICE = 0.6, 0.5


def held(sharing: str, seed: int, count: int = 600) -> float:
    """Mean time from the request to the last byte, of Poisson transfers that are all alike."""
    arrivals = np.random.default_rng(seed).exponential(SERVICE / LOAD, count).cumsum()
    network = Network(1.0, topology="shared", sharing=sharing)
    over, _ = ends(network, [(float(at), 0, 1, SERVICE) for at in arrivals])
    return steady(np.array(over) - arrivals)


@pytest.mark.parametrize(
    ("sharing", "expected"),
    [
        ("fifo", SERVICE + LOAD * SERVICE / 2 / (1 - LOAD)),  # M/D/1
        ("fair", SERVICE / (1 - LOAD)),  # M/G/1 with processor sharing, whatever the lengths
    ],
)
def test_waiting_is_that_of_queueing_theory(sharing: str, expected: float) -> None:
    agrees((held(sharing, seed) for seed in SEEDS), expected, 0.2)


def gpu(name: str, network: float | None, interconnect: float = 32.0) -> Hardware:
    """A GPU with the links of its data sheet, in GB/s."""
    return Hardware(name, 80, 2000, 300, 32, interconnect_gb_s=interconnect, network_gb_s=network)


def test_without_a_bandwidth_of_its_own_a_link_has_that_of_the_hardware() -> None:
    fast, slow = gpu("fast", 50.0, 450.0), gpu("slow", 25.0, 300.0)

    def seconds(network: Network, source: int, target: int) -> float:
        environment = Environment()
        fabric = Fabric(environment, network, hardware=[fast, fast, slow, slow])
        environment.run(environment.process(fabric.send(source, target, 100 * GB)))
        return environment.now

    assert seconds(Network(), 0, 1) == 2.0
    assert seconds(Network(), 0, 2) == seconds(Network(), 2, 0) == 4.0  # as the slower one
    assert seconds(Network(10.0), 0, 2) == 10.0
    pairs = Network(node_replicas=2)
    assert seconds(pairs, 0, 1) == pytest.approx(100 / 450)
    assert seconds(pairs, 1, 2) == 4.0 and seconds(pairs, 2, 3) == pytest.approx(1 / 3)


def test_a_link_that_nothing_describes_is_refused() -> None:
    known, bare = gpu("known", 25.0), gpu("bare", None)
    wanted = r"fleet\.link\.bandwidth_gb_s=null: must be given, in GB/s"
    with pytest.raises(UnknownLink, match=rf"^{wanted} for each GPU: .* hardware=bare has"):
        Network().refuse_unknown([known, bare])
    with pytest.raises(UnknownLink, match=f"^{wanted}, with topology=shared"):
        Network(topology="shared").refuse_unknown([known, known])
    Network().refuse_unknown([known, known])
    Network(1.0, topology="shared").refuse_unknown([bare, bare])
    Network(node_replicas=2).refuse_unknown([bare, bare])  # both in one node


# -- distServe's arithmetic: which option, how many servers, and how much a GPU that is ------------


PREFILL = [Option("P1", 1, 0.5, 2.0), Option("P2", 2, 5.6, 4.0), Option("P4", 4, 10.0, 8.0)]
DECODE = [Option("D1", 1, 4.7, 2.0), Option("D2", 2, 9.0, 4.0), Option("none", 1, 0.0, 2.0)]


def test_a_rate_by_hand() -> None:
    """10/s: two servers of 5.6/s on two GPUs, and three of 4.7/s on one."""
    found = placed(10.0, PREFILL, DECODE)
    assert found is not None
    told = [(share.option.name, share.servers, share.gpus) for share in found.shares]
    assert told == [("P2", 2, 4), ("D1", 3, 3)]
    assert (found.gpus, found.per_gpu, found.euros_per_hour) == (7, 10 / 7, 2 * 4.0 + 3 * 2.0)
    assert limit(PREFILL, DECODE) == pytest.approx(1 / (1 / 2.8 + 1 / 4.7))


def test_a_pair_is_as_fast_as_its_slower_half() -> None:
    """Of P2 with D1 4.7/s on three GPUs, of P4 with D2 9/s on six, of P2 with D2 5.6/s on four."""
    found = pair(PREFILL, DECODE)
    assert found is not None
    assert [share.option.name for share in found.shares] == ["P2", "D1"]
    assert found.per_gpu == pytest.approx(4.7 / 3)
    found = pair(PREFILL, DECODE, gpus=2)
    assert found is not None
    assert ([share.option.name for share in found.shares], found.rate) == (["P1", "D1"], 0.5)


def test_where_nothing_meets_the_objective_nothing_is_placed() -> None:
    none = [Option("none", 1, 0.0)]
    assert best(none) is None
    assert best([]) is None
    assert placed(1.0, PREFILL, none) is None
    assert pair(PREFILL, none) is None
    assert pair(PREFILL, DECODE, gpus=1) is None
    assert limit(PREFILL, none) == limit([]) == 0.0


def test_of_equals_the_smaller_is_taken_and_a_price_that_is_missing_is_missed() -> None:
    options = [Option("two", 2, 4.0, 3.0), Option("one", 1, 2.0)]
    assert best(options) is options[1]
    found = placed(3.0, options)
    assert found is not None
    assert (found.gpus, found.euros_per_hour) == (2, None)


@given(
    rate=st.floats(0.01, 1000),
    goodput=st.floats(0.01, 100),
    gpus=st.integers(1, 8),
)
def test_servers_sustain_the_rate_and_one_less_does_not(
    rate: float, goodput: float, gpus: int
) -> None:
    found = placed(rate, [Option("any", gpus, goodput)])
    assert found is not None
    (share,) = found.shares
    assert share.servers * goodput >= rate * (1 - 1e-6)
    assert share.servers == 1 or (share.servers - 1) * goodput < rate
    assert share.servers in (ceil(rate / goodput), ceil(rate / goodput) - 1, 1)
    assert found.per_gpu <= limit([share.option]) * (1 + 1e-6)
