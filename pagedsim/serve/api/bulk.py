"""How many values a body has, found without parsing it.

A parser holds all other threads up until it is through. Numbers take it least, and objects and
lists most, so each kind has a limit of its own.
"""

from __future__ import annotations

from pagedsim.serve.api.problem import Problem

MOST_VALUES = 2**20
MOST_TEXTS = 2**17
MOST_CONTAINERS = 2**16
"""Lists, objects, and fields of objects."""


def refuse_many(body: bytes) -> None:
    """Raise Problem for JSON of more values than any request has."""
    bare = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    _bound("texts", bare.count(b'"') // 2, MOST_TEXTS)
    outside = b"".join(bare.split(b'"')[::2])
    _bound("values", outside.count(b","), MOST_VALUES)
    _bound("lists and fields", sum(map(outside.count, (b"[", b"{", b":"))), MOST_CONTAINERS)


def _bound(what: str, count: int, most: int) -> None:
    if count > most:
        raise Problem(413, f"the body has {count} {what}: at most {most}")
