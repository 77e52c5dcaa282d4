"""Components whose calls are observed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from pagedsim.core import Request
from pagedsim.testing.cases import BrokenPromise

T = TypeVar("T")

_OF_A_REQUEST = (
    *("id", "client", "priority", "deadline", "session", "turn", "prompt_len", "predicted_len"),
    *("arrival", "first_token_at", "generated", "computed", "preemptions", "state", "params"),
)


def derived(part: T, members: Mapping[str, Any]) -> T:
    """The same object, of a subclass of the same name with these members."""
    kind: Any = type(part)
    names = {key: getattr(kind, key) for key in ("__module__", "__qualname__")}
    made: type = type(kind)(kind.__name__, (kind,), {**names, "__slots__": (), **members})
    object.__setattr__(part, "__class__", made)
    return part


@contextmanager
def unchanged(hook: str, passed: Sequence[Any]) -> Iterator[None]:
    """Raise BrokenPromise if the body, a call of `hook`, changes a request that it was passed."""
    before = _seen(passed)
    yield
    for was, now in zip(before, _seen(passed), strict=True):
        if was != now:
            raise BrokenPromise(f".{hook} changed a request: {was} is {now} now")


def _seen(passed: Sequence[Any]) -> list[str]:
    """What there is to see of the requests among the arguments of a hook, as `key=value`."""
    found: list[str] = []
    for one in passed:
        for request in one if isinstance(one, (list, tuple)) else [one]:
            if isinstance(request, Request):
                found += [f"{key}={getattr(request, key)!r}" for key in _OF_A_REQUEST]
    return found
