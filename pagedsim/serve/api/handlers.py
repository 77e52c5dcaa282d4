"""Handlers of the API's paths: completions, chat, generate, models, tokenisation."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from pagedsim.serve.api.errors import APIError, BadRequest
from pagedsim.serve.api.parsing import NAME, read
from pagedsim.serve.api.reply import ChatReply, CompletionReply, Reply
from pagedsim.serve.api.schema import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    Fields,
    GenerateRequest,
    ParsedRequest,
    TokenizeRequest,
    body,
)
from pagedsim.serve.api.stream import EventStream, Results, WhilePresent, opened, whole
from pagedsim.serve.api.tokenise import AsyncTokenizer
from pagedsim.serve.async_engine import AsyncLLMEngine

ARRIVAL = "pagedsim.arrival"
"""Scope key of the arrival time on the engine's clock, taken before the body is read."""

F = TypeVar("F", bound=Fields)


@dataclass(frozen=True)
class Handlers:
    """Request handlers for one model."""

    engine: AsyncLLMEngine
    model: str
    tokenizer: AsyncTokenizer
    max_model_len: int
    max_body: int
    results: Results
    defaults: Mapping[str, Any]
    """Sampling defaults of the model."""
    created: int = field(default_factory=lambda: int(time.time()))

    async def read(self, request: Request, kind: type[F]) -> F:
        """Read a request's fields and check its model name."""
        fields = await read(request, kind, self.max_body)
        self.check_model(fields.model)
        return fields

    def check_model(self, name: str | None) -> None:
        """Raise APIError if `name` is not the served model."""
        if name not in (None, self.model):
            raise APIError(
                404,
                f"model={name!r}: is not served here; {self.model!r} is",
                "model",
                "model_not_found",
            )

    async def complete(self, request: Request) -> Response:
        """`POST /v1/completions`."""
        fields = await self.read(request, CompletionRequest)
        if fields.stream and (fields.best_of or 0) > fields.n:
            raise BadRequest(f"best_of={fields.best_of}: with stream, must be n={fields.n}")
        if fields.echo and fields.logprobs is not None:
            raise BadRequest("logprobs: with echo, must be null: a prompt's are not computed")
        parsed = self._parsed("cmpl", await self.tokenizer.tokens(fields.prompt), fields, request)
        reply = CompletionReply(parsed, self.model, fields, self.tokenizer)
        if fields.echo:
            await reply.echo()
        return await self._answer(request, parsed, reply)

    async def chat(self, request: Request) -> Response:
        """`POST /v1/chat/completions`."""
        fields = await self.read(request, ChatRequest)
        if fields.top_logprobs and not fields.logprobs:
            raise BadRequest(f"top_logprobs={fields.top_logprobs}: needs logprobs: true")
        parsed = self._parsed(
            "chatcmpl", [await self.tokenizer.chat(fields.messages)], fields, request
        )
        return await self._answer(
            request, parsed, ChatReply(parsed, self.model, fields, self.tokenizer)
        )

    async def generate(self, request: Request) -> Response:
        """`POST /generate`: start a request whose result is fetched later."""
        fields = await self.read(request, GenerateRequest)
        if len(fields.prompt) != 1:
            raise BadRequest(f"prompt: {len(fields.prompt)} prompts: must be one")
        parsed = self._parsed("gen", await self.tokenizer.tokens(fields.prompt), fields, request)
        self.results.start(parsed)
        return JSONResponse({"request_id": parsed.name})

    def _parsed(
        self,
        kind: str,
        prompts: Sequence[Sequence[int]],
        fields: CompletionRequest | ChatRequest | GenerateRequest,
        request: Request,
    ) -> ParsedRequest:
        """Build the engine request; its arrival is the time of its headers, before the body.

        Raises BadRequest if a prompt, or that with the tokens asked for, exceeds max_model_len.
        """
        longest, most = max(map(len, prompts)), self.max_model_len
        if (allowed := most - longest) < 0:
            raise BadRequest(f"prompt of {longest} tokens: max_model_len is {most}")
        fields.fill(self.defaults, max(allowed, 1))
        labels = {**fields.labels, "arrival": request.scope[ARRIVAL]}
        name = fields.request_id
        if name is None:
            header = request.headers.get("x-request-id", "")
            name = header if NAME.fullmatch(header) else f"{kind}-{uuid.uuid4().hex}"
        parsed = ParsedRequest(name, prompts, fields.sampling_params(), labels)
        if allowed < (wanted := parsed.params.max_tokens or 0):
            what = f"must be at most {allowed}" if allowed else "no token can follow"
            raise BadRequest(
                f"{fields.bound}={wanted}: with a prompt of {longest} tokens {what}: "
                f"max_model_len is {most}"
            )
        return parsed

    async def _answer(self, request: Request, parsed: ParsedRequest, reply: Reply) -> Response:
        if reply.fields.stream:
            return EventStream(self.engine, parsed, reply)
        async with WhilePresent(request.receive):
            with opened(self.engine, parsed, stream=False) as streams:
                outputs = await whole(streams)
            return JSONResponse(reply.whole(outputs))
        return Response(status_code=499)  # client disconnected


