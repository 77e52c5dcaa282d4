"""A running request goes on at another scheduler, with its keys and values."""

from __future__ import annotations

import pytest

from pagedsim.core import Request, RequestError, State
from tests.core.drive import Server


def decoding(server: Server, name: str = "r", prompt: int = 6, output: int = 9) -> Request:
    """A request that has sampled its first token."""
    request = server.add(name, prompt, output)
    server.step()
    return request


def move(request: Request, here: Server, there: Server) -> None:
    output_len = here.scheduler.part(request, here.now)
    assert there.scheduler.reserve(request, there.now)
    assert there.scheduler.board(request, there.now, output_len)
    here.scheduler.let_go(request)
    here.scheduler.check()
    there.scheduler.check()


@pytest.mark.parametrize("batching", ["unified", "prefill_first", "one_by_one"])
@pytest.mark.parametrize("cache", [False, True])
def test_a_request_goes_on_elsewhere(batching: str, cache: bool) -> None:
    here = Server(cache=cache)
    there = Server(block_size=3, batching=batching, cache=cache)
    request = decoding(here)
    here.steps(2)
    move(request, here, there)
    assert (here.free, request.generated, request.state) == (100, 3, State.RUNNING)
    assert request.scheduled_at == 0.0
    assert request.first_token_at == 1.0
    assert there.step() == {"decode": ["r"]}
    assert there.drain() == ["r"]
    assert request.generated == 9
    assert there.free == 100


def test_its_blocks_stay_until_they_are_let_go() -> None:
    here = Server()
    request = decoding(here)
    here.scheduler.part(request, here.now)
    assert (here.free, request.tables, request.state) == (98, [], State.AWAY)
    assert here.queues == {}
    here.step()
    here.scheduler.let_go(request)
    assert here.free == 100
    with pytest.raises(RequestError, match="'r': no memory is held for it here"):
        here.scheduler.let_go(request)
