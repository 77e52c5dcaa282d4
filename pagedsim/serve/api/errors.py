"""Errors in OpenAI's format: a status, and one line that names the field."""

from __future__ import annotations

import re
from typing import Any, NoReturn

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

from pagedsim.core import PagedsimError, RequestError
from pagedsim.engine.output import RequestOutput
from pagedsim.serve.async_engine import Closing, EngineDead, Overloaded

LONGEST = 400
"""Characters of an error message; long client input is truncated."""

_TYPES = {
    403: "permission_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable",
    504: "timeout",
}
_CODES = {401: "invalid_api_key", 429: "overloaded"}
_NAMED = re.compile(r"^request '[^']*': |SamplingParams\.")
_PLACE = re.compile(r"^([a-z_]+)[\w.\[\]]*(?:[=:]| of )")


class APIError(Exception):
    """An error response in OpenAI's format."""

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code or _CODES.get(status)
        self.retry_after: int | None = None
        """Seconds for the Retry-After header."""

    @property
    def plain(self) -> dict[str, Any]:
        """The JSON body."""
        kind = _TYPES.get(self.status, "invalid_request_error")
        message = brief(str(self))
        return {"error": {"message": message, "type": kind, "param": self.param, "code": self.code}}

    @property
    def response(self) -> Response:
        """The HTTP response."""
        headers = {}
        if self.retry_after is not None:
            headers["Retry-After"] = str(self.retry_after)
        if self.status in (403, 413, 415):
            headers["Connection"] = "close"  # the rest of the body is not read
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return JSONResponse(self.plain, self.status, headers)


class BadRequest(APIError):
    """An invalid request (400); `text` begins with the name of the field."""

    def __init__(self, text: str) -> None:
        place = _PLACE.match(text[:LONGEST])
        super().__init__(400, text, place[1] if place else None)


def brief(text: str) -> str:
    """A text as one line of bounded length."""
    line = " ".join(text.split())
    return line if len(line) <= LONGEST else f"{line[: LONGEST - 1]}…"


def problem_of(error: PagedsimError) -> APIError:
    """Translate a PagedsimError into an APIError."""
    if isinstance(error, RequestError):
        return BadRequest(_NAMED.sub("", str(error)).replace("None", "null"))
    if isinstance(error, Overloaded):
        problem = APIError(429, str(error))
        problem.retry_after = error.retry_after
        return problem
    return APIError(503 if isinstance(error, Closing | EngineDead) else 500, str(error))


def refuse_lost(output: RequestOutput) -> None:
    """Raise APIError for a request that ended without completing."""
    if not output.finished:
        return
    for one in output.outputs:
        if one.finish_reason not in ("stop", "length"):
            _lost(one.finish_reason)


def _lost(reason: str | None) -> NoReturn:
    if reason == "timeout":
        raise APIError(504, "the request took longer than its timeout")
    if reason == "abort":
        raise APIError(503, "the request was aborted: the server is shutting down")
    if reason == "rejected":
        raise APIError(503, "the policy has rejected the request")
    raise APIError(500, "the step that computed the request failed; others are served on")


async def answer_problem(request: Request, problem: Exception) -> Response:
    """Exception handler: APIError."""
    assert isinstance(problem, APIError)
    return problem.response


async def answer_error(request: Request, error: Exception) -> Response:
    """Exception handler: PagedsimError that was not translated earlier."""
    assert isinstance(error, PagedsimError)
    return problem_of(error).response


async def answer_http(request: Request, error: Exception) -> Response:
    """Exception handler: unknown paths and methods."""
    assert isinstance(error, HTTPException)
    where = f"{request.method} {request.url.path}"
    words = {404: "no such path", 405: "no such method of this path"}
    problem = APIError(error.status_code, f"{where}: {words.get(error.status_code, error.detail)}")
    response = problem.response
    response.headers.update(error.headers or {})
    return response


async def answer_invalid(request: Request, error: Exception) -> Response:
    """Exception handler: invalid path or query parameters."""
    assert isinstance(error, RequestValidationError)
    (first, *_) = error.errors()
    place = ".".join(map(str, first["loc"]))
    return BadRequest(f"{place}: {first['msg']}").response


async def answer_gone(request: Request, error: Exception) -> Response:
    """Exception handler: the client disconnected while sending its request."""
    return Response(status_code=499)


async def answer_fault(request: Request, error: Exception) -> Response:
    """Exception handler: internal errors; details are in the server's log."""
    return APIError(500, f"an error of the server's: {type(error).__name__}").response
