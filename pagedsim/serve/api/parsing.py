"""Parsing and validation of request bodies: size limits, JSON, union types, unsupported fields.

Fields of other servers are accepted where they do not change the answer, so that unmodified clients
work, and refused where they would.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from importlib.resources import files
from time import perf_counter, sleep
from typing import Any, TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails, from_json
from starlette.requests import ClientDisconnect

from pagedsim.core.errors import shown
from pagedsim.serve.api.errors import APIError, BadRequest
from pagedsim.serve.api.tokenise import THREAD


def excerpt(value: object, most: int = 80) -> str:
    """The repr of a value, truncated to `most` characters; the rest is not visited.

    >>> excerpt([1, "two", None])
    "[1, 'two', None]"
    >>> excerpt(list(range(10**6)), 12)
    '[0, 1, 2, 3,…'
    """
    text = shown(_begin(value, [most]))
    return text if len(text) <= most else f"{text[:most]}…"


def _begin(value: Any, left: list[int]) -> Any:
    """A prefix of a value whose repr exceeds the `left` characters."""
    left[0] -= 1
    most = left[0] + 2
    if isinstance(value, str):
        return value[:most]
    if isinstance(value, list | tuple):
        items: list[Any] = []
        for item in value:
            if left[0] < 0:
                break
            items.append(_begin(item, left))
        return items
    if isinstance(value, dict):
        entries: dict[Any, Any] = {}
        for key, item in value.items():
            if left[0] < 0:
                break
            name = _begin(key, left)
            entries[name] = _begin(item, left)
        return entries
    return value


MOST_PROMPTS = 1024
MOST_STOPS = 64
LONGEST_STOP = 1024
"""Characters; the generated text is matched against each stop string."""
MOST_STOP_IDS = 1024
MOST_MESSAGES = 4096
LARGEST = 2**63 - 1
NAME = re.compile(r"[\w.:+@-]{1,128}", re.ASCII)
"""Valid request ids."""
_SILENT: tuple[Any, ...] = ("", [], {}, None)


def stops(value: Any) -> tuple[str, ...]:
    """Validate stop strings."""
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"stop={_brief(value)}: must be a text or a list of texts")
    if len(texts) > MOST_STOPS:
        raise ValueError(f"stop: {len(texts)} texts: at most {MOST_STOPS}")
    if (longest := max(map(len, texts), default=0)) > LONGEST_STOP:
        raise ValueError(f"stop: a text of {longest} characters: at most {LONGEST_STOP}")
    return tuple(texts)


def stop_ids(value: Any) -> list[int]:
    """Validate stop token ids."""
    ids = token_ids(value, "stop_token_ids")
    if len(ids) > MOST_STOP_IDS:
        raise ValueError(f"stop_token_ids: {len(ids)} ids: at most {MOST_STOP_IDS}")
    return ids


def token_ids(value: Any, where: str = "token ids") -> list[int]:
    """Validate a list of token ids."""
    if not isinstance(value, list):
        raise ValueError(f"{where}: {_brief(value)}: must be a list of token ids")
    # Fast path for long lists; the offending index is searched only on failure.
    if set(map(type, value)) <= {int} and (
        not value or (min(value) >= 0 and max(value) <= LARGEST)
    ):
        return value
    wrong = (
        i for i, token in enumerate(value) if type(token) is not int or not 0 <= token <= LARGEST
    )
    place = next(wrong)
    raise ValueError(f"{where}[{place}]={_brief(value[place])}: must be a token id, 0 or more")


def prompts(value: Any) -> list[str | list[int]]:
    """Validate one or several prompts, each a text or token ids."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise ValueError(
            f"prompt={_brief(value)}: must be a text, token ids, or a list of texts or token ids"
        )
    if isinstance(value[0], str | list):
        if len(value) > MOST_PROMPTS:
            raise ValueError(f"prompt: {len(value)} prompts: at most {MOST_PROMPTS} in a request")
        return [
            prompt if isinstance(prompt, str) else token_ids(prompt, f"prompt[{place}]")
            for place, prompt in enumerate(value)
        ]
    return [token_ids(value, "prompt")]


