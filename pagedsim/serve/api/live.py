"""The live page: `GET /`, its files under `/page/`, and snapshots as events of `GET /live`."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Mapping
from contextlib import suppress
from importlib.resources import files
from typing import Annotated, Any

from fastapi import FastAPI, HTTPException, Query, Response
from fastapi.responses import StreamingResponse

from pagedsim.core import PagedsimError
from pagedsim.serve.async_engine import AsyncLLMEngine
from pagedsim.serve.snapshot import RollingStats, encode, snapshot

EVERY = 0.1
"""Seconds between two snapshots, at least."""
MOST_WATCHED = 8
"""Requests per viewer whose full state is included."""

_KINDS = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
}
# The page loads from this server only; `img-src data:` is its icon.
_POLICY = "default-src 'self'; img-src 'self' data:"

WatchedIds = Annotated[list[str], Query(max_length=MOST_WATCHED)]


class Live:
    """Takes snapshots while there are viewers; all share them, and a slow viewer skips some."""

    def __init__(
        self, engine: AsyncLLMEngine, tally: RollingStats, about: Mapping[str, Any]
    ) -> None:
        """`about` is added to every snapshot: `model`, `backend`, `policy`."""
        self._engine, self._tally, self._about = engine, tally, dict(about)
        self._watched: Counter[str] = Counter()
        self.viewers = 0
        self.taken = 0
        """Number of snapshots."""
        self._maker: asyncio.Task[None] | None = None
        self._news: asyncio.Future[None] | None = None
        self._newest = ""
        self._closed = False

    async def look(self, watched: list[str]) -> AsyncGenerator[str, None]:
        """Stream snapshots as server-sent events until the viewer disconnects or `close`."""
        self._watched.update(watched)
        self.viewers += 1
        seen = self.taken
        if self._maker is None or self._maker.done():
            self._maker = asyncio.create_task(self._make())
        try:
            while not self._closed:
                if seen == self.taken:
                    if self._news is None:
                        self._news = asyncio.get_running_loop().create_future()
                    await asyncio.shield(self._news)
                    continue
                seen = self.taken
                yield self._newest
        finally:
            self.viewers -= 1
            self._watched = +(self._watched - Counter(watched))

    def close(self) -> None:
        """End all viewers' streams, for which the server's shutdown waits."""
        self._closed = True
        self._tell()

    async def _make(self) -> None:
        while self.viewers and not self._closed:
            self._newest = f"data: {await self._taken()}\n\n"
            self.taken += 1
            self._tell()
            await asyncio.sleep(EVERY)

    async def _taken(self) -> str:
        watched = tuple(self._watched)
        try:
            plain = await self._engine.ask(
                lambda engine: snapshot(engine.scheduler, self._tally, engine.now, watched)
            )
        except PagedsimError as error:
            plain = {"failure": str(error)}
        late = {"lag_ms": round(1000 * self._engine.lag)}
        return await asyncio.to_thread(encode, self._about | late | plain)

    def _tell(self) -> None:
        if self._news is not None:
            with suppress(asyncio.InvalidStateError):
                self._news.set_result(None)
            self._news = None


def add_live(
    app: FastAPI, engine: AsyncLLMEngine, tally: RollingStats, about: Mapping[str, Any]
) -> Live:
    """Add the live page to an app. Call `Live.close` before the app shuts down.

    `tally` must observe the engine's steps.
    """
    live = Live(engine, tally, about)
    pages = {
        page.name: (page.read_bytes(), kind)
        for page in files("pagedsim.serve").joinpath("page").iterdir()
        if (kind := _KINDS.get("." + page.name.rpartition(".")[2]))
    }

    def page(name: str) -> Response:
        if name not in pages:
            raise HTTPException(404, f"no such page: {name}")
        content, kind = pages[name]
        headers = {"Cache-Control": "no-cache", "Content-Security-Policy": _POLICY}
        return Response(content, media_type=kind, headers=headers)

    @app.get("/", include_in_schema=False)
    def index() -> Response:
        return page("index.html")

    @app.get("/page/{name}", include_in_schema=False)
    def file(name: str) -> Response:
        return page(name)

    @app.get("/live", include_in_schema=False)
    async def snapshots(watch: WatchedIds = []) -> Response:  # noqa: B006
        stream = live.look(watch)
        return StreamingResponse(
            stream, media_type="text/event-stream", headers={"Cache-Control": "no-store"}
        )

    return live
