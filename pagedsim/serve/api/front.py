"""What the paths of the server have in common: the engine, its model, and what they take."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from pagedsim.serve.api.asked import Asked, while_present, whole
from pagedsim.serve.api.body import read
from pagedsim.serve.api.chat import Messages
from pagedsim.serve.api.completions import Texts, refuse_misfits
from pagedsim.serve.api.events import EventStream
from pagedsim.serve.api.fields import (
    ChatRequest,
    CompletionRequest,
    Fields,
    GenerateRequest,
    Sampling,
)
from pagedsim.serve.api.gate import ARRIVAL
from pagedsim.serve.api.given import NAME
from pagedsim.serve.api.problem import Bad, Problem
from pagedsim.serve.api.reply import Reply
from pagedsim.serve.api.results import Results
from pagedsim.serve.api.words import Words
from pagedsim.serve.async_engine import AsyncLLMEngine

F = TypeVar("F", bound=Fields)


@dataclass(frozen=True)
class Front:
    """Takes requests for one model."""

    engine: AsyncLLMEngine
    model: str
    words: Words
    max_model_len: int
    max_body: int
    results: Results
    defaults: Mapping[str, Any]
    """Of sampling, where a request says nothing."""
    created: int = field(default_factory=lambda: int(time.time()))

    async def read(self, request: Request, kind: type[F]) -> F:
        """A request's fields, for the model that is served."""
        fields = await read(request, kind, self.max_body)
        self.check_model(fields.model)
        return fields

    def check_model(self, name: str | None) -> None:
        """Raise Problem for another model than the one that is served."""
        if name not in (None, self.model):
            raise Problem(
                404,
                f"model={name!r}: is not served here; {self.model!r} is",
                "model",
                "model_not_found",
            )

    async def complete(self, request: Request) -> Response:
        """Prompts go on."""
        fields = await self.read(request, CompletionRequest)
        refuse_misfits(fields)
        prompts = await self._tokens(fields.prompt)
        asked = self._asked("cmpl", prompts, fields, request)
        self._refuse_too_long(asked, fields.bound)
        reply = Texts(asked.name, self.model, fields, prompts, self.words)
        if fields.echo:
            await reply.echo()
        return await self._answer(request, asked, reply)

    async def chat(self, request: Request) -> Response:
        """The next message of a conversation."""
        fields = await self.read(request, ChatRequest)
        if fields.top_logprobs and not fields.logprobs:
            raise Bad(f"top_logprobs={fields.top_logprobs}: needs logprobs: true")
        prompts = self._fitting([await self.words.chat(fields.messages)])
        asked = self._asked("chatcmpl", prompts, fields, request)
        self._refuse_too_long(asked, fields.bound)
        reply = Messages(asked.name, self.model, fields, prompts, self.words)
        return await self._answer(request, asked, reply)

    async def generate(self, request: Request) -> Response:
        """An answer that is asked for later."""
        fields = await self.read(request, GenerateRequest)
        if len(fields.prompt) != 1:
            raise Bad(f"prompt: {len(fields.prompt)} prompts: must be one")
        prompts = await self._tokens(fields.prompt)
        asked = self._asked("gen", prompts, fields, request)
        self._refuse_too_long(asked, fields.bound)
        self.results.start(asked)
        return JSONResponse({"request_id": asked.name})

    async def _tokens(self, prompts: Sequence[str | list[int]]) -> list[list[int]]:
        return self._fitting(await self.words.tokens(prompts))

    def _fitting(self, prompts: list[list[int]]) -> list[list[int]]:
        """The prompts, none of which is beyond the model, before any of them is begun."""
        if (longest := max(map(len, prompts))) > self.max_model_len:
            raise Bad(f"prompt of {longest} tokens: max_model_len is {self.max_model_len}")
        return prompts

    def _asked(
        self,
        kind: str,
        prompts: Sequence[Sequence[int]],
        fields: CompletionRequest | ChatRequest | GenerateRequest,
        request: Request,
    ) -> Asked:
        """What is asked of the engine; it arrived when its headers did, before it was read."""
        fields.fill(self.defaults, max(self.max_model_len - max(map(len, prompts)), 1))
        labels = {**fields.labels, "arrival": request.scope[ARRIVAL]}
        return Asked(_name(kind, fields, request), prompts, fields.asked(), labels)

    def _refuse_too_long(self, asked: Asked, bound: str) -> None:
        """Raise Bad where a prompt and the tokens of the field `bound` are beyond the model."""
        longest, most = max(map(len, asked.prompts)), asked.params.max_tokens or 0
        if (allowed := self.max_model_len - longest) < most:
            what = f"must be at most {allowed}" if allowed else "no token can follow"
            raise Bad(
                f"{bound}={most}: with a prompt of {longest} tokens {what}: "
                f"max_model_len is {self.max_model_len}"
            )

    async def _answer(self, request: Request, asked: Asked, reply: Reply) -> Response:
        if reply.fields.stream:
            return EventStream(self.engine, asked, reply)
        async with while_present(request.receive):
            with asked.opened(self.engine, stream=False) as streams:
                outputs = await whole(streams)
            return JSONResponse(reply.whole(outputs))
        return Response(status_code=499)  # nobody reads it


def _name(kind: str, fields: Sampling, request: Request) -> str:
    """A request's id: the client's own, if it has one."""
    if fields.request_id is not None:
        return fields.request_id
    header = request.headers.get("x-request-id", "")
    return header if NAME.fullmatch(header) else f"{kind}-{uuid.uuid4().hex}"
