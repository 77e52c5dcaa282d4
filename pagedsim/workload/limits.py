"""Bounds of workload settings: limits, clipping to `max_len`, and checks that name the key."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from pagedsim.core import ConfigError
from pagedsim.core.errors import refuse_settings, unknown

Tokens = NDArray[np.int32]

LONGEST = 2**30 - 1
"""Maximum tokens of a prompt, output or shared prefix; the sum of two fits 32 bits."""

MOST = 10**9
"""Maximum requests of a workload."""

LATEST = 1e10
"""Latest arrival in seconds (300 years); beyond it floats cannot resolve a step's milliseconds."""

OFTEN = 0.05
"""Share of requests clipped by their distribution above which the report has a notice.

The ShareGPT preset has 2.5 % at max_len=2048 by construction.
"""


def clip(prompt: Tokens, output: Tokens, max_len: int | None) -> tuple[Tokens, Tokens, int]:
    """Clip lengths so that prompt plus output fit `max_len`; also return the number clipped.

    The prompt is truncated first, since the output length determines the load; the output is cut
    only if it leaves no room for one prompt token.
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
    """Raise ConfigError if the last arrival under these settings is later than `LATEST`."""
    if not last <= LATEST:
        what = f"the last request would arrive at {last:g} s"
        raise ConfigError(f"{settings}: {what}: must be at most {LATEST:g} s")


def notice(clipped: int, rows: int, max_len: int | None, name: str = "") -> tuple[str, ...]:
    """The notice on clipped requests out of `rows`, if any; `name` is their class."""
    if not clipped:
        return ()
    what = f"requests were cut to max_len={max_len} tokens in all{_of(name)}"
    return (f"{clipped:,} of {rows:,} {what}",)


def capped_notice(
    capped: int, drawn: int, rows: int, max_len: int | None, name: str = ""
) -> tuple[str, ...]:
    """The notice on lengths clipped by their distribution, if more than `OFTEN` of the `drawn`."""
    if capped <= OFTEN * drawn:
        return ()
    what = f"requests have the longest prompt or answer that max_len={max_len} lets them draw"
    return (f"{capped:,} of {rows:,} {what}{_of(name)}",)


def _of(name: str) -> str:
    return f" (class {name})" if name else ""


T = TypeVar("T")


def make(kind: str, name: str, known: Mapping[str, Callable[..., T]], given: dict[str, Any]) -> T:
    """Construct `known[name]` from the settings `given`, refusing keys that it does not take."""
    if name not in known:
        raise unknown(kind, name, known)
    where = kind.rpartition(".")[0]
    refuse_settings(f"{kind}={name}", given, known[name], where, hidden=("max_len",))
    return known[name](**given)


@contextmanager
def within(where: str) -> Iterator[None]:
    """Prefix the message of a ConfigError raised inside with `where`, unless that is empty."""
    try:
        yield
    except ConfigError as error:
        if not where:
            raise
        raise ConfigError(f"{where}: {error}") from None
