"""A client of HTTP/1.1 that takes little of a router's time: connections are kept, and answers are
had as they come."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from ssl import create_default_context
from typing import cast
from urllib.parse import urlsplit

from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser

from pagedsim.backends.http.client import KEEP_ALIVE

Fields = Sequence[tuple[bytes, bytes]]
"""Names and values of a head."""
CONNECT = 5.0
"""Seconds that a server has to accept a connection."""
MOST_UNREAD = 2**18
"""Bytes of an answer that wait for the client before no more are taken."""
_SIZES = b"content-length", b"transfer-encoding"
"""Fields that say where a body ends; without them it ends with the connection."""


class Broken(OSError):
    """A connection ended before its answer did, or what came on it is no HTTP."""


class Upstream:
    """A server, and connections to it that wait for the next request."""

    def __init__(self, url: str) -> None:
        where = urlsplit(url)
        self._tls = where.scheme == "https"
        self._name, self._port = where.hostname or "", where.port or (443 if self._tls else 80)
        self.path, self.host = where.path.encode(), where.netloc.encode()
        self.idle: list[Connection] = []

    async def connection(self) -> Connection:
        """A connection for a request, to be released; raises OSError."""
        loop = asyncio.get_running_loop()
        while self.idle:
            kept = self.idle.pop()
            if not kept.lost and loop.time() - kept.idle_since < KEEP_ALIVE:
                return kept
            kept.transport.abort()
        tls = create_default_context() if self._tls else None
        async with asyncio.timeout(CONNECT):
            _, new = await loop.create_connection(
                lambda: Connection(self), self._name, self._port, ssl=tls
            )
        return new

    async def ask(
        self, method: str, path: str, fields: Fields = (), body: bytes = b""
    ) -> tuple[int, bytes]:
        """Status and body of an answer; raises OSError."""
        connection = await self.connection()
        try:
            await connection.ask(method, path, fields, body)
            return connection.status, await connection.read()
        finally:
            connection.release()

    def close(self) -> None:
        """End the connections that wait."""
        for connection in self.idle:
            connection.transport.abort()


class Connection(asyncio.Protocol):
    """One request at a time, and its answer."""

    def __init__(self, upstream: Upstream) -> None:
        self._upstream = upstream
        self._parser = HttpResponseParser(self)
        self.lost = self._paused = False
        self.idle_since = 0.0
        self._begin()

    def _begin(self) -> None:
        self.status = 0
        """That of the answer; 0 until its head has come."""
        self.headers: dict[bytes, bytes] = {}
        """Its fields, by name in lower case."""
        self._parts: list[bytes] = []
        self._unread = 0
        self._complete = self._lasts = self._sized = False
        self._waiter: asyncio.Future[None] | None = None

    async def ask(self, method: str, path: str, fields: Fields = (), body: bytes = b"") -> None:
        """Send a request, and wait for the head of its answer; raises Broken."""
        up = self._upstream
        self._begin()
        self._bodiless = method == "HEAD"
        head = [b"%b %b%b HTTP/1.1" % (method.encode(), up.path, path.encode())]
        head += [b"host: " + up.host, b"accept-encoding: identity"]  # others come in large pieces
        head += [b"content-length: %d" % len(body)] * (method == "POST")
        head += [b"%b: %b" % field for field in fields]
        self.transport.write(b"\r\n".join((*head, b"", body)))
        while not self.status:
            await self._news()

    async def part(self) -> bytes:
        """What has come of the body since; nothing at its end. Raises Broken."""
        while not self._parts and not self._complete:
            await self._news()
        whole = b"".join(self._parts)
        self._parts.clear()
        self._unread = 0
        if self._paused:
            self._paused = False
            self.transport.resume_reading()
        return whole

    async def read(self) -> bytes:
        """The whole body; raises Broken."""
        parts = []
        while part := await self.part():
            parts.append(part)
        return b"".join(parts)

    def release(self) -> None:
        """The answer has been read, or is no longer wanted."""
        if self._complete and self._lasts and not self.lost and not self._parts:
            self.idle_since = asyncio.get_running_loop().time()
            self._upstream.idle.append(self)
        else:
            self.transport.abort()

    async def _news(self) -> None:
        if self.lost:
            raise Broken(f"{self._upstream.host.decode()} broke off")
        self._waiter = asyncio.get_running_loop().create_future()
        await self._waiter

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # -- of the transport ------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except (HttpParserError, HttpParserUpgrade):
            self.lost = True
            self.transport.abort()
        if not self._paused and self._unread > MOST_UNREAD:
            self._paused = True
            self.transport.pause_reading()
        self._wake()

    def connection_lost(self, error: Exception | None) -> None:
        if self.status and not error and not self._sized:
            self._complete = True  # its end is that of the connection
        self.lost = True
        if self in self._upstream.idle:
            self._upstream.idle.remove(self)
        self._wake()

    # -- of the parser ---------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self._complete:
            raise Broken("an answer to nothing")

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < 200:  # another head follows
            return self.headers.clear()
        self._sized = any(name in self.headers for name in _SIZES)
        self._lasts = self._parser.should_keep_alive() and not self._bodiless
        self.status, self._complete = status, self._bodiless

    def on_body(self, body: bytes) -> None:
        self._parts.append(body)
        self._unread += len(body)

    def on_message_complete(self) -> None:
        self._complete = self.status > 0
