"""The FastAPI application: routes, authentication, header checks, and error handlers."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable, Iterable
from ipaddress import ip_address
from typing import Annotated
from urllib.parse import urlsplit

from fastapi import APIRouter, Depends, FastAPI
from fastapi.responses import JSONResponse, Response
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.types import ASGIApp, Receive, Scope, Send

import pagedsim
from pagedsim.serve.api.errors import HANDLED, APIError, answer
from pagedsim.serve.api.handlers import ARRIVAL, Handlers, add_models
from pagedsim.serve.api.schema import (
    REFUSALS,
    ChatRequest,
    CompletionRequest,
    GenerateRequest,
    body,
)
from pagedsim.serve.api.stream import Results
from pagedsim.serve.api.tokenise import AsyncTokenizer
from pagedsim.serve.async_engine import AsyncLLMEngine
from pagedsim.serve.factory import ServedModel
from pagedsim.serve.metrics import Exporter, Metrics

MAX_BODY = 2**21

_BEARER = HTTPBearer(auto_error=False)


def make_app(
    engine: AsyncLLMEngine,
    served_model: ServedModel,
    *,
    metrics: Metrics | None = None,
    api_key: str | None = None,
    max_body: int = MAX_BODY,
    hosts: Iterable[str] | None = None,
) -> FastAPI:
    """The server's application over an engine, whose observer `metrics` must be.

    With an `api_key`, all paths that generate tokens or describe the model require it. `hosts` are
    the accepted Host names besides IP addresses and localhost; None accepts any.
    """
    app = FastAPI(
        title="pagedsim",
        version=pagedsim.__version__,
        docs_url=None,  # these pages load scripts from a CDN
        redoc_url=None,
        responses=REFUSALS,
    )
    app.add_middleware(HeaderCheck, now=lambda: engine.now, hosts=hosts)
    for kind in HANDLED:
        app.add_exception_handler(kind, answer)
    served = served_model.engine
    front = Handlers(
        engine=engine,
        model=served_model.model,
        tokenizer=AsyncTokenizer(served.tokenizer, served_model.model),
        max_model_len=served.scheduler.max_model_len,
        max_body=max_body,
        results=Results(engine),
        defaults=served.default_sampling,
    )
    guarded = APIRouter(dependencies=[Depends(_guard(api_key))])
    for path, handler, fields in (
        ("/v1/completions", front.complete, CompletionRequest),
        ("/v1/chat/completions", front.chat, ChatRequest),
        ("/generate", front.generate, GenerateRequest),
    ):
        guarded.add_api_route(
            path, handler, methods=["POST"], openapi_extra=body(fields), response_class=JSONResponse
        )
    add_models(guarded, front)
    app.include_router(guarded)
    exporter = None
    if metrics is not None:
        exporter = Exporter(metrics, served.scheduler, served_model.model, lambda: engine.lag)
    _add_open(app, engine, exporter)
    return app


def _guard(api_key: str | None) -> Callable[..., Awaitable[None]]:

    async def check(
        given: Annotated[HTTPAuthorizationCredentials | None, Depends(_BEARER)],
    ) -> None:
        refuse_wrong_key(given.credentials if given else None, api_key)

    return check


def refuse_wrong_key(given: str | None, api_key: str | None) -> None:
    """Raise APIError unless a bearer token is the key, where there is one."""
    if api_key is None:
        return
    if given is None:
        raise APIError(401, "an API key must be given: Authorization: Bearer ...")
    # Headers are read as if they were Latin-1.
    if not hmac.compare_digest(given.encode("latin-1"), api_key.encode()):
        raise APIError(401, "the API key is wrong")


def _add_open(app: FastAPI, engine: AsyncLLMEngine, exporter: Exporter | None) -> None:
    """Add the paths that need no key, with HEAD, which some clients use as a liveness check."""

    async def health() -> Response:
        """200 if requests are accepted, else 503."""
        return Response(status_code=200 if engine.healthy else 503)

    async def version() -> Response:
        """The server's version."""
        return JSONResponse({"version": pagedsim.__version__})

    handlers = {"/health": health, "/ping": health, "/version": version}
    if exporter is not None:

        async def metrics() -> Response:
            """Prometheus metrics under vLLM's names."""
            return Response(generate_latest(exporter), media_type=CONTENT_TYPE_LATEST)

        handlers["/metrics"] = metrics
    for path, handler in handlers.items():
        app.add_api_route(path, handler, methods=["GET"], response_class=Response)
        app.add_api_route(path, handler, methods=["HEAD"], include_in_schema=False)


class HeaderCheck:
    """Refuse requests by their headers, before the body is read.

    - Host: must be a name of this server (against DNS rebinding).
    - Origin, if sent: must be the server's own page.
    - Content-Type, if sent: must be JSON; browsers send other types cross-site without preflight.
    """

    def __init__(
        self, app: ASGIApp, *, now: Callable[[], float], hosts: Iterable[str] | None = None
    ) -> None:
        """`hosts`: accepted names besides IP addresses and localhost; None accepts any."""
        self._app, self._now = app, now
        self._hosts = None if hosts is None else {_plain(host) for host in hosts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        scope[ARRIVAL] = self._now()
        try:
            self._check(scope["method"], dict(reversed(scope["headers"])))  # the first of a name
        except APIError as problem:
            return await problem.response(scope, receive, send)
        await self._app(scope, receive, send)

    def _check(self, method: str, fields: dict[bytes, bytes]) -> None:
        host = fields.get(b"host", b"").decode("latin-1")
        if not self._known(name := _name(host)):
            raise APIError(
                403, f"Host: {name!r} is not a name of this server; hosts=[...] adds some"
            )
        origin = fields.get(b"origin")
        if origin is not None and not self._same(site := origin.decode("latin-1"), host):
            raise APIError(403, f"Origin: {site!r} is another site than {host!r}")
        kind = fields.get(b"content-type", b"").decode("latin-1").partition(";")[0].strip().lower()
        if method == "POST" and kind and kind != "application/json":
            raise APIError(415, f"Content-Type: {kind!r}: must be application/json")

    def _known(self, name: str) -> bool:
        if self._hosts is None or name in self._hosts:
            return True
        return name == "localhost" or name.endswith(".localhost") or _is_address(name)

    def _same(self, origin: str, host: str) -> bool:
        """Whether `origin` is this server, or one of `hosts`."""
        try:
            site = urlsplit(origin)
            where = _plain(site.netloc)
        except ValueError:
            return False
        default = {"http": ":80", "https": ":443"}.get(site.scheme, "")
        same = where.removesuffix(default) == _plain(host).removesuffix(default)
        return same or (self._hosts is not None and _name(where) in self._hosts)


def _plain(host: str) -> str:
    return host.strip().lower()


def _name(host: str) -> str:
    """A host without its port.

    >>> [_name(host) for host in ("LocalHost:8000", "[::1]:8000", "::1", "10.0.0.1")]
    ['localhost', '::1', '::1', '10.0.0.1']
    """
    host = _plain(host)
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host if host.count(":") > 1 else host.partition(":")[0]


def _is_address(name: str) -> bool:
    """Whether it is an IP address, which DNS cannot rebind."""
    try:
        ip_address(name)
    except ValueError:
        return False
    return True