def request_name(value: Any) -> str:
    """Validate a client's request id."""
    if not isinstance(value, str) or not NAME.fullmatch(value):
        raise ValueError(
            f"request_id={_brief(value)}: must be 1 to 128 letters, digits and . : + @ _ -"
        )
    return value


def messages(value: Any) -> list[dict[str, str]]:
    """Validate a conversation; contents become plain texts."""
    if not isinstance(value, list) or not value:
        raise ValueError(f"messages={_brief(value)}: must be a list of at least one message")
    if len(value) > MOST_MESSAGES:
        raise ValueError(f"messages: {len(value)} of them: at most {MOST_MESSAGES}")
    return [_message(f"messages[{place}]", message) for place, message in enumerate(value)]


def _message(where: str, message: Any) -> dict[str, str]:
    if not isinstance(message, dict):
        raise ValueError(f"{where}={_brief(message)}: must have a role and a content")
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not role:
        raise ValueError(f"{where}.role={_brief(role)}: must be a text, such as user")
    if role == "assistant" and content is None:  # an assistant turn without text
        content = ""
    parsed = {"role": role, "content": _content(f"{where}.content", content)}
    for name, more in message.items():
        if name == "name" and isinstance(more, str):
            parsed[name] = more
        elif name not in parsed and more not in _SILENT:
            raise ValueError(f"{where}.{name}: is not supported here; allowed: role, content, name")
    return parsed


