"""HTTP/1.1 on a connection: bounds, deadlines, and what uvicorn's protocol leaves unchecked."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

MOST_HEAD = 65536
"""Maximum bytes of a request line and its headers, and of what frames a body."""
MOST_FIELDS = 256
"""Header fields of a request."""
LONGEST_TARGET = 8192
"""Bytes of a path and its query."""
MOST_PIPELINED = 64
"""Requests that may wait on a connection for the answers to those before them."""
READ_SECONDS = 60.0
"""Time limit in seconds for sending a request, headers and body."""
PROBE_SECONDS = 0.25
"""Seconds between two probes of a client that has closed its sending side."""

_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_PIECE = 16384
"""Bytes that are read and parsed at once: tiny chunks, headers and requests cost most a byte."""
_ABSOLUTE = re.compile(rb"[a-z][a-z0-9+.-]*://([^/?#]*)([^#]*)", re.IGNORECASE)
"""A request target with the host, as it is sent to proxies: its authority and the rest."""
_HOST = re.compile(rb"(\[[\w:.]+\]|[\w.~%!$&'()*+,;=-]*)(:\d*)?", re.ASCII)


class _Refused(Exception):
    """Stops the parser."""


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's protocol with bounds on headers and time, and with the checks of RFC 9112.

    A client that has closed its sending side is answered. Whether it only has done that or is
    gone altogether shows when something is written to it, so until its answer begins it is sent
    interim responses, which clients skip.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if hasattr(transport, "max_size"):  # that of asyncio's own event loop
            transport.max_size = _PIECE
        self._framing = 0  # bytes of a head, or of what frames a body
        self._in_head = True
        self._upgrading = False  # whether the request is to be parsed again
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
        self._unset_keepalive_if_required()
        self._framing += len(data)
        self._parse(data)
        if self._framing > MOST_HEAD:
            what = "headers" if self._in_head else "trailers and chunk sizes"
            self._refuse(431, f"the {what} are larger than {MOST_HEAD} bytes")

    def _parse(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except HttpParserUpgrade as upgrade:
            if not self.transport.is_closing():
                self._parse_again(data[upgrade.args[0] :])
        except HttpParserError:
            self._refuse(400, "this is no request of HTTP/1.1")

    def _parse_again(self, rest: bytes) -> None:
        """Parse a request without its Upgrade field, for which the parser skips the body."""
        line = b"%b %b HTTP/%b\r\n" % (
            self.parser.get_method(), self.url, self.parser.get_http_version().encode(),
        )  # fmt: skip
        fields = [b"%b: %b\r\n" % field for field in self.headers if field[0] != b"upgrade"]
        self.parser, self._upgrading = HttpRequestParser(self), False
        self._parse(line + b"".join(fields) + b"\r\n" + rest)

    # -- of the parser ---------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._unread = self._in_head = True

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._in_head:
            return  # a trailer, which is no header: the headers have been checked by then
        super().on_header(name, value)
        if len(self.headers) > MOST_FIELDS:
            self._refuse(431, f"there are more than {MOST_FIELDS} headers")
            raise _Refused

    def on_headers_complete(self) -> None:
        self._in_head = False
        if self.transport.is_closing():
            return
        if problem := self._problem():
            self._refuse(*problem)
            raise _Refused
        self._framing = 0
        if self.parser.should_upgrade():
            self._upgrading = True
            return
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._framing -= len(body)
        if not self.transport.is_closing():
            super().on_body(body)

    def on_message_complete(self) -> None:
        if self._upgrading:
            return
        self._framing, self._in_head, self._unread = 0, True, False
        self._stop_waiting()
        if not self.transport.is_closing():
            super().on_message_complete()

    def _problem(self) -> tuple[int, str] | None:
        """Status and reason of a request that must be refused by its head.

        A target with the host replaces the Host field. What HTTP/1.0 does not know is ignored.
        """
        version = self.parser.get_http_version()
        if version not in ("1.0", "1.1"):
            return 505, f"HTTP/{version}: must be HTTP/1.1 or 1.0"
        if self.parser.get_method() == b"CONNECT":
            return 400, "CONNECT: this is no proxy"
        if absolute := _ABSOLUTE.fullmatch(self.url):
            host, rest = absolute.groups()
            self.url = rest if rest.startswith(b"/") else b"/" + rest
            self.headers[:] = [field for field in self.headers if field[0] != b"host"]
            self.headers.append((b"host", host))
        if len(self.url) > LONGEST_TARGET:
            return 414, f"the path and query are longer than {LONGEST_TARGET} bytes"
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if size > MOST_HEAD:
            return 431, f"the headers are larger than {MOST_HEAD} bytes"
        hosts = [value for name, value in self.headers if name == b"host"]
        if len(hosts) > 1 or (version == "1.1" and not hosts):
            return 400, f"there are {len(hosts)} Host headers: must be one"
        if hosts and not _HOST.fullmatch(hosts[0]):
            return 400, "Host: must be a name or an address, and a port"
        codings = [value.lower() for name, value in self.headers if name == b"transfer-encoding"]
        if codings and version == "1.0":
            return 400, "Transfer-Encoding: is not of HTTP/1.0"
        if codings not in ([], [b"chunked"]):
            return 501, "Transfer-Encoding: must be chunked"
        if version == "1.0":
            self.expect_100_continue = False
        if len(self.pipeline) >= MOST_PIPELINED:
            return 400, f"more than {MOST_PIPELINED} requests wait on this connection"
        return None

    # -- responses -------------------------------------------------------------------------------

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
        if cycle.scope["http_version"] == "1.0":
            app = _unchunked(app, cycle)
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
            self._refuse(408, f"the request was not sent within {READ_SECONDS:g} s")

    def _stop_waiting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _refuse(self, status: int, why: str) -> None:
        """Close the connection, with an error response unless another response is in progress."""
        if self.transport.is_closing():
            return
        cycle = self._answering
        if cycle is None or cycle.response_complete or not cycle.response_started:
            self.transport.write(_refusal(status, why))
        self.transport.close()


def _refusal(status: int, why: str) -> bytes:
    error = {"message": why, "type": "invalid_request_error", "param": None, "code": None}
    plain = json.dumps({"error": error}).encode()
    about = f"content-type: application/json\r\ncontent-length: {len(plain)}\r\n"
    return STATUS_LINE[status] + about.encode() + b"connection: close\r\n\r\n" + plain


def _unchunked(app: ASGIApp, cycle: RequestResponseCycle) -> ASGIApp:
    """`app` for a client of HTTP/1.0: a body of unknown length ends with the connection."""

    async def call(scope: Scope, receive: Receive, send: Send) -> None:
        sized = True

        async def send_plain(message: Message) -> None:
            nonlocal sized
            if message["type"] == "http.response.start":
                sized = any(name.lower() == b"content-length" for name, _ in message["headers"])
                cycle.chunked_encoding = None if sized else False
            elif not sized:
                cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await app(scope, receive, send_plain)

    return call
