"""Pages of other sites are refused, and a request arrives before it is read."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from pagedsim.core import Request
from pagedsim.serve.listen import _hosts
from pagedsim.serve.realtime_sim import RealtimeSimulator
from tests.serve.serving import Server, paced, serving
from tests.sim.harness import Constant

BODY = b'{"prompt": "a", "max_tokens": 1}'


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(paced(), hosts=["pagedsim.example"]) as server:
        yield server


def status(server: Server, **headers: str) -> int:
    named = {"Content-Type": "application/json"} | {
        name.replace("_", "-"): value for name, value in headers.items()
    }
    named = {name: value for name, value in named.items() if value}
    return httpx.post(f"{server.url}/v1/completions", content=BODY, headers=named).status_code


@pytest.mark.parametrize(
    ("host", "wanted"),
    [
        ("localhost:8000", 200),
        ("127.0.0.1", 200),
        ("[::1]:8000", 200),
        ("192.168.1.7:80", 200),
        ("PagedSim.example:8000", 200),
        ("evil.example", 403),
        ("127.0.0.1.evil.example:8000", 403),
        ("localhost.evil.example", 403),
    ],
)
def test_a_name_that_is_not_the_servers_is_refused(server: Server, host: str, wanted: int) -> None:
    assert status(server, Host=host) == wanted
    answer = httpx.get(f"{server.url}/v1/models", headers={"Host": host})
    assert answer.status_code == wanted


@pytest.mark.parametrize(
    ("host", "origin", "wanted"),
    [
        ("localhost:8000", "http://localhost:8000", 200),
        ("pagedsim.example", "https://pagedsim.example:443", 200),
        ("localhost:8000", "https://pagedsim.example", 200),  # behind a proxy that has this name
        ("localhost:8000", "http://localhost:3000", 403),
        ("localhost:8000", "https://evil.example", 403),
        ("localhost:8000", "null", 403),
        ("localhost:8000", "http://[", 403),
    ],
)
def test_a_page_of_another_site_is_refused(
    server: Server, host: str, origin: str, wanted: int
) -> None:
    assert status(server, Host=host, Origin=origin) == wanted


@pytest.mark.parametrize(
    ("kind", "wanted"),
    [
        ("application/json; charset=utf-8", 200),
        ("", 200),
        ("text/plain", 415),
        ("application/x-www-form-urlencoded", 415),
        ("multipart/form-data", 415),
    ],
)
def test_a_body_must_be_called_json(server: Server, kind: str, wanted: int) -> None:
    assert status(server, Content_Type=kind) == wanted


def test_names_are_checked_by_default_where_only_this_machine_listens() -> None:
    def hosts(host: str, given: list[str] | None = None) -> list[str] | None:
        return _hosts({"host": host, "hosts": given})

    assert hosts("127.0.0.1") == ["127.0.0.1"] and hosts("localhost") == ["localhost"]
    assert hosts("0.0.0.0") is None and hosts("::") is None and hosts("gpu-box") is None
    assert hosts("0.0.0.0", ["gpu-box"]) == ["gpu-box", "0.0.0.0"]


def test_a_request_arrives_before_its_body_is_read() -> None:
    seen: list[float | None] = []

    class Watch:
        def step(self, *told: Any) -> None:
            """Steps are of no interest."""

        def left(self, request: Request) -> None:
            seen.append(request.arrival)

    engine = paced(speed=1.0, step=0.001)
    watched = RealtimeSimulator(engine.scheduler, Constant(0.001), observer=Watch())
    with serving(watched) as server:

        def body() -> Iterator[bytes]:
            yield BODY[:10]
            time.sleep(0.3)
            yield BODY[10:]

        headers = {"Content-Type": "application/json"}
        httpx.post(f"{server.url}/v1/completions", content=body(), headers=headers)
        assert seen[0] is not None and watched.now - seen[0] >= 0.3
