"""The router's client: answers in all framings, connections that are kept, and those that break."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

pytest.importorskip("httptools")

from pagedsim.serve.router import upstream
from pagedsim.serve.router.upstream import MOST_UNREAD, Broken, Upstream

OK = b"HTTP/1.1 200 OK\r\n"
SIZED = OK + b"Content-Length: 2\r\n\r\nok"


class Script(list[bytes]):
    """What a server answers on each connection, before it ends that; and how many there were."""

    connections = 0
    heads = b""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        for answer in self:
            self.heads += await reader.readuntil(b"\r\n\r\n")
            writer.write(answer)
            await writer.drain()
        writer.close()


@asynccontextmanager
async def scripted(*answers: bytes) -> AsyncIterator[tuple[Script, Upstream]]:
    script = Script(answers)
    async with await asyncio.start_server(script.serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        async with asyncio.timeout(20):
            yield script, Upstream(f"http://127.0.0.1:{port}/base")


@pytest.mark.parametrize(
    ("answer", "kept"),
    [
        (SIZED, True),
        (OK + b"Transfer-Encoding: chunked\r\n\r\n1\r\no\r\n1\r\nk\r\n0\r\n\r\n", True),
        (b"HTTP/1.1 100 Continue\r\n\r\n" + SIZED, True),
        (OK + b"Connection: close\r\nContent-Length: 2\r\n\r\nok", False),
        (SIZED + b"HTTP/1.1 408 Too late\r\nContent-Length: 0\r\n\r\n", False),
    ],
    ids=["sized", "chunked", "interim", "closing", "more than asked for"],
)
def test_an_answer_ends_where_its_head_says_and_its_connection_is_kept(
    answer: bytes, kept: bool
) -> None:
    async def run() -> None:
        async with scripted(answer, answer) as (script, server):
            assert [await server.ask("GET", "/v1/models") for _ in range(2)] == [(200, b"ok")] * 2
            assert script.connections == (1 if kept else 2)
            assert script.heads.startswith(b"GET /base/v1/models HTTP/1.1\r\nhost: 127.0.0.1:")

    asyncio.run(run())


def test_an_answer_without_a_size_ends_with_its_connection() -> None:
    async def run() -> None:
        async with scripted(OK + b"\r\nok") as (script, server):
            assert [await server.ask("GET", "/a") for _ in range(2)] == [(200, b"ok")] * 2
            assert script.connections == 2

    asyncio.run(run())


def test_an_answer_to_head_has_no_body() -> None:
    async def run() -> None:
        async with scripted(OK + b"Content-Length: 2\r\n\r\n") as (_, server):
            connection = await server.connection()
            await connection.ask("HEAD", "/a")
            assert (connection.headers, await connection.read()) == ({b"content-length": b"2"}, b"")
            connection.release()

    asyncio.run(run())


@pytest.mark.parametrize(
    "answer", [b"", SIZED[:-1], b"<html>", OK], ids=["nothing", "short", "no HTTP", "half a head"]
)
def test_a_connection_that_breaks_is_told(answer: bytes) -> None:
    async def run() -> None:
        async with scripted(answer) as (_, server):
            with pytest.raises(Broken, match=r"^127.0.0.1:\d+ broke off$"):
                await server.ask("GET", "/a")
            assert not server.idle

    asyncio.run(run())


def test_a_connection_that_waited_too_long_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upstream, "KEEP_ALIVE", 0.0)

    async def run() -> None:
        async with scripted(SIZED, SIZED) as (script, server):
            assert await server.ask("GET", "/a") == await server.ask("GET", "/a")
            assert script.connections == 2

    asyncio.run(run())


def test_an_answer_that_nobody_reads_is_not_taken_either() -> None:
    size = 100 * MOST_UNREAD

    async def run() -> None:
        async with scripted(OK + b"Content-Length: %d\r\n\r\n%b" % (size, b"a" * size)) as (_, up):
            connection = await up.connection()
            await connection.ask("POST", "/a", [], b"{}")
            await asyncio.sleep(0.2)
            begin = await connection.part()
            assert MOST_UNREAD < len(begin) < size / 2
            assert len(begin + await connection.read()) == size
            connection.release()

    asyncio.run(run())
