"""The longest a request may get, and what is cut from those that are longer."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int32]


def clip(prompt: Tokens, output: Tokens, max_len: int | None) -> tuple[Tokens, Tokens, int]:
    """Lengths that fit `max_len` together, and how many requests were cut for it.

    The prompt gives way at its end, since an answer's length is what keeps a server busy; an
    answer is cut only where it leaves no room for one token of prompt.
    """
    if max_len is None:
        return prompt, output, 0
    long = np.add(prompt, output, dtype=np.int64) > max_len
    clipped = int(np.count_nonzero(long))
    if clipped:
        output = np.minimum(output, max_len - 1).astype(np.int32)
        prompt = np.minimum(prompt, max_len - output).astype(np.int32)
    return prompt, output, clipped


def notice(clipped: int, rows: int, max_len: int | None) -> tuple[str, ...]:
    """The line that says so, if there is anything to say."""
    if not clipped:
        return ()
    return (f"{clipped:,} of {rows:,} requests were cut to max_len={max_len} tokens in all",)
