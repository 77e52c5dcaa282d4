"""The requests of a run: their prompts, their JSON, and the times at which they are sent."""

from __future__ import annotations

import asyncio
import json
from array import array
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagedsim.backends.http.client import Answer
from pagedsim.core import Request
from pagedsim.core.request import State
from pagedsim.core.source import Source, arrives
from pagedsim.core.symbolic_prompt import SymbolicPrompt

FIRST_ID, LAST_ID = 3, 255
"""Ids that every vocabulary has, and that mean no beginning and no end."""
_SHORT = (
    "the of and to in is that for it as was with be by on not he his but at are this have from or "
    "had an they which one you were all her she there would their we him been has when who will "
    "no more if out so up said what its about than into them can only other time new some could "
    "these two may first then do any like my now over such our man me even most made after also "
    "did many off before must well back through years much where your way down should because "
    "long each just state those people too mr how little good world make very year still see work "
    "life men here get day "
)
WORDS = _SHORT.split()
"""Short words, of which most tokenizers make a token each."""

_ODD = 0x9E3779B97F4A7C15
_MIX = np.uint64(0xBF58476D1CE4E5B9)
_ALL = 1 << 64


class Contents:
    """What the prompts of one run hold.

    Two prompts begin alike just where the workload says so; other seeds have other prompts, which
    a prefix cache has not seen.
    """

    def __init__(self, seed: int) -> None:
        self._seed = np.uint64((seed + 1) * _ODD % _ALL)

    def ids(self, request: Request) -> list[int]:
        """Token ids, as many as the prompt has."""
        numbers = self._mixed(_named(request))
        ids: list[int] = (FIRST_ID + numbers % np.uint64(LAST_ID - FIRST_ID + 1)).tolist()
        return ids

    def text(self, request: Request) -> str:
        """Words, as many as the prompt has tokens: about as many tokens, then."""
        places = self._mixed(_named(request)) % np.uint64(len(WORDS))
        return " ".join([WORDS[place] for place in places.tolist()])

    def _mixed(self, numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Numbers without a pattern, equal where those given are."""
        mixed = (numbers ^ self._seed) * np.uint64(_ODD)
        mixed ^= mixed >> np.uint64(29)
        mixed *= _MIX
        return mixed >> np.uint64(33)


def _named(request: Request) -> NDArray[np.uint64]:
    """A number for each token, the same where tokens are."""
    prompt = request.prompt
    if prompt is None:
        return _stream(int(request.id), request.prompt_len)
    if isinstance(prompt, SymbolicPrompt):
        return np.concatenate([_stream(stream, length) for stream, length in prompt.runs])
    return np.asarray(prompt, dtype=np.uint64)


def _stream(stream: int, length: int) -> NDArray[np.uint64]:
    begin = stream * _ODD % _ALL  # far from that of any other
    return np.arange(length, dtype=np.uint64) + np.uint64(begin)


PATHS: Mapping[str, str] = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
"""The endpoints, by what they are called here."""


@dataclass(frozen=True)
class Bodies:
    """How requests are written for one server."""

    model: str
    contents: Contents
    endpoint: str = "completions"
    as_ids: bool = True
    extra: Mapping[str, Any] = field(default_factory=dict)
    """More fields; None takes one away."""

    def of(self, request: Request, output_len: int) -> bytes:
        """What asks for an answer of `output_len` tokens, whatever the text would end with."""
        body: dict[str, Any] = {
            "model": self.model,
            **self._prompt(request),
            "max_tokens": output_len,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            **_labels(request),
        }
        body |= self.extra
        fields = {name: value for name, value in body.items() if value is not None}
        return json.dumps(fields, separators=(",", ":")).encode()

    def _prompt(self, request: Request) -> dict[str, Any]:
        if self.as_ids:
            return {"prompt": self.contents.ids(request)}
        text = self.contents.text(request)
        if self.endpoint == "chat":
            return {"messages": [{"role": "user", "content": text}]}
        return {"prompt": text}


def _labels(request: Request) -> dict[str, Any]:
    """What the workload says of a request, where it says anything."""
    labels: dict[str, Any] = {"temperature": 0.0}
    if request.num_seqs > 1:  # as greedy ones they would be the same, and some servers refuse that
        labels = {"temperature": 1.0, "n": request.num_seqs}
    if request.priority:
        whole = float(request.priority).is_integer()
        labels["priority"] = int(request.priority) if whole else request.priority
    if request.client:
        labels["user"] = request.client
    if request.deadline is not None:
        labels["deadline"] = round(request.deadline - (request.arrival or 0.0), 6)
    if request.extra:
        labels["vllm_xargs"] = dict(request.extra)
    return labels


class Seen(Request):
    """A request of a workload that is sent to a server elsewhere."""

    __slots__ = ("answer", "asked_len", "output_len", "sent")

    def __init__(self, request: Request, output_len: int) -> None:
        super().__init__(
            request.id,
            request.prompt if request.prompt is not None else request.prompt_len,
            request.params,
            arrival=request.arrival,
            priority=request.priority,
            client=request.client,
            deadline=request.deadline,
            extra=request.extra,
        )
        self.asked_len = request.prompt_len
        """Tokens of the prompt by the workload; `prompt_len` is what the server counts, once it
        has said so."""
        self.output_len = output_len
        self.sent: float | None = None
        self.answer = Answer()

    @property
    def usage(self) -> dict[str, Any]:
        return self.answer.usage

    @property
    def cache_known(self) -> bool:
        """Whether it said how much of the prompt a cache had."""
        return "cached_tokens" in (self.usage.get("prompt_tokens_details") or {})

    def ended(self, now: float) -> None:
        """The answer is whole, or there will be none."""
        answer, usage = self.answer, self.usage
        self._prompt = None  # the largest part of it, and sent
        self._first_token_at = answer.first
        self._generated = round((usage.get("completion_tokens") or answer.parts) / self.num_seqs)
        self._prompt_len = usage.get("prompt_tokens") or self.prompt_len
        if self.cache_known:
            self._cached_tokens = usage["prompt_tokens_details"]["cached_tokens"] or 0
        if answer.error:
            self._state, self._finish_reason = State.ABORTED, answer.error
            self._finished_at = now
        else:
            self._state, self._finish_reason = State.FINISHED, answer.reason
            self._finished_at = answer.last


LOOK = 0.02
"""Seconds between two looks at whether to stop."""

AHEAD, AHEAD_BYTES = 1000, 1 << 25
"""So many requests are written ahead, at most, and about so many bytes of them."""
COARSE = 0.002
"""Seconds by which a pause may last longer than it should."""

Job = tuple[Seen, bytes]


class Load:
    """The requests of a workload on their way to a server.

    `write` makes what is sent of a request and the length of its answer; `ask` sends it and
    returns when the answer is there. No more than `concurrency` are asked at once: others wait
    here as in front of the server, since they arrive when they are due.
    """

    def __init__(
        self,
        source: Source,
        write: Callable[[Request, int], bytes],
        ask: Callable[[Seen, bytes], Awaitable[None]],
        clock: Callable[[], float],
        concurrency: int | None = None,
    ) -> None:
        self.source, self.ask, self.clock = source, ask, clock
        self.late = array("d")
        """Seconds by which each was sent after it could have been."""
        self.running: set[Seen] = set()
        """Those that are sent and have no whole answer."""
        self._jobs = ((Seen(one, length), write(one, length)) for one, length in source.requests())
        self._ready: deque[Job] = deque()
        self._places = None if concurrency is None else asyncio.Semaphore(concurrency)

    def prepare(self) -> None:
        """Write the first requests, before the clock starts: many may be due at once."""
        size = 0
        while len(self._ready) < AHEAD and size < AHEAD_BYTES and self._prepared():
            size += len(self._ready[-1][1])

    async def run(
        self, left: Callable[[Seen], None], stopping: Callable[[], bool] = lambda: False
    ) -> None:
        """Send all and wait for their answers; `left` gets each that has one, or an error.

        Ends early, with some in `running`, once `stopping`, which is asked now and then, says so.
        """
        self._left = left
        work = asyncio.create_task(self._users() if self.source.mode == "closed" else self._timed())
        while not work.done() and not stopping():
            await asyncio.wait((work,), timeout=LOOK)
        if not work.done():
            work.cancel()
            await asyncio.wait((work,))
        if not work.cancelled() and (error := work.exception()):
            raise error.exceptions[0] if isinstance(error, BaseExceptionGroup) else error

    async def _timed(self) -> None:
        """Each when it is due."""
        burst = self.source.mode == "burst"
        async with asyncio.TaskGroup() as group:
            while (job := self._taken()) is not None:
                due = 0.0 if burst else job[0].arrival or 0.0
                await self._until(due)
                since = await self._place(due)
                group.create_task(self._one(job, due, since))
                asyncio.get_running_loop().call_soon(self._prepared)

    async def _users(self) -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(self.source.users or 1):
                group.create_task(self._user())

    async def _user(self) -> None:
        """Asks, waits, thinks, and asks again."""
        due = 0.0
        while (job := self._taken()) is not None:
            since = await self._place(due)
            asyncio.get_running_loop().call_soon(self._prepared)
            await self._one(job, due, since)
            due = self.clock() + self.source.think_time
            await self._until(due)

    async def _until(self, due: float) -> None:
        """Let others go on until then: at least once, and at the end without a pause."""
        await asyncio.sleep(max(due - self.clock() - COARSE, 0))
        while self.clock() < due:
            await asyncio.sleep(0)

    def _taken(self) -> Job | None:
        if not self._ready:
            self._prepared()
        return self._ready.popleft() if self._ready else None

    def _prepared(self) -> bool:
        """Write one more; whether there was one."""
        if (job := next(self._jobs, None)) is not None:
            self._ready.append(job)
        return job is not None

    async def _place(self, due: float) -> float:
        """Wait until one more may be asked; since when it could have been sent."""
        if self._places is None:
            return due
        full = self._places.locked()
        await self._places.acquire()
        return self.clock() if full else due

    async def _one(self, job: Job, due: float, since: float) -> None:
        seen, body = job
        arrives(seen, due)
        seen.sent = self.clock()
        self.late.append(seen.sent - since)
        self.running.add(seen)
        await self.ask(seen, body)
        if self._places is not None:
            self._places.release()
        seen.ended(self.clock())
        self.running.discard(seen)
        self._left(seen)
