"""Parse a request body: size limits, JSON, and field validation."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from difflib import get_close_matches
from typing import Any, TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails, from_json

from pagedsim.serve.api.errors import APIError, BadRequest
from pagedsim.serve.api.validation import NEUTRAL, excerpt, refuse_strange

MOST_VALUES = 2**20
MOST_TEXTS = 2**17
MOST_CONTAINERS = 2**16
"""Lists, objects, and fields of objects."""


def refuse_many(body: bytes) -> None:
    """Raise APIError for JSON with more values than the limits; counted without parsing.

    A parser holds the GIL until it ends. Numbers cost it least, objects and lists most, so each
    kind has its own limit.
    """
    bare = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    _bound("texts", bare.count(b'"') // 2, MOST_TEXTS)
    outside = b"".join(bare.split(b'"')[::2])
    _bound("values", outside.count(b","), MOST_VALUES)
    _bound("lists and fields", sum(map(outside.count, (b"[", b"{", b":"))), MOST_CONTAINERS)


def _bound(what: str, count: int, most: int) -> None:
    if count > most:
        raise APIError(413, f"the body has {count} {what}: at most {most}")


M = TypeVar("M", bound=BaseModel)

_KINDS = {
    "bool_type": "true or false",
    "string_type": "a text",
    "int_type": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
}
_BOUNDS = {
    "greater_than_equal": ("of at least", "ge"),
    "less_than_equal": ("of at most", "le"),
    "greater_than": ("above", "gt"),
    "less_than": ("below", "lt"),
}
_LONG = 32768
"""Bodies of at least so many bytes are parsed in a worker thread, not on the event loop."""
_MOST_FIELDS = 256
_LONGEST_NAME = 80

_THREAD = ThreadPoolExecutor(1, "body")


async def read(request: Request, kind: type[M], most: int) -> M:
    """Read and validate a request body; raises APIError if it is too large or invalid."""
    body = await _bytes(request, most)
    if len(body) < _LONG:
        return fields_of(body, kind)
    return await asyncio.get_running_loop().run_in_executor(_THREAD, fields_of, body, kind)


async def _bytes(request: Request, most: int) -> bytes:
    """Read the body up to the size limit."""
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > most:
        raise _too_large(most)
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > most:
            raise _too_large(most)
        parts.append(part)
    return b"".join(parts)


def _too_large(most: int) -> APIError:
    return APIError(413, f"the body is larger than {most} bytes (max_body)")


def fields_of(body: bytes, kind: type[M]) -> M:
    """Validate a body; a null field counts as absent."""
    refuse_many(body)
    try:
        plain = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise BadRequest(f"the body is not JSON: {error}") from error
    if not isinstance(plain, dict):
        raise BadRequest("the body must be a JSON object")
    if len(plain) > _MOST_FIELDS:
        raise BadRequest(f"the body has {len(plain)} fields: at most {_MOST_FIELDS}")
    given = {name: value for name, value in plain.items() if value is not None}
    for name in given.keys() & NEUTRAL.keys() - kind.model_fields.keys():
        refuse_strange(name, given.pop(name))
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        (first, *_) = error.errors(include_url=False)
        raise _refused(first, kind) from error


def _refused(error: ErrorDetails, kind: type[BaseModel]) -> BadRequest:
    """The first validation error, in one line."""
    where, what = _place(error["loc"]), error["type"]
    if what == "extra_forbidden":
        return BadRequest(_unknown(where, kind))
    if what == "missing":
        return BadRequest(f"{where}: must be given")
    if what == "value_error":  # raised in validation.py; it names the field
        return BadRequest(str(error["ctx"]["error"]))
    return BadRequest(f"{where}={excerpt(error['input'])}: must be {_allowed(what, error)}")


def _allowed(what: str, error: ErrorDetails) -> str:
    if what in _BOUNDS:
        word, name = _BOUNDS[what]
        bound = error["ctx"][name]
        return f"a number {word} {int(bound) if bound == int(bound) else bound}"
    if what in _KINDS:
        return _KINDS[what]
    if what == "string_too_long":
        return f"a text of at most {error['ctx']['max_length']} characters"
    if what.startswith("int"):
        return "a whole number"
    return error["msg"].lower()


def _place(path: Iterable[int | str]) -> str:
    parts = [f"[{one}]" if isinstance(one, int) else f".{one}" for one in path]
    return "".join(parts).lstrip(".") or "the body"


def _unknown(name: str, kind: type[BaseModel]) -> str:
    inside, _, last = name.rpartition(".")
    known: Mapping[str, Any] = kind.model_fields
    near = []
    if not inside and len(last) <= _LONGEST_NAME:
        near = get_close_matches(last, [*known, *NEUTRAL], n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    if len(name) > _LONGEST_NAME:
        name = f"{name[:_LONGEST_NAME]}…"
    return f"{name}: no such field{hint}"
