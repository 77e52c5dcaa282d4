"""Bounds on what a connection may send, and clients that stall, leave or pipeline."""

from __future__ import annotations

import json
import logging
import socket
from collections.abc import Iterator
from contextlib import suppress
from urllib.parse import urlsplit

import pytest

from tests.serve.serving import Server, paced, serving, until

SHORT = json.dumps({"prompt": "a", "max_tokens": 3}).encode()
LONG = json.dumps({"prompt": "a", "max_tokens": 4000, "stream": True}).encode()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(paced(speed=100.0)) as server:
        yield server


def connected(server: Server) -> socket.socket:
    where = urlsplit(server.url)
    client = socket.create_connection((where.hostname, where.port))
    client.settimeout(10)
    return client


def post(body: bytes = SHORT, length: int | None = None, more: bytes = b"") -> bytes:
    size = len(body) if length is None else length
    return (
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"%bContent-Length: %d\r\n\r\n%b" % (more, size, body)
    )


def received(client: socket.socket) -> bytes:
    """All that the server sends until it closes the connection."""
    parts = []
    with suppress(ConnectionResetError):
        while part := client.recv(65536):
            parts.append(part)
    return b"".join(parts)


def sent(client: socket.socket, part: bytes, most: int) -> int:
    """Bytes that the server takes of `most`, sent in parts, before it closes the connection."""
    count = 0
    with suppress(ConnectionResetError, BrokenPipeError):
        while count < most:
            count += client.send(part)
    return count


@pytest.mark.parametrize(
    "begin",
    [b"GET /health HTTP/1.1\r\nX-Big: ", b"GET /health?", b"GET /health HTTP/1.1\r\nX: y\r\nZ"],
    ids=["value", "address", "name"],
)
def test_headers_are_bounded(server: Server, begin: bytes) -> None:
    with connected(server) as client:
        client.sendall(begin)
        assert sent(client, b"a" * 50_000, 60_000_000) < 60_000_000
        assert received(client).startswith(b"HTTP/1.1 431 ")


def test_many_short_headers_are_bounded(server: Server) -> None:
    with connected(server) as client:
        client.sendall(b"GET /health HTTP/1.1\r\n" + b"X-More: 1\r\n" * 8_000 + b"\r\n")
        assert received(client).startswith(b"HTTP/1.1 431 ")


def test_headers_of_usual_size_pass_again_and_again(server: Server) -> None:
    with connected(server) as client:
        more = b"X-More: %b\r\n" % (b"a" * 30_000)
        client.sendall(post(more=more) * 5 + post(more=b"Connection: close\r\n"))
        assert received(client).count(b"HTTP/1.1 200 ") == 6


@pytest.mark.parametrize(
    "half", [b"", b"GET / HT", post(b'{"pro', 100)], ids=["nothing", "headers", "body"]
)
def test_a_request_must_be_sent_in_time(
    server: Server, half: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pagedsim.serve.protocol.READ_SECONDS", 0.2)
    with connected(server) as client:
        client.sendall(half)
        assert received(client).startswith(b"HTTP/1.1 408 ")


def test_what_is_no_http_is_refused_in_the_shape_of_other_errors(server: Server) -> None:
    with connected(server) as client:
        client.sendall(b"\x16\x03\x01 no request\r\n\r\n")
        head, _, plain = received(client).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 400 ")
        assert json.loads(plain)["error"]["type"] == "invalid_request_error"


def test_what_is_no_http_is_not_answered_within_a_stream(server: Server) -> None:
    with connected(server) as client:
        body = json.dumps({"prompt": "a", "max_tokens": 4000, "stream": True}).encode()
        client.sendall(post(body))
        begun = client.recv(65536)
        assert begun.startswith(b"HTTP/1.1 200 ")
        client.sendall(b"\x16\x03\x01 no request\r\n\r\n")
        assert b"HTTP/1.1 400" not in begun + received(client)


def test_an_answer_may_take_longer_than_a_request(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pagedsim.serve.protocol.READ_SECONDS", 0.05)
    with connected(server) as client:
        body = json.dumps({"prompt": "a", "max_tokens": 1000}).encode()
        client.sendall(post(body, more=b"Connection: close\r\n"))
        assert received(client).startswith(b"HTTP/1.1 200 ")


def test_a_body_that_is_too_large_is_not_read(server: Server) -> None:
    with connected(server) as client:
        client.sendall(post(b"", 190_000_000))
        assert sent(client, b"a" * 50_000, 190_000_000) < 60_000_000
        answer = received(client)
        assert answer.startswith(b"HTTP/1.1 413 ") and b"connection: close" in answer.lower()


@pytest.mark.parametrize("stream", [b"", b', "stream": true'], ids=["whole", "stream"])
def test_a_client_that_closed_its_sending_side_is_answered(server: Server, stream: bytes) -> None:
    with connected(server) as client:
        client.sendall(post(SHORT[:-1] + stream + b"}"))
        client.shutdown(socket.SHUT_WR)
        answer = received(client)
        assert b"HTTP/1.1 200 OK" in answer
        assert b'"finish_reason":"length"' in answer


def test_a_client_that_left_is_not_taken_for_one_that_waits() -> None:
    with serving(paced(speed=1.0)) as slow:
        memory = slow.served.scheduler.memory
        with connected(slow) as client:
            client.sendall(post(json.dumps({"prompt": "a", "max_tokens": 4000}).encode()))
            until(lambda: memory.used > 0)
        until(lambda: memory.used == 0)


@pytest.mark.parametrize("second", [post(), post(b"{", 100), b""])
def test_an_abort_with_a_request_behind_another_leaves_nothing(
    second: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    with serving(paced(speed=1.0)) as slow:
        memory = slow.served.scheduler.memory
        with caplog.at_level(logging.ERROR), connected(slow) as client:
            client.sendall(post(LONG) + second)
            until(lambda: memory.used > 0)
        until(lambda: memory.used == 0 and not slow.engine.unfinished)
    assert not caplog.records


def test_requests_behind_one_another_are_answered_in_order(server: Server) -> None:
    with connected(server) as client:
        client.sendall(post() * 3 + post(more=b"Connection: close\r\n"))
        assert received(client).count(b"HTTP/1.1 200 OK") == 4
