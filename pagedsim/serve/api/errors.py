"""Errors in OpenAI's format: a status, and one line that names the field."""

from __future__ import annotations

import re
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

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
_LOST: dict[str | None, tuple[int, str]] = {
    "timeout": (504, "the request took longer than its timeout"),
    "abort": (503, "the request was aborted: the server is shutting down"),
    "rejected": (503, "the policy has rejected the request"),
}
_FAILED = 500, "the step that computed the request failed; others are served on"
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
    for completion in output.outputs:
        if completion.finish_reason not in ("stop", "length"):
            raise APIError(*_LOST.get(completion.finish_reason, _FAILED))


HANDLED = (
    *(APIError, PagedsimError, HTTPException, RequestValidationError, ClientDisconnect),
    Exception,
)
"""Exception types that `answer` handles; `Exception` stands for all others in Starlette."""


async def answer(request: Request, error: Exception) -> Response:
    """Exception handler: the response to any error; details of internal ones are in the log."""
    match error:
        case ClientDisconnect():  # while sending its request
            return Response(status_code=499)
        case APIError():
            return error.response
        case PagedsimError():
            return problem_of(error).response
        case HTTPException(status_code=status):  # an unknown path or method
            words = {404: "no such path", 405: "no such method of this path"}
            what = words.get(status, error.detail)
            response = APIError(status, f"{request.method} {request.url.path}: {what}").response
            response.headers.update(error.headers or {})
            return response
        case RequestValidationError():  # of a path or a query
            (first, *_) = error.errors()
            place = ".".join(map(str, first["loc"]))
            return BadRequest(f"{place}: {first['msg']}").response
    return APIError(500, f"an error of the server's: {type(error).__name__}").response
