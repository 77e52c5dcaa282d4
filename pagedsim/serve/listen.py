"""The HTTP server on a socket: bounded connections, memory housekeeping, start-up and shutdown."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import json
import os
import socket
import sys
from collections.abc import Callable, Mapping
from functools import cache
from ipaddress import ip_address
from types import FrameType
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from pagedsim.core import ConfigError
from pagedsim.core.errors import require_number, require_whole, shown
from pagedsim.engine.output import Observers
from pagedsim.serve.api.app import make_app
from pagedsim.serve.api.live import Live, add_live
from pagedsim.serve.async_engine import AsyncLLMEngine
from pagedsim.serve.factory import ServedModel, made
from pagedsim.serve.metrics import Metrics
from pagedsim.serve.snapshot import RollingStats

MOST_HEAD = 65536
"""Maximum bytes of a request line and its headers."""
READ_SECONDS = 60.0
"""Time limit in seconds for sending a request, headers and body."""
PROBE_SECONDS = 0.25
"""Seconds between two probes of a client that has closed its sending side."""

_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_REASONS = {
    400: "this is no request of HTTP/1.1",
    408: f"the request was not sent within {READ_SECONDS:g} s",
    431: f"the headers are larger than {MOST_HEAD} bytes",
}


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's protocol, which alone bounds neither headers nor the time to send a request.

    A client that has closed its sending side is answered. Whether it only has done that or is
    gone altogether shows when something is written to it, so until its answer begins it is sent
    interim responses, which clients skip.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._head = 0  # bytes of the headers that are being read
        self._in_head = True
        self._unread = True  # whether a request is still to be sent in full
        self._half_closed = False
        self._answering: RequestResponseCycle | None = None
        self._probe: asyncio.TimerHandle | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._expect_request()

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self._deadline is None:  # the first bytes on a connection that was kept
            self._expect_request()
        if self._in_head:
            self._head += len(data)
        super().data_received(data)
        if self._in_head and self._head > MOST_HEAD:
            self._refuse(431)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._unread = self._in_head = True

    def on_headers_complete(self) -> None:
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        self._head, self._in_head = 0, False
        if size > MOST_HEAD:
            self._refuse(431)
            return
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if not self.transport.is_closing():
            super().on_body(body)

    def on_message_complete(self) -> None:
        self._head, self._in_head, self._unread = 0, True, False
        self._stop_waiting()
        if not self.transport.is_closing():
            super().on_message_complete()

    def on_response_complete(self) -> None:
        """Close the connection if the request was refused before it was received completely."""
        super().on_response_complete()
        if (self._half_closed and not self.pipeline) or (
            self._unread and self.cycle.response_complete
        ):
            self.transport.close()

    def eof_received(self) -> bool | None:  # type: ignore[override]
        cycle: RequestResponseCycle | None = self.cycle  # None before the first request
        self._half_closed = True
        if cycle is None or cycle.response_complete or cycle.more_body:
            return None
        if cycle.scope["http_version"] != "1.1":  # interim responses are of HTTP/1.1
            return None
        self._knock()
        return True

    def send_400_response(self, msg: str) -> None:
        """Refuse an unparsable request in the API's error format."""
        self._refuse(400)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        if self._probe is not None:
            self._probe.cancel()
        # uvicorn tells the last request of the connection alone, which may not have begun.
        if (cycle := self._answering) is not None and not cycle.response_complete:
            cycle.disconnected = True
            cycle.message_event.set()
        self.pipeline.clear()
        super().connection_lost(exc)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answering = cycle
        super()._start_asgi_task(cycle, app)

    def _knock(self) -> None:
        """Probe a half-closed connection by an interim response; a write to a lost client fails."""
        cycle = self._answering
        if cycle is None or self.transport.is_closing():
            return
        if not cycle.response_started:
            self.transport.write(_CONTINUE)
        self._probe = self.loop.call_later(PROBE_SECONDS, self._knock)

    def _expect_request(self) -> None:
        self._deadline = self.loop.call_later(READ_SECONDS, self._late)

    def _late(self) -> None:
        """Refuse a request that exceeded READ_SECONDS, unless reading was paused by this server."""
        if self.flow.read_paused:
            self._expect_request()
        else:
            self._refuse(408)

    def _stop_waiting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _refuse(self, status: int) -> None:
        """Close the connection, with an error response unless another response is in progress."""
        if self.transport.is_closing():
            return
        cycle = self._answering
        if cycle is None or cycle.response_complete or not cycle.response_started:
            self.transport.write(_refusal(status))
        self.transport.close()


