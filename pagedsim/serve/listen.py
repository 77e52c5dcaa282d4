"""The HTTP server on a socket: memory housekeeping, start-up and shutdown."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from ipaddress import ip_address
from types import FrameType
from typing import Any, Protocol

import uvicorn

from pagedsim.core import ConfigError
from pagedsim.core.errors import require_number, require_whole, shown
from pagedsim.engine.output import Observers
from pagedsim.serve.api.app import make_app
from pagedsim.serve.api.live import add_live
from pagedsim.serve.async_engine import AsyncLLMEngine
from pagedsim.serve.factory import build_model
from pagedsim.serve.metrics import Metrics
from pagedsim.serve.protocol import BoundedProtocol
from pagedsim.serve.snapshot import RollingStats

IDLE = 2.0
"""Seconds without requests after which garbage is collected, once."""
TRIM = 20.0
"""Seconds between two returns of free heap pages."""


class HeapTrimmer:
    """Collects garbage when the server becomes idle, and returns free heap pages to the system.

    Python collects by the number of allocations, so an idle server would keep garbage of its last
    requests. glibc returns only the end of a heap: free pages between long-lived objects stay
    resident, and with tensors of varying sizes the engine's process would keep growing.
    """

    def __init__(
        self,
        collect: Callable[[], object] = gc.collect,
        trim: Callable[[], object] | None = None,
    ) -> None:
        self._collect, self._trim = collect, trim or trim_heap
        self._busy_at: float | None = None  # when requests were last seen, if not tidied since
        self._trimmed_at = 0.0

    def tick(self, now: float, busy: bool) -> Callable[[], object] | None:
        """Called regularly; returns work to be done in another thread, if any is due."""
        if busy:
            self._busy_at = now
        if self._busy_at is None:
            return None
        if idle := now - self._busy_at >= IDLE:
            self._busy_at = None
            self._collect()
        if idle or now - self._trimmed_at >= TRIM:
            self._trimmed_at = now
            return self._trim
        return None


def trim_heap() -> None:
    """Return the free pages of all heaps to the system, where the C library is glibc."""
    if sys.platform.startswith("linux") and hasattr(library := ctypes.CDLL(None), "malloc_trim"):
        library.malloc_trim(0)


FILES = 65536
"""Desired limit of open file descriptors."""
SWITCH = 0.0005
"""Seconds that a thread keeps the GIL while another waits for it: Python's 5 ms would pass several
times a request, as often as the event loop calls the system."""
KEEP_ALIVE = 75
"""Seconds that an idle connection stays open; longer than clients' own keep-alive, so that no
request is sent on a connection that is being closed."""
LAST_WORDS = 3.0
"""Seconds that clients have to read their last responses at shutdown before connections are
closed; a stalled client must not keep the server from exiting."""


def say(text: str) -> None:
    """Tell the operator."""
    print(f"pagedsim: {text}", file=sys.stderr, flush=True)


def listen(config: Mapping[str, Any], say: Callable[[str], None] = say) -> None:
    """Serve what a configuration describes until SIGTERM or Ctrl-C; `say` gets each line."""
    with prepared(config) as (listening, key):
        tally, metrics = RollingStats(), Metrics()
        served_model = build_model(config, Observers(tally, metrics), say)
        engine = AsyncLLMEngine(
            served_model.engine, max_waiting=config["max_waiting"], timeout=config["timeout"]
        )
        app = make_app(
            engine,
            served_model,
            metrics=metrics,
            api_key=key,
            max_body=config["max_body"],
            hosts=hosts_of(config),
        )
        about = {name: getattr(served_model, name) for name in ("model", "backend", "policy")}
        live = add_live(app, engine, tally, about | {"speed": config["speed"]})
        name = "{model} on backend={backend} under {policy}".format_map(about)
        server = Listener(app, engine, name, config["drain"], lambda: tally.finished, say)
        server.drained = live.close
        server.run_on(listening)
        engine.refuse_dead()


@contextmanager
def prepared(config: Mapping[str, Any]) -> Iterator[tuple[socket.socket, str | None]]:
    """The socket to listen on, which is occupied before anything slow, and the API key."""
    require_whole("port", config["port"], 0, 65535)
    require_whole("max_body", config["max_body"], 1)
    require_number("drain", config["drain"], 0)
    key = _key(config["api_key"])
    _allow_connections()
    sys.setswitchinterval(SWITCH)
    with _bound(config["host"], config["port"]) as listening:
        yield listening, key


class Served(Protocol):
    """What a listener drains and closes."""

    @property
    def unfinished(self) -> int:
        """Requests that are not answered."""

    @property
    def dead(self) -> bool:
        """Whether it can serve no more."""

    async def drain(self, seconds: float, *, hurried: Callable[[], bool]) -> tuple[int, int]:
        """Refuse new requests and end the others; how many finished, and how many were aborted."""

    async def close(self) -> None:
        """End all that runs for it."""


class Listener(uvicorn.Server):
    """uvicorn's server; it exits with its engine, and drains that before closing connections."""

    def __init__(
        self,
        app: Any,
        served: Served,
        name: str,
        drain: float,
        finished: Callable[[], int],
        say: Callable[[str], None] = say,
    ) -> None:
        """`name` is what it says that it serves, with the address."""
        settings = uvicorn.Config(
            app,
            log_level="warning",
            access_log=False,
            http=BoundedProtocol,
            lifespan="off",
            ws="none",
            proxy_headers=False,  # nothing goes by addresses of clients
            timeout_keep_alive=KEEP_ALIVE,
        )
        super().__init__(settings)
        self._served, self._name, self._drain = served, name, drain
        self._finished, self._say = finished, say
        self.drained: Callable[[], None] = lambda: None
        """Called before connections are closed."""
        self._tidy = HeapTrimmer()

    def run_on(self, listening: socket.socket) -> None:
        """Serve until a signal."""
        gc.collect()
        gc.freeze()  # permanent objects, excluded from later collections
        with asyncio.Runner(loop_factory=self.config.get_loop_factory()) as runner:
            runner.run(self.serve([listening]))

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and print the address."""
        for listening in sockets or ():
            try:
                listening.listen(self.config.backlog)
            except OSError as error:  # another process listens on the port
                raise ConfigError(f"port: cannot listen: {error.strerror}") from error
        await super().startup(sockets)
        host, port = (sockets or self.servers[0].sockets)[0].getsockname()[:2]
        where = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        self._say(f"{self._name} serves at {where}")

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Drain at the first signal, end at the second."""
        if self.should_exit:
            self.force_exit = True
        self.should_exit = True

    async def on_tick(self, counter: int) -> bool:
        loop = asyncio.get_running_loop()
        if work := self._tidy.tick(loop.time(), self._served.unfinished > 0):
            loop.run_in_executor(None, work)
        return await super().on_tick(counter) or self._served.dead

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Drain the engine, close connections, end the engine."""
        if unfinished := self._served.unfinished:
            pending = "1 request has" if unfinished == 1 else f"{unfinished} requests have"
            self._say(
                f"ending: {pending} {self._drain:g} s; Ctrl-C, or SIGTERM, again ends it at once"
            )
        finished, aborted = await self._served.drain(self._drain, hurried=lambda: self.force_exit)
        self.drained()
        cut = asyncio.get_running_loop().call_later(LAST_WORDS, self._cut)
        await super().shutdown(sockets)
        cut.cancel()
        await self._served.close()
        self._say(
            f"ended: {self._finished():,} requests served; of those still there "
            f"{finished} finished, {aborted} aborted"
        )

    def _cut(self) -> None:
        for connection in list(self.server_state.connections):
            connection.transport.abort()


def _key(given: str | None) -> str | None:
    """The API key from the setting or PAGEDSIM_API_KEY; an empty key is refused as a mistake."""
    where, key = "api_key", given
    if given is None:
        where, key = "PAGEDSIM_API_KEY", os.environ.get("PAGEDSIM_API_KEY")
    if key is not None and not key.strip():
        raise ConfigError(f"{where}={shown(key)}: must not be empty; without a key leave it away")
    return key


def hosts_of(config: Mapping[str, Any]) -> list[str] | None:
    """Accepted Host names; None accepts any.

    A server that listens on a public address may be reached under unknown names. One that listens
    on loopback is addressed as localhost or 127.0.0.1; another name indicates DNS rebinding.
    """
    host, given = config["host"], config["hosts"]
    if given is not None:
        return [*given, host]
    try:
        local = host == "localhost" or ip_address(host).is_loopback
    except ValueError:  # a name
        local = False
    return [host] if local else None


def _allow_connections() -> None:
    """Raise the limit of open files as far as the system allows."""
    try:
        import resource
    except ImportError:  # not on Windows
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILES if hard == resource.RLIM_INFINITY else min(FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _bound(host: str, port: int) -> socket.socket:
    """Bind the socket before the model is loaded, so that an occupied port fails immediately."""
    if not host:  # it would bind every address
        raise ConfigError("host='': must not be empty; 0.0.0.0 listens on every address")
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        raise ConfigError(f"host={host}, port={port}: cannot listen: {error.strerror}") from error
    return bound
