"""HTTP/1.1 on one connection, with bounds on what a client may send and on how long it may take."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

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
