"""What is sent over HTTP, when, and how answers are read."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from pagedsim.backends.http.client import Answer
from pagedsim.backends.http.load import FIRST_ID, LAST_ID, Bodies, Contents, Load, Seen
from pagedsim.core import Request
from pagedsim.core.source import Job, Mode
from pagedsim.core.symbolic_prompt import SymbolicPrompt

# -- what is sent of a request ---------------------------------------------------------------------


def body_of(request: Request, **how: Any) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(Bodies("m", Contents(0), **how).of(request, 12))
    return body


def test_a_body_has_the_token_limit_and_a_stream_with_usage() -> None:
    body = body_of(Request(0, 30))
    assert len(body.pop("prompt")) == 30
    assert body == {
        "model": "m",
        "max_tokens": 12,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0.0,
    }


def test_attributes_of_the_workload_are_sent() -> None:
    more = {"tenant": "a", "tags": [1, None]}
    request = Request(0, 3, arrival=2.0, priority=2, client="chat", deadline=3.5, extra=more)
    body = body_of(request)
    assert body["vllm_xargs"] == more
    assert (body["priority"], body["user"], body["deadline"]) == (2, "chat", 1.5)
    assert type(body["priority"]) is int
    assert body_of(Request(0, 3, priority=0.5))["priority"] == 0.5


def test_extra_fields_are_added_and_null_takes_one_away() -> None:
    body = body_of(Request(0, 3), extra={"top_p": 0.5, "ignore_eos": None})
    assert body["top_p"] == 0.5 and "ignore_eos" not in body


# -- prompts on the wire: of the right length, shared where the workload shares, the same again ----


SYSTEM = (7, 40)


def request(id: int, *runs: tuple[int, int]) -> Request:
    return Request(id, SymbolicPrompt(runs) if runs else 60)


def common(one: list[int], other: list[int]) -> int:
    """How many tokens both begin with."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))


def test_a_shared_beginning_is_shared_and_nothing_more() -> None:
    contents = Contents(3)
    one, other, alone = (
        contents.ids(request(0, SYSTEM, (1, 20))),
        contents.ids(request(1, SYSTEM, (2, 25))),
        contents.ids(request(2, (3, 60))),
    )
    assert [len(ids) for ids in (one, other, alone)] == [60, 65, 60]
    assert 40 <= common(one, other) < 43 and common(one, alone) < 3
    assert all(FIRST_ID <= token <= LAST_ID for token in one + other + alone)
    assert len(set(one)) > 30


def test_a_seed_gives_the_same_prompts_and_another_gives_others() -> None:
    shared = request(0, SYSTEM, (1, 20))
    for given in (shared, request(5)):
        assert Contents(1).ids(given) == Contents(1).ids(given)
        assert common(Contents(1).ids(given), Contents(2).ids(given)) < 3


def test_token_ids_of_a_request_keep_what_they_share() -> None:
    contents = Contents(0)
    one, other = Request(0, [9, 8, 7, 6]), Request(1, [9, 8, 1, 2])
    assert common(contents.ids(one), contents.ids(other)) >= 2


# -- requests are sent when they are due, and as many at once as may be ----------------------------


@dataclass
class Some:
    """A workload of a few requests."""

    arrivals: tuple[float | None, ...]
    mode: Mode = "open"
    users: int | None = None
    think_time: float = 0.0
    turns: None = None

    def requests(self) -> Iterator[Job]:
        for id, arrival in enumerate(self.arrivals):
            yield Request(id, 5, arrival=arrival), 3


class Server:
    """Answers after `seconds`, and counts."""

    def __init__(self, seconds: float = 0.01) -> None:
        self.seconds = seconds
        self.running = self.most = 0
        self.asked: list[int] = []

    async def ask(self, seen: Seen, body: bytes) -> None:
        assert body == str(seen.id).encode()
        self.asked.append(int(seen.id))
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(self.seconds)
        self.running -= 1


def sent(source: Some, server: Server, **how: int) -> tuple[list[Seen], Load]:
    """All requests in the order in which they ended."""
    ended: list[Seen] = []

    async def go() -> Load:
        begun = time.perf_counter()
        load = Load(
            source,
            lambda request, _: str(request.id).encode(),
            server.ask,
            lambda: time.perf_counter() - begun,
            **how,
        )
        await load.run(ended.append)
        return load

    return ended, asyncio.run(go())