def _refusal(status: int) -> bytes:
    error = {"message": _REASONS[status], "type": "invalid_request_error"}
    plain = json.dumps({"error": {**error, "param": None, "code": None}}).encode()
    about = f"content-type: application/json\r\ncontent-length: {len(plain)}\r\n"
    return STATUS_LINE[status] + about.encode() + b"connection: close\r\n\r\n" + plain


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
    if (trim := _malloc_trim()) is not None:
        trim(0)


@cache
def _malloc_trim() -> Callable[[int], int] | None:
    if not sys.platform.startswith("linux"):
        return None
    found: Callable[[int], int] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return found


FILES = 65536
"""Desired limit of open file descriptors."""
KEEP_ALIVE = 75
"""Seconds that an idle connection stays open; longer than clients' own keep-alive, so that no
request is sent on a connection that is being closed."""
LAST_WORDS = 3.0
"""Seconds that clients have to read their last responses at shutdown before connections are
closed; a stalled client must not keep the server from exiting."""


def listen(config: Mapping[str, Any]) -> None:
    """Serve what a configuration describes until SIGTERM or Ctrl-C."""
    require_whole("port", config["port"], 0, 65535)
    require_whole("max_body", config["max_body"], 1)
    require_number("drain", config["drain"], 0)
    key = _key(config["api_key"])
    _allow_connections()
    with _bound(config["host"], config["port"]) as listening:
        tally, metrics = RollingStats(), Metrics()
        found = made(config, Observers(tally, metrics), _say)
        engine = AsyncLLMEngine(
            found.engine, max_waiting=config["max_waiting"], timeout=config["timeout"]
        )
        app = make_app(
            engine,
            found,
            metrics=metrics,
            api_key=key,
            max_body=config["max_body"],
            hosts=_hosts(config),
        )
        about = {"model": found.model, "backend": found.backend, "policy": found.policy}
        live = add_live(app, engine, tally, about | {"speed": config["speed"]})
        server = Listener(app, engine, found, live, tally, config["drain"])
        gc.collect()
        gc.freeze()  # permanent objects, excluded from later collections
        with asyncio.Runner(loop_factory=server.config.get_loop_factory()) as runner:
            runner.run(server.serve([listening]))
        engine.refuse_dead()


class Listener(uvicorn.Server):
    """uvicorn's server; it exits with its engine, and drains that before closing connections."""

    def __init__(
        self,
        app: Any,
        engine: AsyncLLMEngine,
        found: ServedModel,
        live: Live,
        tally: RollingStats,
        drain: float,
    ) -> None:
        settings = uvicorn.Config(
            app,
            log_level="warning",
            access_log=False,
            http=BoundedProtocol,
            lifespan="off",
            ws="none",
            timeout_keep_alive=KEEP_ALIVE,
        )
        super().__init__(settings)
        self._engine, self._found, self._live = engine, found, live
        self._tally, self._drain = tally, drain
        self._tidy = HeapTrimmer()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and print the address."""
        for one in sockets or ():
            try:
                one.listen(self.config.backlog)
            except OSError as error:  # another process listens on the port
                raise ConfigError(f"port: cannot listen: {error.strerror}") from error
        await super().startup(sockets)
        found = self._found
        host, port = (sockets or self.servers[0].sockets)[0].getsockname()[:2]
        where = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        _say(f"{found.model} on backend={found.backend} under {found.policy} serves at {where}")

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Drain at the first signal, end at the second."""
        if self.should_exit:
            self.force_exit = True
        self.should_exit = True

    async def on_tick(self, counter: int) -> bool:
        """Whether to exit."""
        loop = asyncio.get_running_loop()
        if work := self._tidy.tick(loop.time(), self._engine.unfinished > 0):
            loop.run_in_executor(None, work)
        return await super().on_tick(counter) or self._engine.dead

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Drain the engine, close connections, end the engine."""
        if unfinished := self._engine.unfinished:
            pending = "1 request has" if unfinished == 1 else f"{unfinished} requests have"
            _say(f"ending: {pending} {self._drain:g} s; Ctrl-C, or SIGTERM, again ends it at once")
        counts = await self._engine.drain(self._drain, hurried=lambda: self.force_exit)
        self._live.close()
        cut = asyncio.get_running_loop().call_later(LAST_WORDS, self._cut)
        await super().shutdown(sockets)
        cut.cancel()
        await self._engine.close()
        there = "{} finished, {} aborted".format(*counts)
        _say(f"ended: {self._tally.finished:,} requests served; of those still there {there}")

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


def _hosts(config: Mapping[str, Any]) -> list[str] | None:
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


def _say(text: str) -> None:
    print(f"pagedsim: {text}", file=sys.stderr, flush=True)
