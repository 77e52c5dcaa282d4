"""What a reader must know of a run against a server elsewhere."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from pagedsim.core.request import State
from pagedsim.run.http.seen import Seen

LATE = 0.005
"""Seconds that one in a hundred may be sent late, and nothing is said."""
OFF = 0.02
"""The share by which prompts may differ from the workload's, and answers from a part a token."""


def lateness(late: Sequence[float]) -> dict[str, float]:
    """How much later than they could have been requests were sent, in seconds."""
    if not len(late):
        return {}
    values = np.asarray(late)
    return {
        "late_mean_seconds": float(values.mean()),
        "late_p99_seconds": float(np.percentile(values, 99)),
        "late_max_seconds": float(values.max()),
    }


def notes(seen: Sequence[Seen], late: Sequence[float]) -> Iterator[str]:
    """A line for each thing that is not as it should be, where requests were answered."""
    told = lateness(late)
    if told and told["late_p99_seconds"] > LATE:
        yield (
            f"the load generator was late: requests were sent {_ms(told['late_mean_seconds'])} "
            f"after they were due on average, P99 {_ms(told['late_p99_seconds'])}, which counts "
            "in their latencies"
        )
    whole = [one for one in seen if one.state is State.FINISHED]
    if not whole:
        return
    if unsaid := sum(not one.usage for one in whole):
        yield f"{unsaid:,} of {len(seen):,} answers came without usage: their parts are counted"
    yield from _lengths(whole)


def failures(seen: Sequence[Seen]) -> Iterator[str]:
    """What went wrong, the most frequent first."""
    failed = [one.answer for one in seen if one.answer.error]
    for kind, count in Counter(answer.error for answer in failed).most_common():
        detail = next(answer.detail for answer in failed if answer.error == kind)
        more = f" ({detail})" if detail else ""
        yield f"{count:,} of {len(seen):,} requests failed: {kind}{more}"


def _lengths(whole: Sequence[Seen]) -> Iterator[str]:
    asked, had = (
        float(np.mean([getattr(one, name) for one in whole]))
        for name in ("asked_len", "prompt_len")
    )
    if abs(had / asked - 1) > OFF:
        yield (
            f"prompts had {had:.1f} tokens on average as the server counts, where the workload "
            f"says {asked:.1f}"
        )
    tokens = sum(one.generated * one.width for one in whole)
    parts = sum(one.answer.parts for one in whole)
    if abs(parts / max(tokens, 1) - 1) > OFF:
        yield (
            f"answers came in {parts / max(tokens, 1):.2f} parts a token: gaps between tokens "
            "(ITL) are those between parts"
        )


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms"
