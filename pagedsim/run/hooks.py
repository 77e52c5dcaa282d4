"""What hooks must leave alone: what a run is measured by, and what makes it the same again."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pagedsim.core import PagedsimError, Policy
from pagedsim.workload import Workload


def generators() -> dict[str, Any]:
    """The states of the generators that a process has for all its code."""
    _, words, place, *_ = np.random.get_state(legacy=True)
    return {"random": random.getstate(), "numpy.random": (place, np.asarray(words).tobytes())}


def drawn_from(before: Mapping[str, Any]) -> str | None:
    """A note, if hooks have drawn from one of the `generators` since."""
    moved = [name for name, state in generators().items() if state != before[name]]
    if not moved:
        return None
    return (
        f"hooks drew numbers from {' and '.join(moved)}: another run of the same seed gives other "
        "results; a policy takes them from state.draw(request, seed), other classes from a "
        "generator of their own with a setting `seed`"
    )


def as_sent(requests: pa.Table, workload: Workload) -> pa.Table:
    """The table with what the workload says of its requests, whatever was done to the objects."""
    rows = np.asarray(requests["request"].to_numpy())
    known: dict[str, NDArray[Any]] = {"prompt_tokens": workload.prompt_len}
    known["priority"] = workload.priority
    if workload.mode != "closed" and workload.turns is None:  # else they arrive after an answer
        known["arrival"] = workload.arrival
    for name, values in known.items():
        place = requests.schema.get_field_index(name)
        column = pa.array(values[rows], requests.schema.types[place])
        requests = requests.set_column(place, name, column)
    return requests


def refuse_early(requests: pa.Table, policy: Policy) -> None:
    """Raise PagedsimError for a latency below zero."""
    arrival = np.asarray(requests["arrival"].to_numpy())
    for name, what in (("first_token", "got its first token"), ("finished", "ended")):
        times = np.asarray(requests[name].to_numpy())
        if (early := times < arrival).any():
            row = int(early.argmax())
            raise PagedsimError(
                f"{type(policy).__name__}: request {requests['request'][row]} {what} at "
                f"{times[row]:.6g} s, before its arrival at {arrival[row]:.6g} s: its hooks "
                "must write to no request"
            )
