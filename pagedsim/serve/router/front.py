"""The HTTP front of the router: requests are passed on as they are, and answers as they come."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain, count
from typing import Any

from fastapi import Request as HTTPRequest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from pagedsim.core import PagedsimError, Request, SamplingParams
from pagedsim.serve.api.app import refuse_wrong_key
from pagedsim.serve.api.errors import APIError, BadRequest, answer, problem_of
from pagedsim.serve.api.handlers import ARRIVAL
from pagedsim.serve.api.parsing import messages, object_of, read_body
from pagedsim.serve.api.reply import DONE, event
from pagedsim.serve.api.stream import WhilePresent
from pagedsim.serve.api.tokenise import AsyncTokenizer
from pagedsim.serve.router.dispatch import Dispatch, healthy
from pagedsim.serve.router.passed import Differs, Passed
from pagedsim.serve.router.servers import ServerView
from pagedsim.serve.router.upstream import Connection, Fields

ROUTED = ("/v1/completions", "/v1/chat/completions")
ANYWHERE = ("/v1/models", "/tokenize", "/detokenize", "/version")
"""Paths that any server answers alike."""
SESSION = "x-session-id"
"""The header that names a request's session."""
_PASSED_ON = (b"content-type", b"accept", b"user-agent", b"x-request-id", b"authorization")
_PASSED_BACK = (b"content-type", b"content-length", b"cache-control", b"retry-after")
"""Headers of answers that clients get; the lengths are those of whole answers."""


class Lost(APIError):
    """A server died, or shuts down, before it has answered."""

    def __init__(self) -> None:
        super().__init__(502, "the server died before it answered")


@dataclass
class Call:
    """A request as it is passed on, and what its client has of the answer."""

    path: str
    fields: Fields
    """Those of its head that are passed on."""
    body: bytes
    request: Request
    whole: bool = True
    """Whether the answer comes in one piece."""
    passed: Passed = field(default_factory=Passed)
    begun: bool = False