def test_an_open_loop_sends_each_at_its_time_and_waits_for_no_answer() -> None:
    server = Server(seconds=0.05)
    ended, load = sent(Some((0.0, 0.01, 0.02, 0.03)), server)
    assert [one.arrival for one in ended] == [0.0, 0.01, 0.02, 0.03]
    assert all(one.sent is not None and one.sent >= (one.arrival or 0) for one in ended)
    assert server.most > 1 and len(load.late) == 4 and min(load.late) >= 0


def test_users_wait_for_answers_and_think() -> None:
    server = Server()
    ended, _ = sent(Some((None,) * 6, mode="closed", users=2, think_time=0.02), server)
    assert server.most == 2 and server.asked == list(range(6))
    arrivals = sorted(one.arrival or 0.0 for one in ended)
    assert arrivals[:2] == [0, 0] and all(at >= 0.03 for at in arrivals[2:])


def test_a_request_beyond_the_concurrency_keeps_its_arrival() -> None:
    server = Server(seconds=0.02)
    ended, load = sent(Some((0.0,) * 4), server, concurrency=1)
    assert server.most == 1
    assert [one.arrival for one in ended] == [0.0] * 4
    waits = [(one.sent or 0.0) for one in ended]
    assert waits == sorted(waits) and waits[-1] >= 0.06
    # To wait for a place is not to be late, so neither holds any of the time of the other.
    assert sum(load.late) <= waits[-1] - 3 * server.seconds


# -- answers are read from Server-Sent Events however their bytes are cut --------------------------


USAGE = {"prompt_tokens": 5, "completion_tokens": 3}


def event(**said: Any) -> bytes:
    return b"data: " + json.dumps(said).encode() + b"\n\n"


def part(text: str, index: int = 0, reason: str | None = None) -> bytes:
    return event(choices=[{"index": index, "text": text, "finish_reason": reason}])


def delta(reason: str | None = None, **said: str) -> bytes:
    return event(choices=[{"index": 0, "delta": said, "finish_reason": reason}])


def read(*parts: bytes) -> Answer:
    """Each part a second after the one before."""
    answer = Answer()
    for second, data in enumerate(parts, 1):
        answer.feed(data, float(second))
    answer.close()
    return answer


WHOLE = part(" a") + part(" b") + part(" c", reason="length") + event(choices=[], usage=USAGE)


@pytest.mark.parametrize("size", [1, 7, 10_000])
@pytest.mark.parametrize("ends", [b"\n\n", b"\r\n\r\n"])
def test_bytes_may_be_cut_anywhere(size: int, ends: bytes) -> None:
    data = (b": a comment\n\n" + WHOLE + b"data: [DONE]\n\n").replace(b"\n\n", ends)
    answer = read(*(data[at : at + size] for at in range(0, len(data), size)))
    assert (answer.texts, answer.usage, answer.error) == ([" a", " b", " c"], USAGE, "")
    assert answer.reason == "length" and answer.done


def test_roles_and_finish_reasons_are_no_tokens() -> None:
    answer = read(delta(role="assistant", content=""), delta(content="a"), delta("stop"))
    assert (list(answer.times), answer.first, answer.last) == ([2], 2, 2)


def test_a_token_may_have_no_text_yet() -> None:
    assert list(read(part(""), part("é"), part("", reason="length")).times) == [1, 2]


def test_of_several_sequences_the_first_has_its_times_and_all_count() -> None:
    answer = read(part("a", 0), part("b", 1), part("c", 0, "length"), part("d", 1, "length"))
    assert (list(answer.times), answer.parts, answer.last) == ([1, 3], 4, 4)


@pytest.mark.parametrize(
    ("parts", "error", "detail"),
    [
        ((part("a"),), "the answer broke off", ""),
        ((), "the answer broke off", ""),
        ((b"data: [DONE]\n\n",), "the answer was empty", ""),
        ((part("a"), event(error={"message": "full"})), "an error within the answer", "full"),
        ((b"data: {oops\n\n",), "an event that is not OpenAI's", "{oops"),
        ((b"data: [1]\n\n",), "an event that is not OpenAI's", "[1]"),
        ((part("a"), part("", reason="timeout")), "finish_reason timeout", ""),
    ],
)
def test_errors_by_kind(parts: tuple[bytes, ...], error: str, detail: str) -> None:
    answer = read(*parts)
    assert (answer.error, answer.detail) == (error, detail)
