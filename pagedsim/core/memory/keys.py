"""What a prefix cache knows blocks by: one key for the tokens of a block and all before them.

Equal keys mean equal tokens. Tokens are digested a block at a time, each with the key of the block
before. Of runs nothing need be looked at but where they begin: all keys in a run lie one block
apart, whoever has the run, so that a turn of a session makes a few digests and no more.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Hashable, Iterable
from hashlib import blake2b
from typing import Any

from pagedsim.core.request import Request
from pagedsim.core.symbolic_prompt import SymbolicPrompt


def add_keys(keys: list[Hashable], request: Request, blocks: int, size: int) -> None:
    """Add to the keys of a request's first blocks those of the next ones, up to `blocks`.

    Blocks have `size` tokens, and all in them must be known.
    """
    prompt = request.prompt
    if isinstance(prompt, SymbolicPrompt) and (not keys or isinstance(keys[-1], int)):
        text, said = prompt, request._said
        if blocks * size > len(text) and isinstance(said, SymbolicPrompt):
            text += said
        _add_of_runs(keys, text, min(blocks, len(text) // size), size)
    for index in range(len(keys), blocks):
        tokens = request.tokens(index * size, (index + 1) * size)
        keys.append(_chained(keys[-1] if keys else b"", tokens))


def own_keys(mark: object, blocks: Iterable[int]) -> list[Hashable]:
    """The keys of blocks with tokens that nobody knows; nobody else has this mark."""
    return [(mark, index) for index in blocks]


def known_to_others(key: Hashable) -> bool:
    """Whether a block's key is made of its tokens, so that another request may have the same."""
    return not isinstance(key, tuple)


def _add_of_runs(keys: list[Hashable], text: SymbolicPrompt, blocks: int, size: int) -> None:
    """The key of a block is the name of the run in which it ends, and how far that is."""
    if len(keys) >= blocks:
        return
    streams, ends, at, last = text.streams, text.ends, len(keys) * size, blocks * size
    run = bisect_left(ends, at)
    known = keys[-1] if keys else 0
    assert isinstance(known, int)
    name = known - at if keys else _name(size, 0, streams[0])
    while True:
        end = min(ends[run], last)
        keys += range(name + at + size, name + end + 1, size)
        if end == last:
            return
        at = end - end % size
        name = _name(name, end, streams[run + 1])
        run += 1


def _name(before: int, start: int, stream: int) -> int:
    """Of a run of a stream that begins there in a text; `before` is the name of the run before."""
    content = b"%d %d %d" % (before, start, stream)
    return int.from_bytes(blake2b(content, digest_size=16).digest(), "little")


def _chained(before: Hashable, tokens: tuple[Any, ...]) -> bytes:
    """The key of a block of these tokens after a block with that key."""
    if isinstance(before, bytes):
        try:
            content = before + array("q", tokens).tobytes()
        except (TypeError, OverflowError):  # tokens that are no numbers of 64 bits
            content = repr((before, tokens)).encode()
    else:
        content = repr((before, tokens)).encode()
    return blake2b(content, digest_size=16).digest()
