"""What a log says of the contents of its prompts, for a server with a prefix cache.

A log states it in one of four ways: `prefix_id` with `prefix_tokens`, `hash_ids` of blocks as
Mooncake's traces have them, `prompt_token_ids`, or `cached_tokens`, what the server itself found in
its cache. Without any of these every prompt is taken to be unlike all others.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagedsim.core import ConfigError
from pagedsim.workload.tokens import BlockPrompts, PrefixedPrompts
from pagedsim.workload.traces.formats import CONTENTS

PREFIX, HASHES, IDS, CACHED = CONTENTS
PREFIX_TOKENS = "prefix_tokens"
STATED = f"{PREFIX} with {PREFIX_TOKENS}, {HASHES}, {IDS} or {CACHED}"
"""The columns that say which prompts begin alike."""
BLOCKS = tuple(1 << power for power in range(12, -1, -1))
"""Tokens that a hash id may stand for, the most likely where several fit being the largest."""

Rows = Sequence[tuple[str, Mapping[str, Any]]]
Contents = Sequence[Sequence[int]]
"""By row, each prompt's tokens, or runs that are equal exactly where the tokens are."""


def contents_of(rows: Rows, prompt: NDArray[np.int64]) -> Contents | None:
    """What the rows say of prompts of these lengths; None where they say nothing.

    Raises ConfigError with the place of what is wrong.
    """
    there = [name for name in CONTENTS if name in rows[0][1]]
    if len(there) > 1:
        raise ConfigError(f"{rows[0][0]}: has {' and '.join(there)}: must have one of them")
    if not there:
        return None
    if there == [PREFIX]:
        return _prefixed(rows, prompt)
    if there == [CACHED]:
        shared = _lengths(rows, CACHED, prompt)
        return _Listed(
            PrefixedPrompts(np.where(shared > 0, 0, -1), shared, _narrow(prompt)), prompt
        )
    return _hashed(rows, prompt) if there == [HASHES] else _tokens(rows, prompt)


def _prefixed(rows: Rows, prompt: NDArray[np.int64]) -> Contents:
    """Rows of one `prefix_id` share their first `prefix_tokens`; those without one share none."""
    if PREFIX_TOKENS not in rows[0][1]:
        raise ConfigError(f"{rows[0][0]}: has {PREFIX} without {PREFIX_TOKENS}: needs both")
    number: dict[str, int] = {}
    names = ["" if (name := row[PREFIX]) is None else str(name).strip() for _, row in rows]
    which = np.array(
        [number.setdefault(name, len(number)) if name else -1 for name in names], np.int32
    )
    shared = _lengths(rows, PREFIX_TOKENS, prompt, empty=[not name for name in names])
    return _Listed(PrefixedPrompts(which, shared, _narrow(prompt)), prompt)


def _hashed(rows: Rows, prompt: NDArray[np.int64]) -> Contents:
    ids = [_integers(where, HASHES, row[HASHES]) for where, row in rows]
    counts = np.array([len(each) for each in ids])
    block = next((size for size in BLOCKS if (-(-prompt // size) == counts).all()), None)
    if block is None:
        raise ConfigError(
            f"{rows[0][0]}: {HASHES} has {len(ids[0])} blocks for {prompt[0]} tokens: must have as "
            "many as the prompt has blocks of one size, the same in all rows, such as 16 or 512"
        )
    number: dict[int, int] = {}
    flat = np.array([number.setdefault(name, len(number)) for each in ids for name in each])
    starts = np.concatenate([[0], np.cumsum(counts)])
    return _Listed(BlockPrompts(flat, starts, _narrow(prompt), block), prompt)


def _tokens(rows: Rows, prompt: NDArray[np.int64]) -> Contents:
    found = [_integers(where, IDS, row[IDS]) for where, row in rows]
    for (where, _), ids, length in zip(rows, found, prompt.tolist(), strict=True):
        if len(ids) != length:
            raise ConfigError(f"{where}: {IDS} has {len(ids)} tokens, and the prompt {length}")
    return found


class _Listed(Sequence[Sequence[int]]):
    """Prompts that are made when they are asked for."""

    def __init__(self, prompts: PrefixedPrompts | BlockPrompts, lengths: NDArray[np.int64]) -> None:
        self.prompts, self.lengths = prompts, lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, row: Any) -> Any:
        return self.prompts[row]


def _narrow(lengths: NDArray[np.int64]) -> NDArray[np.int32]:
    return lengths.astype(np.int32)


def _lengths(
    rows: Rows, name: str, prompt: NDArray[np.int64], empty: Sequence[bool] | None = None
) -> NDArray[np.int32]:
    """Tokens at the beginning of each prompt; none where the row may leave them out."""
    found = np.zeros(len(rows), np.int32)
    for at, (where, row) in enumerate(rows):
        text = row.get(name)
        if (text is None or text == "") and (empty is None or empty[at]):
            continue
        try:
            value = float("nan" if isinstance(text, bool) or text is None else text)
        except (TypeError, ValueError):
            value = float("nan")
        if not (0 <= value <= prompt[at] and value.is_integer()):
            raise ConfigError(
                f"{where}: {name}={text!r:.60}: must be a whole number from 0 to the "
                f"{prompt[at]} tokens of the prompt"
            )
        found[at] = int(value)
    return found


def _integers(where: str, name: str, value: Any) -> list[int]:
    """A list of whole numbers, as such or in JSON, or separated by spaces."""
    if isinstance(value, str):
        text = value.strip()
        try:
            value = json.loads(text) if text[:1] == "[" else [int(one) for one in text.split()]
        except ValueError:
            value = text
    whole = isinstance(value, list) and all(type(one) is int for one in value)
    if not whole:
        raise ConfigError(f"{where}: {name}={value!r:.60}: must be a list of whole numbers")
    found: list[int] = value
    return found
