"""From a configuration to a router that listens."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Any

from pydantic_core import from_json

from pagedsim.backends.http.client import base_of, headers
from pagedsim.backends.sim import FleetRun, Simulated, Simulation
from pagedsim.cluster.prefix_fetch import NEVER
from pagedsim.core import ConfigError
from pagedsim.core.errors import require_number, shown
from pagedsim.policies.routing.router import Router
from pagedsim.serve.api.app import HeaderCheck
from pagedsim.serve.api.parsing import excerpt
from pagedsim.serve.api.tokenise import AsyncTokenizer
from pagedsim.serve.factory import tokenizer_of
from pagedsim.serve.listen import Listener, hosts_of, prepared, say
from pagedsim.serve.router.children import Children
from pagedsim.serve.router.dispatch import PATIENCE, Dispatch, reads_of
from pagedsim.serve.router.front import Front
from pagedsim.serve.router.servers import ServerView
from pagedsim.serve.router.upstream import Fields
from pagedsim.serve.sim_output import FillerTokenizer
from pagedsim.spec.run import RunSpec, Settings

Places = Sequence[tuple[str, str, Simulation | None]]
"""Name and address of each server, and what it is taken to be where it publishes nothing."""


def listen_routed(config: Mapping[str, Any], described: bool) -> None:
    """Serve a fleet, or what is in front of `router.backends`, until SIGTERM or Ctrl-C.

    `described` says whether the configuration describes the servers of `router.backends`.
    """
    chosen = dict(config["router"])
    backends = chosen.pop("backends")
    settings: Settings = {**config, "router": chosen}
    require_number("speed", config["speed"], above=0)
    spec = RunSpec(settings, config["seed"])
    _refuse_unserved(spec)
    with prepared(config) as (listening, key), ExitStack() as stack:
        if backends is None:
            places = _started(spec, key, stack)
            known = {"Authorization": f"Bearer {key}"} if key else {}
        else:
            like = Simulated().simulation(spec) if described else None
            places, known = _given(backends, spec, like), headers()
        listener_of(spec, places, key, known).run_on(listening)


def _refuse_unserved(spec: RunSpec) -> None:
    """Raise ConfigError for what a fleet does in a simulation alone."""
    fleet = spec.fleet
    for key, used in (
        ("fleet.failures", fleet.failures is not None),
        ("fleet.autoscale", fleet.autoscale is not None),
        ("fleet.fetch", fleet.fetch != NEVER),
        ("fleet.pools: role", any(pool.role != "both" for pool in fleet.kinds.values())),
    ):
        if used:
            raise ConfigError(f"{key}: is of simulations; serve has whole replicas that stay")
    if spec.router.migrates_every is not None:
        raise ConfigError(
            f"router: {type(spec.router).__name__} moves running requests, which HTTP cannot; "
            "llumnix has router.migration=false"
        )


def _started(spec: RunSpec, key: str | None, stack: ExitStack) -> Places:
    """Replicas of the configuration's own, each a process."""
    run = spec.prepare() if isinstance(spec.backend, Simulated) else None
    replicas: list[tuple[str, str, Simulation | None]] = [
        (f"replica-{index}", "", None) for index in range(spec.fleet.replicas)
    ]
    if isinstance(run, FleetRun):
        replicas = [(place.name, place.pool, place.simulation) for place in run.places]
    elif spec.fleet.pools is not None:
        raise ConfigError("fleet.pools: must be null with backend=engine, whose replicas are alike")
    own: Settings = {"fleet": None, "router": None, "host": "127.0.0.1", "port": 0, "hosts": None}
    own |= {"api_key": key} | ({} if run else {"tokenizer": None})
    configs = [(name, {**spec.pool(pool).settings, **own}) for name, pool, _ in replicas]
    say(f"starting {len(configs)} replicas")
    children = stack.enter_context(Children(configs)).children
    return [
        (name, child.url, simulation)
        for (name, _, simulation), child in zip(replicas, children, strict=True)
    ]