def _content(where: str, content: Any) -> str:
    """The text of a message's content, which may be a list of text parts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ValueError(f"{where}={_brief(content)}: must be a text, or a list of text parts")
    return "".join(_part(f"{where}[{place}]", part) for place, part in enumerate(content))


def _part(where: str, part: Any) -> str:
    if isinstance(part, dict) and part.get("type") == "text":
        text = part.get("text")
        if isinstance(text, str):
            return text
        raise ValueError(f"{where}.text={_brief(text)}: must be a text")
    kind = part.get("type") if isinstance(part, dict) else part
    raise ValueError(f"{where}.type={_brief(kind)}: must be 'text'; the model reads nothing else")


def _brief(value: Any) -> str:
    return excerpt(value).replace("None", "null")


ANYTHING = "anything"
"""Any value is accepted: it does not change the output."""


def _neutral() -> Mapping[str, Sequence[Any]]:
    text = files("pagedsim.serve.api").joinpath("neutral.json").read_text(encoding="utf-8")
    return {name: allowed for of in json.loads(text).values() for name, allowed in of.items()}


NEUTRAL = _neutral()
"""Accepted values of each ignored field of OpenAI's and vLLM's, beside null: others would change
the output."""


def refuse_strange(name: str, value: object) -> None:
    """Raise BadRequest for a value that would change the output."""
    allowed = NEUTRAL[name]
    if allowed == ANYTHING or value in allowed:
        return
    brief_value = excerpt(value, 60)
    words = " or ".join(shown(accepted) for accepted in (*allowed, None))
    raise BadRequest(
        f"{name}={brief_value}: is not supported here; allowed: {words.replace('None', 'null')}"
    )


def properties() -> dict[str, Any]:
    """JSON schemas of the ignored fields."""
    return {
        name: {} if allowed == ANYTHING else {"enum": [*allowed, None]}
        for name, allowed in NEUTRAL.items()
    }


# -- bodies ----------------------------------------------------------------------------------------


MOST_VALUES = 2**18
MOST_TEXTS = 2**15
MOST_CONTAINERS = 2**15
"""Lists, objects, and fields of objects."""
_OPENING = b"[", b"{", b":"


def refuse_many(body: bytes) -> None:
    """Raise APIError for JSON with more values than the limits; counted without parsing.

    A parser holds the GIL until it ends. Numbers cost it least, objects and lists most, so each
    kind has its own limit. Characters within texts are left out only where it matters.
    """
    if (
        body.count(b'"') // 2 <= MOST_TEXTS
        and body.count(b",") <= MOST_VALUES
        and sum(map(body.count, _OPENING)) <= MOST_CONTAINERS
    ):
        return
    bare = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    _bound("texts", bare.count(b'"') // 2, MOST_TEXTS)
    outside = b"".join(bare.split(b'"')[::2])
    _bound("values", outside.count(b","), MOST_VALUES)
    _bound("lists and fields", sum(map(outside.count, _OPENING)), MOST_CONTAINERS)


def _bound(what: str, count: int, most: int) -> None:
    if count > most:
        raise APIError(413, f"the body has {count} {what}: at most {most}")


M = TypeVar("M", bound=BaseModel)
T = TypeVar("T")

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


async def read(request: Request, kind: type[M], most: int) -> M:
    """Read and validate a request body; raises APIError if it is too large or invalid."""
    body = await read_body(request, most)
    if len(body) < _LONG:
        return fields_of(body, kind)
    return await asyncio.get_running_loop().run_in_executor(
        THREAD, fields_of, body, kind, with_rest
    )


async def read_body(request: Request, most: int) -> bytes:
    """Read a request body; raises APIError if it is too large."""
    too_large = APIError(413, f"the body is larger than {most} bytes (max_body)")
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > most:
        raise too_large
    parts, size, more = [], 0, True
    while more:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        parts.append(part := message.get("body", b""))
        size, more = size + len(part), message.get("more_body", False)
        if size > most:
            raise too_large
    return b"".join(parts)


def with_rest(work: Callable[[], T]) -> T:
    """Do a stage in a worker thread, then sleep for as long as it took.

    A stage is mostly one call that holds the GIL, for which the event loop waits after each system
    call. During the sleep the loop serves other requests, however many large bodies there are.
    """
    start = perf_counter()
    try:
        return work()
    finally:
        sleep(perf_counter() - start)


def fields_of(
    body: bytes, kind: type[M], stage: Callable[[Callable[[], Any]], Any] = lambda work: work()
) -> M:
    """Validate a body; a null field counts as absent. `stage` does each stage of that."""
    plain = object_of(body, stage)
    if len(plain) > _MOST_FIELDS:
        raise BadRequest(f"the body has {len(plain)} fields: at most {_MOST_FIELDS}")
    given = {name: value for name, value in plain.items() if value is not None}
    for name in given.keys() & NEUTRAL.keys() - kind.model_fields.keys():
        refuse_strange(name, given.pop(name))
    try:
        valid: M = stage(lambda: kind.model_validate(given))
        return valid
    except ValidationError as error:
        # Not by a variable: this frame would hold the error's traceback, which leads back to it.
        raise _refused(error.errors(include_url=False)[0], kind) from error


def object_of(
    body: bytes, stage: Callable[[Callable[[], Any]], Any] = lambda work: work()
) -> dict[str, Any]:
    """The JSON object that a body is; raises APIError if it is none, or too large a one."""
    stage(lambda: refuse_many(body))
    try:
        plain = stage(lambda: from_json(body, allow_inf_nan=False))
    except ValueError as error:
        raise BadRequest(f"the body is not JSON: {error}") from error
    if not isinstance(plain, dict):
        raise BadRequest("the body must be a JSON object")
    return plain


def _refused(error: ErrorDetails, kind: type[BaseModel]) -> BadRequest:
    """The first validation error, in one line."""
    where, what = _place(error["loc"]), error["type"]
    if what == "extra_forbidden":
        return BadRequest(_unknown(where, kind))
    if what == "missing":
        return BadRequest(f"{where}: must be given")
    if what == "value_error":  # raised in this file; it names the field
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
    parts = [f"[{step}]" if isinstance(step, int) else f".{step}" for step in path]
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
