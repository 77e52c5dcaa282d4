"""Which server gets a request: the router's answers, its queue, and the looks at the servers."""

from __future__ import annotations

import asyncio
import logging
from bisect import insort
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from pagedsim.cluster.dispatcher import answer_of
from pagedsim.core import PagedsimError, Request
from pagedsim.policies.routing.prefixes import Sent
from pagedsim.policies.routing.router import Left, Placed, Refusal, Replica, Router
from pagedsim.serve.api.errors import APIError
from pagedsim.serve.async_engine import Closing, Overloaded
from pagedsim.serve.router.servers import Servers, ServerView, Unpublished, published

log = logging.getLogger(__name__)

PATIENCE = 5.0
"""Seconds that a server has to answer a look; one that does not gets no requests until it does."""
LOOK = 0.1
"""Seconds between two looks at the servers where counts are not to be stale."""

Held = tuple[Request, bool, asyncio.Future[ServerView]]


class Dispatch:
    """Routes requests to servers; holds those that no server takes now."""

    def __init__(
        self,
        router: Router,
        servers: Sequence[ServerView],
        clock: Callable[[], float],
        max_waiting: int,
        staleness: float = 0.0,
    ) -> None:
        """`staleness` is the time between two looks in real seconds; 0: LOOK, and the numbers of
        requests are those that were sent and not answered."""
        self.router, self.servers, self.clock = router, servers, clock
        self.placed, self.retries = Counter[str](), 0
        self.held: list[Held] = []
        """Requests that wait for a server, in order of arrival."""
        self._most, self._every, self._old = max_waiting, staleness or LOOK, staleness > 0
        self._observing = type(router).observe is not Router.observe
        self._record: Sent | None = None  # kept once it is asked for
        self._seen_at = 0.0
        self._looking: dict[ServerView, asyncio.Task[None]] = {}
        self._closed, self._doubted = False, asyncio.Event()
        for server in servers:
            server.lookup = self._cached_tokens

    # -- requests --------------------------------------------------------------------------------

    async def place(self, request: Request, whole: bool) -> ServerView:
        """The server that gets a request, of whose ids the smaller came first; waits for one.

        Raises Overloaded where too many wait, Closing, and what refuses it.
        """
        if self._closed:
            raise Closing("the server is shutting down")
        if not self.held and (server := self._routed(request, whole)) is not None:
            return server
        if len(self.held) >= self._most:
            raise Overloaded(f"{len(self.held)} requests wait, and no more may (max_waiting)", 1)
        held: Held = request, whole, asyncio.get_running_loop().create_future()
        insort(self.held, held, key=lambda one: int(one[0].id))
        try:
            return await held[2]
        except asyncio.CancelledError:
            if held[2].done() and not held[2].cancelled():  # it was routed meanwhile
                self.left(request, held[2].result())
            raise
        finally:
            with suppress(ValueError):
                self.held.remove(held)

    def left(self, request: Request, server: ServerView) -> None:
        """A request has its answer, was given up, or was lost with its server."""
        server.sent.pop(request.id, None)
        server.whole.discard(request.id)
        if self._observing:
            self.router.observe(Left(request, server, self.clock()))
        self.route_held()

    def doubt(self, server: ServerView) -> None:
        """A connection to a server broke: it gets no requests until it has been looked at."""
        server.up = False
        self._doubted.set()

    def close(self) -> None:
        """Take no more requests, and refuse those that are held."""
        self._closed = True
        for *_, future in self.held:
            if not future.done():
                future.set_exception(Closing("the server is shutting down"))

    def route_held(self) -> None:
        """Route held requests again, in order, after a change."""
        for request, whole, future in list(self.held):
            if future.done():
                continue
            try:
                server = self._routed(request, whole)
            except (APIError, PagedsimError) as error:
                future.set_exception(error)
            else:
                if server is None:
                    return
                future.set_result(server)

    def _routed(self, request: Request, whole: bool) -> ServerView | None:
        """The router's answer, from where on the request counts as sent; None: it has to wait."""
        if not (up := [server for server in self.servers if server.up]):
            return None
        now, name = self.clock(), type(self.router).__name__
        try:
            server = answer_of(self.router, request, self._choice(up), now, self._takes)
            if isinstance(server, ServerView) and self._observing:
                self.router.observe(Placed(request, server, now))
        except PagedsimError:
            raise
        except Exception as error:
            log.exception("the router failed")
            raise PagedsimError(f"{name}: {type(error).__name__}: {error}") from error
        if isinstance(server, Refusal):
            raise APIError(503, f"{name} has refused the request: {server.reason}")
        if not isinstance(server, ServerView):
            return None
        if self._record is not None:
            self._record.sent(request, server)
        server.sent[request.id] = request
        if whole:
            server.whole.add(request.id)
        self.placed[server.name] += 1
        return server

    def _takes(self, answer: object, role: str) -> bool:
        return isinstance(answer, ServerView) and answer in self.servers and answer.up

    def _choice(self, servers: Sequence[ServerView]) -> Servers:
        return Servers(servers, self._sent, self._seen_at if self._old else None)

    def _sent(self) -> Sent:
        self._record = self._record or Sent()
        return self._record

    def _cached_tokens(self, request: Request, server: Replica) -> int:
        known = self._choice([one for one in self.servers if one.up])
        return dict(zip(known, known.cached_tokens(request), strict=True)).get(server, 0)

    # -- looks -----------------------------------------------------------------------------------

    async def look(self) -> None:
        """Look at the servers, for ever; others are not kept waiting for a slow one."""
        while True:
            self._doubted.clear()
            await self.look_once(self._every)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._doubted.wait(), self._every)

    async def look_once(self, patience: float = PATIENCE) -> None:
        """Look at each server once; those that do not answer in time are looked at beside this."""
        for server in self.servers:
            if server not in self._looking:
                task = asyncio.create_task(self._look(server))
                self._looking[server] = task
                task.add_done_callback(partial(self._looked, server))
        await asyncio.wait([*self._looking.values()], timeout=patience)
        self._seen_at = self.clock()
        self.route_held()

    def _looked(self, server: ServerView, task: asyncio.Task[None]) -> None:
        del self._looking[server]

    async def _look(self, server: ServerView) -> None:
        up = False
        with suppress(OSError):  # which a TimeoutError is
            async with asyncio.timeout(PATIENCE):
                status, page = await server.upstream.ask("GET", "/metrics")
                server.told = published(page.decode(errors="replace")) if status < 400 else {}
                up = await healthy(server)
        if server.up is not up and self._seen_at:
            log.warning("%s at %s is %s", server.name, server.url, "up" if up else "down")
        server.up = up


async def healthy(server: ServerView) -> bool:
    """Whether a server takes requests; one without /health does. TimeoutError if it is silent."""
    async with asyncio.timeout(PATIENCE):
        return (await server.upstream.ask("GET", "/health"))[0] < 500


# -- what a router reads ---------------------------------------------------------------------------


class _Watched:
    """A server that notes what is read of it."""

    def __init__(self, server: ServerView, reads: set[str]) -> None:
        self._server, self._reads = server, reads

    def __getattr__(self, name: str) -> object:
        self._reads.add(name)
        return getattr(self._server, name)


def reads_of(router: Router, servers: Sequence[ServerView]) -> Sequence[str]:
    """What a router, which is not used afterwards, reads of servers for a request.

    Raises Unpublished for what one of them does not publish.
    """
    reads: set[str] = set()
    watched: Any = [_Watched(server, reads) for server in servers]
    record = Sent()
    for number in range(2):
        request = Request(number, [number] * 200, session="session", client="client")
        try:
            router.route(request, Servers(watched, lambda: record, 0.0), float(number))
        except Unpublished as error:
            raise Unpublished(f"router: {type(router).__name__} reads {error}") from error
        except Exception:  # is that of each request
            break
    return sorted(reads)