def _given(backends: Any, spec: RunSpec, like: Simulation | None) -> Places:
    """Servers elsewhere."""
    if not isinstance(backends, list) or not backends:
        raise ConfigError(
            f"router.backends={shown(backends)}: must be a list of addresses, such as "
            "[http://host:8000,http://host:8001]"
        )
    if spec.fleet.pools or spec.fleet.replicas > 1:
        key = "pools" if spec.fleet.pools else f"replicas={spec.fleet.replicas}"
        raise ConfigError(
            f"fleet.{key}: must not be given beside router.backends, which are the servers"
        )
    urls = [base_of(url, "router.backends") for url in backends]
    for url in urls:
        if urls.count(url) > 1:
            raise ConfigError(f"router.backends: {url}: must be there once")
    return [(f"replica-{index}", url, like) for index, url in enumerate(urls)]


def listener_of(
    spec: RunSpec, places: Places, key: str | None, own_headers: Mapping[str, str]
) -> RouterListener:
    """What listens for the router of a configuration, before these servers."""
    config, begun = spec.settings, time.perf_counter()
    speed: float = config["speed"]
    staleness = spec.fleet.staleness

    def clock() -> float:
        return (time.perf_counter() - begun) * speed

    servers = [ServerView(index, *place, staleness > 0) for index, place in enumerate(places)]
    front = Front(
        Dispatch(spec.router, servers, clock, config["max_waiting"], staleness / speed),
        AsyncTokenizer(tokenizer_of(config["tokenizer"]) or FillerTokenizer(), "the router"),
        max_body=config["max_body"],
        max_retries=spec.fleet.max_retries,
        timeout=config["timeout"],
        api_key=key,
        headers=own_headers,
    )
    app = HeaderCheck(front, now=clock, hosts=hosts_of(config))
    return RouterListener(app, front, RunSpec(config, spec.seed).router, config["drain"])


async def refuse_strangers(servers: Sequence[ServerView], fields: Fields) -> None:
    """Raise ConfigError for a server that lists no models, and for servers of other models."""
    known: dict[str, set[str]] = {}
    for server in servers:
        page, status = b"", 0
        with suppress(OSError):  # it is down by now
            async with asyncio.timeout(PATIENCE):
                status, page = await server.upstream.ask("GET", "/v1/models", fields)
        if status in (0, 401, 403):  # a key that clients have
            continue
        try:
            known[server.url] = {str(model["id"]) for model in from_json(page)["data"]}
        except (ValueError, LookupError, TypeError):
            begin = excerpt(page[:80].decode(errors="replace"))
            raise ConfigError(
                f"router.backends: {server.url}/v1/models: {status}, {begin}: must be a list of "
                "models, as of OpenAI's API"
            ) from None
    if known and not set.intersection(*known.values()):
        have = "; ".join(f"{url} has {', '.join(sorted(names))}" for url, names in known.items())
        raise ConfigError(f"router.backends: must have a model in common: {have}")


_OWN = (
    *("requests", "batch", "cached_tokens", "owed_tokens", "stored_tokens", "predicted_tokens"),
    "wanted_blocks",
)
"""What the router knows by itself; the rest servers publish, or are described to have."""


class RouterListener(Listener):
    """A listener that looks at the servers before it listens."""

    def __init__(self, app: Any, front: Front, rehearsed: Router, drain: float) -> None:
        """`rehearsed` is another router of the kind, which shows what it reads."""
        name = f"{type(rehearsed).__name__} before {len(front.dispatch.servers)} servers"
        super().__init__(app, front, name, drain, lambda: front.finished)
        self.front, self._rehearsed = front, rehearsed

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Look at the servers, say what the router goes by, and listen."""
        await self.front.start()
        servers = self.front.dispatch.servers
        try:
            if not (up := [server for server in servers if server.up]):
                urls = ", ".join(server.url for server in servers)
                raise ConfigError(f"router.backends: none answers: {urls}")
            for server in servers:
                if not server.up:
                    self._say(f"{server.name} at {server.url} does not answer, or is not healthy")
            await refuse_strangers(up, self.front.fields)
            reads = set(reads_of(self._rehearsed, up)) - {"index", "name", "role"}
        except ConfigError:
            await self.front.close()
            raise
        own, told = sorted(reads & {*_OWN}), sorted(reads - {*_OWN})
        sources = [", ".join(own) + " by what it sent"] * bool(own)
        sources += [", ".join(told) + " by what servers say"] * bool(told)
        self._say(f"{type(self._rehearsed).__name__} knows {'; '.join(sources) or 'no state'}")
        await super().startup(sockets)