class Front:
    """The application. It passes bodies on unread but for what routers and queues go by."""

    dead = False

    def __init__(
        self,
        dispatch: Dispatch,
        tokenizer: AsyncTokenizer,
        *,
        max_body: int,
        max_retries: int,
        timeout: float | None = None,
        api_key: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """With an `api_key`, clients must present it; `headers` are added to each request."""
        self.dispatch, self.tokenizer = dispatch, tokenizer
        self.finished = 0
        self._most, self._retries, self._timeout = max_body, max_retries, timeout
        self._key = api_key
        self.fields = [(name.encode(), value.encode()) for name, value in (headers or {}).items()]
        self._numbers = count()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closing = self._cut = False

    # -- for the listener ------------------------------------------------------------------------

    async def start(self) -> None:
        """Look at the servers for the first time, and from then on."""
        await self.dispatch.look_once()
        self._looks = asyncio.create_task(self.dispatch.look())

    @property
    def unfinished(self) -> int:
        return len(self._tasks)

    async def drain(self, seconds: float, *, hurried: Callable[[], bool]) -> tuple[int, int]:
        self._closing = True
        self.dispatch.close()
        before, loop = self.unfinished, asyncio.get_running_loop()
        until = loop.time() + seconds
        while self._tasks and loop.time() < until and not hurried():
            await asyncio.sleep(min(0.05, max(until - loop.time(), 0)))
        left, self._cut = self.unfinished, True
        for task in self._tasks:
            task.cancel()
        return before - left, left

    async def close(self) -> None:
        self._looks.cancel()
        for server in self.dispatch.servers:
            server.upstream.close()

    # -- requests --------------------------------------------------------------------------------

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        http = HTTPRequest(scope, receive)
        try:
            response = await self._answer(http, send)
        except Exception as error:
            response = await answer(http, error)
        if response is not None:
            await response(scope, receive, send)

    async def _answer(self, http: HTTPRequest, send: Send) -> Response | None:
        path, servers = http.scope["path"], self.dispatch.servers
        if path in ("/health", "/ping"):
            up = not self._closing and any(server.up for server in servers)
            return Response(status_code=200 if up else 503)
        if path == "/metrics":
            return Response(self._metrics(), media_type="text/plain")
        if self._key is not None:
            scheme, _, key = http.headers.get("authorization", "").partition(" ")
            refuse_wrong_key(key.strip() if scheme.lower() == "bearer" else None, self._key)
        if http.method == "POST" and path in ROUTED:
            await self._routed(http, send)
        elif path in ANYWHERE:
            if not any(server.up for server in servers):
                raise APIError(503, "no server is up")
            first = next(server for server in servers if server.up)
            await self._pass(await self._call(http, read=False), first, send, http.method)
        else:
            raise APIError(404, f"{http.method} {path}: no such path of a router")
        return None

    async def _routed(self, http: HTTPRequest, send: Send) -> None:
        """Pass a request on and its answer back; an error of a stream that has begun ends it."""
        call, task = await self._call(http), asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            async with WhilePresent(http.receive):
                try:
                    await self._in_time(call, send)
                except APIError as problem:
                    if not call.begun:
                        raise
                    last = (event(problem.plain) + DONE).encode()
                    await send({"type": "http.response.body", "body": last})
        finally:
            self._tasks.discard(task)

    async def _in_time(self, call: Call, send: Send) -> None:
        try:
            async with asyncio.timeout(self._timeout):
                await self._retried(call, send)
            self.finished += 1
        except TimeoutError as error:
            raise APIError(504, "the request took longer than its timeout") from error
        except asyncio.CancelledError as error:
            if not self._cut:
                raise
            why = "the request was aborted: the server is shutting down"
            raise APIError(503, why) from error
        except PagedsimError as error:
            raise problem_of(error) from error

    async def _retried(self, call: Call, send: Send) -> None:
        """Pass a request on, and to another server where one dies before it has answered."""
        for tries in count():
            server = await self.dispatch.place(call.request, call.whole)
            try:
                return await self._pass(call, server, send)
            except Lost as error:
                self.dispatch.doubt(server)
                if tries >= self._retries:
                    why = f"servers died under it more than {tries} times (fleet.max_retries)"
                    raise APIError(503, why) from error
            except Differs as error:
                why = "its server died while it answered, and another one answers otherwise"
                raise APIError(502, why) from error
            finally:
                self.dispatch.left(call.request, server)
            self.dispatch.retries += 1
            call.request = call.request.afresh()
            call.passed.restart()

    async def _pass(self, call: Call, server: ServerView, send: Send, method: str = "POST") -> None:
        """Pass a request to a server, and its answer back. Raises Lost if the server is."""
        request, passed, answer = call.request, call.passed, None
        try:
            answer = await server.upstream.connection()
            await answer.ask(method, call.path, call.fields, call.body)
            if not answer.headers.get(b"content-type", b"").startswith(b"text/event-stream"):
                body = await answer.read()
                if answer.status == 503 and not await healthy(server):
                    raise Lost
                await send(_head(answer, server))
                return await send({"type": "http.response.body", "body": body})
            while part := await answer.part():
                if not (news := passed.feed(part)):
                    continue
                if request.first_token_at is None:
                    request._first_token_at = self.dispatch.clock()
                request._generated = passed.tokens
                if not call.begun:
                    call.begun = True
                    await send(_head(answer, server))
                await send({"type": "http.response.body", "body": news, "more_body": True})
        except OSError as error:  # which a TimeoutError is
            raise Lost from error
        finally:
            if answer is not None:
                answer.release()
        await send({"type": "http.response.body", "body": passed.end()})

    # -- what routers go by ----------------------------------------------------------------------

    async def _call(self, http: HTTPRequest, read: bool = True) -> Call:
        """A request as its server gets it, and, if it is `read`, as the router does."""
        body = await read_body(http, self._most)
        own = self._key or self.fields
        fields = [
            (name, value)
            for name, value in http.scope["headers"]
            if name in _PASSED_ON and not (name == b"authorization" and own)
        ]
        asked = object_of(body) if read else {}
        arrival, limit = http.scope[ARRIVAL], asked.get("deadline")
        request = Request(
            next(self._numbers),
            (await self._tokens(asked) if read else None) or 1,
            _params(asked.get("max_completion_tokens") or asked.get("max_tokens"), asked.get("n")),
            arrival=arrival,
            priority=asked["priority"] if _is_number(asked.get("priority")) else 0,
            client=str(asked.get("user") or ""),
            deadline=arrival + limit if _is_number(limit) else None,
            session=http.headers.get(SESSION),
            extra=extra if isinstance(extra := asked.get("vllm_xargs"), dict) else None,
        )
        whole = not asked.get("stream")
        return Call(http.scope["path"], [*fields, *self.fields], body, request, whole)

    async def _tokens(self, fields: Mapping[str, Any]) -> Sequence[int]:
        """The tokens of all prompts of a request; what is wrong with them its server says."""
        prompt = fields.get("prompt")
        if prompt is None:
            try:
                return await self.tokenizer.chat(messages(fields.get("messages")))
            except (ValueError, BadRequest):  # images, tools: by their length
                prompt = json.dumps(fields.get("messages"))
        if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
            prompt = [prompt]
        try:
            first, *others = await self.tokenizer.tokens(prompt)
            return [*first, *chain(*others)] if others else first
        except (TypeError, ValueError):  # none, or no list of them
            return ()

    def _metrics(self) -> str:
        """The router's own metrics."""
        dispatch = self.dispatch
        lines = [
            f"pagedsim:router_retries_total {dispatch.retries}",
            f"pagedsim:router_requests_held {len(dispatch.held)}",
        ]
        for server in dispatch.servers:
            for name, value in (
                ("replica_up", int(server.up)),
                ("requests_in_flight", len(server.sent)),
                ("requests_total", dispatch.placed[server.name]),
            ):
                lines.append(f'pagedsim:router_{name}{{replica="{server.name}"}} {value}')
        return "\n".join([*lines, ""])


def _head(answer: Connection, server: ServerView) -> dict[str, Any]:
    """The beginning of an answer, with the name of the server that gives it."""
    fields = [(name, answer.headers[name]) for name in _PASSED_BACK if name in answer.headers]
    fields.append((b"x-replica", server.name.encode()))
    return {"type": "http.response.start", "status": answer.status, "headers": fields}


def _params(most: Any, sequences: Any) -> SamplingParams:
    """The sampling settings that say how large an answer may become."""
    try:
        return _checked(most, sequences or 1)
    except (PagedsimError, TypeError):  # its server says what is wrong
        return SamplingParams()


@lru_cache(1024, typed=True)
def _checked(most: Any, sequences: Any) -> SamplingParams:
    return SamplingParams(max_tokens=most, n=sequences)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float)
