"""Small fleets with costs that one can compute by hand."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pyarrow as pa

from pagedsim.build import make_autoscaler, make_memory, make_scheduler
from pagedsim.cluster.autoscale import Autoscale
from pagedsim.cluster.dispatcher import MAX_RETRIES, Dispatcher
from pagedsim.cluster.kv_migration import RESEND
from pagedsim.cluster.link import Network
from pagedsim.cluster.replica import Unit
from pagedsim.cluster.simulate import simulate_fleet
from pagedsim.core import Request, Scheduler
from pagedsim.core.source import Source
from pagedsim.metrics.recorder import Recorder
from pagedsim.policies.routing.router import Event, Router
from pagedsim.policies.routing.simple import RoundRobin
from pagedsim.sim.cost import CostModel
from tests.sim.harness import Affine, Constant, Jobs

NETWORK = Network(8e-9)
"""Eight bytes a second."""


def server(memory: str = "paged", blocks: int = 64, **more: Any) -> Scheduler:
    """A server with blocks of four tokens, of which it has 16 on the CPU."""
    made = make_memory(memory, blocks=blocks, block_size=4, cpu_blocks=16)
    return make_scheduler(memory=made, **more)


def rule(name: str, up: float, down: float, **timing: Any) -> Autoscale:
    """Autoscaling by a rule."""
    return Autoscale(partial(make_autoscaler, name, up=up, down=down), **timing)


def served(*args: Any, **settings: Any) -> tuple[pa.Table, Any]:
    """The tables of requests and steps of a fleet."""
    _, recorder = whole(*args, **settings)
    return recorder.requests_table(), recorder.steps()


def whole(
    schedulers: Sequence[Scheduler],
    source: Source,
    router: Router,
    cost: Constant | None = None,
    roles: Sequence[str] = (),
    token_bytes: float | Sequence[float] = 0.0,
    layers: int = 1,
    server: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
    recorder: Recorder | None = None,
    **settings: Any,
) -> tuple[Dispatcher, Recorder]:
    """The dispatcher of a fleet that has served everything, and what was recorded.

    `token_bytes` are those of each replica, or of all; `settings` those of `simulate_fleet`, and of
    its `FleetSpec`, with the `network` and the `failures` that such a one makes of its settings.
    """
    spec: Any = SimpleNamespace(
        staleness=settings.pop("staleness", 0.0),
        link=settings.pop("network", None),
        dying=settings.pop("failures", None),
        autoscale=settings.pop("autoscale", None),
        on_receiver_death=settings.pop("on_receiver_death", RESEND),
        fetch=settings.pop("fetch", "never"),
        max_retries=settings.pop("max_retries", MAX_RETRIES),
    )
    recorder = recorder or Recorder()
    costs = cost or Affine()
    units = [
        Unit(
            f"replica-{index}",
            cast(Any, roles[index] if roles else "both"),
            one,
            cast(CostModel, costs),
            server[index] if isinstance(server, Sequence) else server or {},
            token_bytes=token_bytes[index] if isinstance(token_bytes, Sequence) else token_bytes,
            layers=layers,
        )
        for index, one in enumerate(schedulers)
    ]
    recorders = [recorder.add_replica() for _ in units]
    dispatcher = simulate_fleet(units, source, router, recorders, recorder, spec, **settings)
    return dispatcher, recorder


class Alike(Jobs):
    """All prompts begin alike."""

    def requests(self) -> Iterator[tuple[Request, int]]:
        for request, output in super().requests():
            request._prompt = range(request.prompt_len)
            yield request, output


class Watching(RoundRobin):
    """Round robin that keeps what it observes."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[float, str, Any, int]] = []

    def observe(self, event: Event) -> None:
        name, where = type(event).__name__, event.replica.index
        self.seen.append((event.now, name, event.request.id, where))
