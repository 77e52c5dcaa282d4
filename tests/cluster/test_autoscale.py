"""Replicas start and stop with what there is to do. Steps take a second."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from math import inf
from typing import Any, ClassVar

import pytest

from pagedsim.cluster.autoscale import Autoscale
from pagedsim.cluster.dispatcher import Dispatcher
from pagedsim.cluster.failures import ListedOutages
from pagedsim.cluster.link import Network
from pagedsim.cluster.replica import ReplicaState
from pagedsim.core import ConfigError, PrefixMemory, Request, Scheduler, Unified
from pagedsim.core.offload import OffloadConnector
from pagedsim.policies.autoscaling import Autoscaler, ScalingView
from pagedsim.policies.routing.router import Router
from pagedsim.policies.routing.simple import Central, LeastRequests, RoundRobin
from pagedsim.sglang import HiCache, SGLang
from pagedsim.sim.transfers import Transfers
from pagedsim.spec.run import autoscale_of
from tests.cluster.fleets import rule as rule_of
from tests.cluster.fleets import server, whole
from tests.core.refusals import refusal
from tests.sim.harness import Constant, Jobs
from tests.sim.test_transfers import Even

scheduler = partial(server, max_seqs=1)
queue = partial(rule_of, "queue")
Spans = list[list[tuple[float, float]]]


def scaled(
    rows: list[tuple[float, int, int]],
    rule: Autoscale,
    *schedulers: Scheduler,
    router: Router | None = None,
    step: float = 1.0,
    outages: dict[int, list[tuple[float, float]]] | None = None,
    **more: Any,
) -> tuple[Dispatcher, Spans, dict[str, list[Any]]]:
    """The dispatcher, when each replica was paid for, and the requests, which all finish."""
    if outages is not None:
        more["failures"] = ListedOutages(outages)
    dispatcher, recorder = whole(
        schedulers or [scheduler(), scheduler()],
        Jobs(rows),
        router or LeastRequests(),
        Constant(step),
        autoscale=rule,
        **more,
    )
    requests = recorder.requests_table().to_pydict()
    assert set(requests["state"]) == {"finished"}
    return dispatcher, dispatcher.states.paid(), requests


def hicache() -> Scheduler:
    memory = HiCache(64, 4, host_blocks=200, write_policy="write_through")
    return Scheduler(memory=memory, batching=SGLang(), max_seqs=2)


def offloading() -> Scheduler:
    return Scheduler(
        memory=PrefixMemory(64, 4),
        batching=Unified(),
        connector=OffloadConnector(200),
        max_seqs=2,
    )


class Texts(Jobs):
    """Prompts of five texts, one after another."""

    def requests(self) -> Iterator[tuple[Request, int]]:
        for number, (arrival, tokens, answer) in enumerate(self.rows):
            prompt = [1000 * (number % 5) + token for token in range(tokens)]
            yield Request(number, prompt, arrival=arrival), answer


@pytest.mark.parametrize("make", [hicache, offloading])
@pytest.mark.parametrize("seconds", [0.01, 1.5])
def test_a_replica_that_stops_loses_its_host_tier_and_what_is_being_copied(
    make: Callable[[], Scheduler], seconds: float
) -> None:
    rows = [(start + 0.5 * n, 40, 3) for start in (0.0, 1000.0) for n in range(40)]
    schedulers = [make() for _ in range(3)]
    _, recorder = whole(
        schedulers,
        Texts(rows),
        RoundRobin(),
        Constant(),
        server=[{"transfers": Transfers(Even(seconds))} for _ in schedulers],
        autoscale=queue(up=1.0, down=0.5, interval_s=2.0, startup_s=2.0),
    )
    requests = recorder.requests_table().to_pylist()
    late = [row for row in requests if row["arrival"] >= 1000]
    began = {row["replica"]: row for row in sorted(late, key=lambda row: -row["scheduled"])}
    assert len(began) == 3
    stopped = [row for replica, row in began.items() if replica]
    assert not any(row["host_hit_tokens"] or row["gpu_hit_tokens"] for row in stopped)
    assert any(row["host_hit_tokens"] or row["gpu_hit_tokens"] for row in late)


def test_one_starts_where_many_wait_and_drains_where_few_do() -> None:
    """Five requests of four steps come at once, to one that serves one at a time."""
    rows = [(0.0, 3, 4)] * 5 + [(6.0, 3, 4), (30.0, 3, 1)]
    rule = queue(up=2.0, down=0.5, interval_s=2.0, startup_s=3.0)
    _, paid, requests = scaled(rows, rule)
    assert requests["replica"] == [0, 0, 0, 0, 0, 1, 0]
    assert requests["finished"] == [4.0, 8.0, 12.0, 16.0, 20.0, 10.0, 31.0]
    # It is paid for from its start. Until 16 s one waits at two, which is no less than 0.5.
    assert paid == [[(0.0, inf)], [(2.0, 18.0)]]


@pytest.mark.parametrize(("rule", "up", "down"), [("kv", 0.5, 0.1), ("freeness", 8.0, 30.0)])
def test_memory_that_fills_starts_another(rule: str, up: float, down: float) -> None:
    rows = [(0.1 * n, 40, 10) for n in range(90)]
    three = [scheduler(max_seqs=8) for _ in range(3)]
    made = rule_of(rule, up=up, down=down, interval_s=1.0, startup_s=1.0)
    _, paid, requests = scaled(rows, made, *three, step=0.2)
    assert set(requests["replica"]) == {0, 1, 2}
    assert paid[2]


def test_a_failed_replica_is_replaced() -> None:
    rule = queue(up=100.0, down=0.1, interval_s=1.0, startup_s=2.0)
    rows = [(float(n), 3, 2) for n in range(30)]
    _, paid, _ = scaled(rows, rule, router=RoundRobin(), step=0.1, outages={0: [(5.5, 1000.0)]})
    assert paid[1] == [(6.0, inf)]


def test_the_last_that_drains_is_taken_back() -> None:
    """Replicas 1 and 2 drain, with long requests; then many wait, and 2 is up again first."""
    rows = [(0.0, 3, 40)] * 3 + [(12.25, 3, 4)] * 6
    rule = queue(up=1.0, down=0.5, interval_s=5.0, startup_s=50.0, min_replicas=1)

    def begin(dispatcher: Dispatcher) -> None:
        for replica in dispatcher.replicas:
            dispatcher.bring_up(replica)

    three = [scheduler() for _ in range(3)]
    dispatcher, _, _ = scaled(rows, rule, *three, router=RoundRobin(), begins=begin)
    up = [dispatcher.states._past[index] for index in (1, 2)]
    back = [
        [begin for what, begin, _ in one if what is ReplicaState.UP and begin > 0] for one in up
    ]
    assert back[1] == [15.0] and (not back[0] or back[0][0] > 15.0)


class Script(Autoscaler):
    """As many replicas as are written down for the time."""

    wanted: ClassVar = {5.0: 1, 10.0: 3}

    def desired(self, view: ScalingView) -> int:
        return self.wanted.get(view.now, len(view.replicas))


def test_only_those_start_that_the_draining_ones_do_not_make_up_for() -> None:
    """At 10 s two more are wanted: replica 1, which drains since 5 s, and one that is off."""

    def begin(dispatcher: Dispatcher) -> None:
        dispatcher.bring_up(dispatcher.replicas[1])

    rule = Autoscale(Script, interval_s=5.0, startup_s=1.0)
    four = [scheduler() for _ in range(4)]
    _, paid, _ = scaled([(0.0, 3, 40)] * 2, rule, *four, router=RoundRobin(), begins=begin)
    assert paid == [[(0.0, inf)], [(0.0, inf)], [(10.0, inf)], []]


def test_a_replica_a_step_ahead_stops_when_its_last_step_has_ended() -> None:
    """It drains from 2.5 on. Its request ends with the step that ends at 5, when another is under
    way; at 7.5 that has ended, too."""
    rule = queue(up=99.0, down=0.5, interval_s=2.5)
    pair = [scheduler(batching="unified", async_scheduling=True) for _ in range(2)]

    def begin(dispatcher: Dispatcher) -> None:
        dispatcher.bring_up(dispatcher.replicas[1])

    rows = [(0.0, 3, 12), (0.0, 3, 5)]
    _, paid, requests = scaled(rows, rule, *pair, router=RoundRobin(), begins=begin)
    assert requests["finished"] == [12.0, 5.0]
    assert paid[1] == [(0.0, 7.5)]


# -- roles -----------------------------------------------------------------------------------------

APART = ("prefill", "prefill", "decode", "decode")


def began(paid: Spans) -> list[float | None]:
    return [spans[0][0] if spans else None for spans in paid]


def test_each_role_has_a_rule_of_its_own() -> None:
    """One replica of each role is up at first; prompts wait, and a second one starts for them."""
    rule = queue(up=2.0, down=0.1, interval_s=2.0, startup_s=1.0)
    four = [scheduler(max_seqs=4) for _ in range(4)]
    rows = [(0.5 * n, 8, 2) for n in range(40)]
    more: dict[str, Any] = {"router": RoundRobin(), "step": 1.5, "network": Network(1.0)}
    _, paid, _ = scaled(rows, rule, *four, roles=APART, **more)
    first = began(paid)
    assert first[0] == first[2] == 0.0
    assert first[1] and first[3] is None


def test_what_waits_to_decode_starts_a_replica_that_decodes() -> None:
    """Prompts are computed at once; one of four slots is free for those that decode."""
    rule = queue(up=2.0, down=0.1, interval_s=2.0, startup_s=1.0)
    four = [scheduler(max_seqs=8) for _ in range(4)]
    more: dict[str, Any] = {"router": Central(slots=1), "network": Network(1.0)}
    _, paid, _ = scaled([(0.0, 8, 20)] * 8, rule, *four, roles=APART, **more)
    first = began(paid)
    assert first[3] and (first[1] is None or first[3] > first[1])


def test_at_least_so_many_of_each_role() -> None:
    made = autoscale_of({**KV, "min_replicas": 2}, 0)
    assert made is not None
    made.refuse_small({"prefill": 2, "decode": 2})
    with pytest.raises(ConfigError, match=r"the fleet has 1 replicas with role=decode"):
        made.refuse_small({"prefill": 2, "decode": 1})


KV = {"rule": "kv", "up": 0.9, "down": 0.2}


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"rule": f"{__name__}.Both"}, "the path of a class is fleet.autoscale._target_"),
        ({"min_replicas": 2}, "fleet.autoscale.min_replicas | needs rule or _target_ beside it"),
        ({**KV, "upp": 3}, "autoscale.upp | no such setting of fleet.autoscale._target_=pagedsim"),
        ({**KV, "startups": 3}, "did you mean 'startup_s'? | choose from down, interval_s"),
        ({**KV, "_target_": "a.B"}, "fleet.autoscale.rule=kv | null beside _target_=a.B"),
        ({"_target_": "a.B"}, "fleet.autoscale._target_=a.B | no module 'a'"),
        ({"_target_": "pagedsim.core.FCFS"}, "fleet.autoscale._target_=pagedsim.core.FCFS"),
        ({**KV, "down": None}, "fleet.autoscale.down | must be given"),
        ({"rule": "queue", "up": 2}, "down"),
        ({"rule": "queue", "up": 1, "down": 1}, "fleet.autoscale.up=1 | above down=1"),
        ({"rule": "freeness", "up": 5, "down": 1}, "autoscale.up=5 | below down=1"),
        ({**KV, "min_replicas": 0}, "autoscale.min_replicas=0"),
        ({**KV, "interval_s": 0}, "autoscale.interval_s=0"),
        ({**KV, "startup_s": -1}, "autoscale.startup_s=-1"),
    ],
)
def test_bad_settings_are_one_line(settings: Any, named: str) -> None:
    refusal(lambda: autoscale_of(settings, 0), named)
