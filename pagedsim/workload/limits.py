"""The longest a request may get, and what is cut from those that are longer."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pagedsim.core import ConfigError

Tokens = NDArray[np.int32]

LONGEST = 2**30 - 1
"""Tokens of a prompt, an answer or a shared prefix: two of them together still fit 32 bits."""

MOST = 10**9
"""Requests of a workload: more is a slip, and memory would end first."""

LATEST = 1e10
"""Seconds, some 300 years: beyond, a float no longer tells a step's milliseconds exactly."""

OFTEN = 0.05
"""Share of requests at a distribution's cut from which on a reader is told.

ShareGPT's preset has some 2.5 % of them at max_len=2048, which is how it is made.
"""


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


def refuse_late(settings: str, last: float) -> None:
    """Raise ConfigError if these settings have the last request come later than `LATEST`."""
    if not last <= LATEST:
        what = f"the last request would arrive at {last:g} s"
        raise ConfigError(f"{settings}: {what}: must be at most {LATEST:g} s")


def notice(clipped: int, rows: int, max_len: int | None, name: str = "") -> tuple[str, ...]:
    """The line that says how many of `rows` were cut, if any; `name` is that of their class."""
    if not clipped:
        return ()
    what = f"requests were cut to max_len={max_len} tokens in all{_of(name)}"
    return (f"{clipped:,} of {rows:,} {what}",)


def capped_notice(
    capped: int, drawn: int, rows: int, max_len: int | None, name: str = ""
) -> tuple[str, ...]:
    """The line for lengths at the cut of their distribution, if they are many of the `drawn`."""
    if capped <= OFTEN * drawn:
        return ()
    what = f"requests have the longest prompt or answer that max_len={max_len} lets them draw"
    return (f"{capped:,} of {rows:,} {what}{_of(name)}",)


def _of(name: str) -> str:
    return f" (class {name})" if name else ""
