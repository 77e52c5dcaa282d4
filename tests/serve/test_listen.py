"""Connections: bounds, clients that stall, leave or pipeline; a server as a process; its end."""

from __future__ import annotations

import asyncio
import json
import logging
import random
import signal
import socket
import time
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlsplit

import pytest
from fastapi import FastAPI

from pagedsim.core import ConfigError
from pagedsim.experiments.benchmarks.serving import Child, listening
from pagedsim.serve.listen import Listener
from tests.serve.serving import Answer, Server, ask, paced, serving, until

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
    [b"GET /health HTTP/1.1\r\nX-Big: ", b"GET /health?"],
    ids=["value", "address"],
)
def test_headers_are_bounded(server: Server, begin: bytes) -> None:
    with connected(server) as client:
        client.sendall(begin)
        assert sent(client, b"a" * 50_000, 60_000_000) < 60_000_000
        assert received(client).startswith(b"HTTP/1.1 431 ")


def test_headers_of_usual_size_pass_again_and_again(server: Server) -> None:
    with connected(server) as client:
        more = b"X-More: %b\r\n" % (b"a" * 30_000)
        client.sendall(post(more=more) * 5 + post(more=b"Connection: close\r\n"))
        assert received(client).count(b"HTTP/1.1 200 ") == 6