PIECE = 65536
"""Values serialised per call: json.dumps holds the GIL."""


def add_models(router: APIRouter, front: Handlers) -> None:
    """Add the paths that generate no tokens: models, results, tokenisation."""

    def model() -> dict[str, Any]:
        return {
            "id": front.model,
            "object": "model",
            "created": front.created,
            "owned_by": "pagedsim",
            "root": front.model,
            "parent": None,
            "max_model_len": front.max_model_len,
        }

    @router.get("/v1/models")
    async def models() -> dict[str, Any]:
        """List the served model."""
        return {"object": "list", "data": [model()]}

    @router.get("/v1/models/{name:path}")
    async def one_model(name: str) -> dict[str, Any]:
        """The served model, by name."""
        front.check_model(name)
        return model()

    @router.get("/result/{name}")
    async def result(name: str) -> dict[str, Any]:
        """State and output of a request sent to /generate."""
        return vars(front.results.find(name))

    @router.post("/tokenize", openapi_extra=body(TokenizeRequest), response_class=JSONResponse)
    async def tokenize(request: Request) -> Response:
        """The tokens of a prompt, or of a conversation under the chat template."""
        fields = await front.read(request, TokenizeRequest)
        if (fields.prompt is None) is (fields.messages is None):
            raise BadRequest("prompt: must be given, or messages in its place")
        if fields.prompt is not None:
            (ids,) = await front.tokenizer.tokens([fields.prompt])
        else:
            ids = await front.tokenizer.chat(fields.messages or [], fields.add_generation_prompt)
        with_texts = fields.return_token_strs
        text = await front.tokenizer.apart(len(ids), lambda: _tokens(front, ids, with_texts))
        return Response(text, media_type="application/json")

    @router.post("/detokenize", openapi_extra=body(DetokenizeRequest))
    async def detokenize(request: Request) -> dict[str, Any]:
        """The text of tokens."""
        fields = await front.read(request, DetokenizeRequest)
        return {"prompt": await front.tokenizer.long_text(fields.tokens)}


def _tokens(front: Handlers, ids: Sequence[int], with_texts: bool) -> str:
    """The body of a /tokenize response, optionally with the text of each token."""
    texts = _listed([front.tokenizer.token(token) for token in ids]) if with_texts else "null"
    about = f'"count":{len(ids)},"max_model_len":{front.max_model_len}'
    return f'{{{about},"tokens":{_listed(ids)},"token_strs":{texts}}}'


def _listed(values: Sequence[int | str]) -> str:
    """A JSON list, serialised in pieces of PIECE values."""
    pieces = [
        json.dumps(values[at : at + PIECE], separators=(",", ":"))[1:-1]
        for at in range(0, len(values), PIECE)
    ]
    return f"[{','.join(pieces)}]"