@pytest.mark.parametrize("half", [b"", post(b'{"pro', 100)], ids=["nothing", "body"])
def test_a_request_must_be_sent_in_time(
    server: Server, half: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pagedsim.serve.protocol.READ_SECONDS", 0.2)
    with connected(server) as client:
        client.sendall(half)
        assert received(client).startswith(b"HTTP/1.1 408 ")


CHUNKED = b"Transfer-Encoding: chunked\r\n"
CLOSE = b"Connection: close\r\n"
IN_CHUNKS = post(b"%x\r\n%b\r\n0\r\n" % (len(SHORT), SHORT), more=CHUNKED + CLOSE).replace(
    b"Content-Length", b"X-Length"
)
BY_RFC_9112 = {
    "many headers": (431, b"GET /health HTTP/1.1\r\n" + b"X-More: 1\r\n" * 8_000 + b"\r\n"),
    "two hosts": (400, post(more=b"host: localhost\r\n")),
    "no host": (400, b"GET /health HTTP/1.1\r\n\r\n"),
    "host with a path": (400, b"GET /health HTTP/1.1\r\nHost: localhost/a\r\n\r\n"),
    "host in the target": (200, b"GET http://a:1/health HTTP/1.1\r\nHost: b/c\r\n%b\r\n" % CLOSE),
    "target without a path": (404, b"GET http://a?b HTTP/1.1\r\nHost: b\r\n%b\r\n" % CLOSE),
    "other version": (505, post().replace(b"HTTP/1.1", b"HTTP/2.0")),
    "other coding": (501, IN_CHUNKS.replace(b"chunked", b"gzip, chunked")),
    "chunks of HTTP/1.0": (400, IN_CHUNKS.replace(b"HTTP/1.1", b"HTTP/1.0")),
    "trailer": (200, IN_CHUNKS + b"Origin: http://evil.example\r\n\r\n"),
    "unending trailers": (431, IN_CHUNKS + b"X-More: 1\r\n" * 10_000),
    "tiny chunks": (
        431,
        IN_CHUNKS.partition(b"\r\n\r\n")[0] + b"\r\n\r\n" + b"1\r\na\r\n" * 20_000,
    ),
    "long target": (414, b"GET /health?%b HTTP/1.1\r\nHost: a\r\n\r\n" % (b"a=b&" * 5_000)),
    "many at once": (400, post() * 200),
    "upgrade": (200, post(more=CLOSE + b"Upgrade: h2c\r\n").replace(b"close", b"close, Upgrade")),
}


@pytest.mark.parametrize(("status", "data"), BY_RFC_9112.values(), ids=BY_RFC_9112)
def test_a_request_is_read_as_rfc_9112_has_it(server: Server, status: int, data: bytes) -> None:
    with connected(server) as client:
        sent(client, data, len(data))
        assert received(client).startswith(b"HTTP/1.1 %d " % status)


def test_an_answer_to_http_1_0_ends_with_its_connection(server: Server) -> None:
    with connected(server) as client:
        old = post(SHORT[:-1] + b', "stream": true}', more=b"Expect: 100-continue\r\n")
        client.sendall(old.replace(b"HTTP/1.1", b"HTTP/1.0"))
        head, _, body = received(client).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 ") and b"transfer-encoding" not in head.lower()
    assert body.startswith(b"data: {") and body.endswith(b"}\n\ndata: [DONE]\n\n")


def test_invalid_http_is_refused_in_the_shape_of_other_errors(server: Server) -> None:
    with connected(server) as client:
        client.sendall(b"\x16\x03\x01 no request\r\n\r\n")
        head, _, plain = received(client).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 400 ")
        assert json.loads(plain)["error"]["type"] == "invalid_request_error"


def test_invalid_http_is_not_answered_within_a_stream(server: Server) -> None:
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


def test_a_closed_connection_frees_its_blocks() -> None:
    with serving(paced(speed=1.0)) as slow:
        memory = slow.served.scheduler.memory
        with connected(slow) as client:
            client.sendall(post(json.dumps({"prompt": "a", "max_tokens": 4000}).encode()))
            until(lambda: memory.used > 0)
        until(lambda: memory.used == 0)


@pytest.mark.parametrize("second", [post(), post(b"{", 100)])
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


def counted(tokens: int) -> str:
    """What backend=sim answers."""
    return "".join(f" {n}" for n in range(1, tokens + 1))


def state_of(child: Child) -> dict[str, float]:
    """The metrics without labels, by name."""
    with urllib.request.urlopen(f"{child.url}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    values = [line.rpartition(" ") for line in lines if not line.startswith("#")]
    return {name.partition("{")[0]: float(value) for name, _, value in values}


def is_open(child: Child) -> bool:
    """Whether it takes requests."""
    try:
        with urllib.request.urlopen(f"{child.url}/health"):
            return True
    except HTTPError as error:
        error.close()
        return False


def wait_until_empty(child: Child) -> None:
    """Wait until no request runs or waits and no block is used; fails after ten seconds."""
    for _ in range(200):
        state = state_of(child)
        busy = state["vllm:num_requests_running"] + state["vllm:num_requests_waiting"]
        if busy == 0 and state["vllm:kv_cache_usage_perc"] == 0:
            return
        time.sleep(0.05)
    raise AssertionError(f"still there: {state}")


def test_clients_that_vanish_leave_nothing_behind() -> None:
    async def load(url: str) -> list[Answer]:
        rng = random.Random(1)

        async def client(number: int) -> Answer:
            await asyncio.sleep(0.5 * rng.random())
            leaves = 0.5 * rng.random() if number % 2 else None
            tokens = rng.randint(5, 60)
            return await ask(url, leaves, prompt=[5] * rng.randint(1, 200), max_tokens=tokens)

        return await asyncio.gather(*(client(number) for number in range(80)))

    with serving(paced("prefix", speed=2.0, max_seqs=24, preemption="recompute")) as server:
        answers = asyncio.run(load(server.url))
        until(lambda: server.served.scheduler.memory.used == 0 and not server.engine.unfinished)
    assert all(answer.whole and answer.reason == "length" for answer in answers[::2])
    assert all(answer.text == counted(answer.tokens) for answer in answers)
    assert any(not answer.whole for answer in answers[1::2])


def ended(child: Child) -> int:
    """Wait for the end of a process that was told to end; returns its exit code.

    A second signal would kill it where it has put back the system's handlers already.
    """
    assert child.process.stderr is not None
    child.said.extend(child.process.stderr)
    return child.process.wait(timeout=60)


def test_a_draining_server_finishes_or_aborts_its_requests_and_takes_no_new_ones() -> None:
    async def load(child: Child) -> tuple[Answer, Answer, Answer]:
        short, long = Answer(), Answer()
        asked = [
            asyncio.create_task(ask(child.url, answer=answer, prompt="there", max_tokens=tokens))
            for answer, tokens in ((short, 60), (long, 3000))
        ]
        await asyncio.gather(short.begun.wait(), long.begun.wait())
        child.process.send_signal(signal.SIGTERM)
        while await asyncio.to_thread(is_open, child):
            pass
        late = await ask(child.url, prompt="late", max_tokens=1)
        await asyncio.gather(*asked)
        return short, long, late

    with listening("model=llama-3.1-8b", "drain=1") as child:
        short, long, late = asyncio.run(load(child))
        assert short.whole and short.text == counted(60)
        assert "shutting down" in long.error and long.tokens < 3000
        assert late.status == 503
        assert ended(child) == 0
        assert (
            "ended: 1 requests served; of those still there 1 finished, 1 aborted" in child.said[-1]
        )


def test_clients_that_stall_or_leave_do_not_keep_a_server_from_ending() -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%b"
    body = b'{"prompt": "x", "max_tokens": 4000, "n": 8, "stream": true}'
    with listening("model=llama-3.1-8b", "speed=100000") as child:
        where = urlsplit(child.url)
        with socket.create_connection((where.hostname, where.port)) as early:
            early.sendall(head % (99, b"{"))
            time.sleep(0.1)
        with (
            socket.create_connection((where.hostname, where.port)) as silent,
            socket.socket() as deaf,
        ):
            silent.sendall(head % (1000, b'{"pro'))
            deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            deaf.connect((where.hostname, where.port))
            deaf.sendall(head % (len(body), body))
            assert deaf.recv(12) == b"HTTP/1.1 200"
            wait_until_empty(child)
            child.process.terminate()
            assert ended(child) == 0
    assert len([line for line in child.said if "passed on" not in line]) == 2
    assert "of those still there 0 finished, 0 aborted" in child.said[-1]


def test_a_port_taken_meanwhile_is_one_line() -> None:
    with socket.socket() as theirs, socket.socket() as ours:
        for one in (theirs, ours):
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        theirs.bind(("127.0.0.1", 0))
        ours.bind(theirs.getsockname())
        theirs.listen()
        nothing: Any = None
        server = Listener(FastAPI(), nothing, "nothing", 0, nothing)
        with pytest.raises(ConfigError, match=r"^port: cannot listen: .* in use"):
            asyncio.run(server.serve([ours]))
