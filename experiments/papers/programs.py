"""Programs that say with each call when what it computed is used next, as KVFlow's client does."""

from __future__ import annotations

from dataclasses import replace
from functools import wraps
from typing import Any

import numpy as np

from pagedsim.core.request import NO_EXTRA, read_only
from pagedsim.policies.eviction import STEPS
from pagedsim.workload import Workload, agents
from pagedsim.workload.tokens import GrowingPrompts


@wraps(agents)
def telling_agents(**settings: Any) -> Workload:
    """The requests of `agents`, with the turns until a call of the session goes on from each."""
    workload = agents(**settings)
    turns, prompts = workload.turns, workload.prompts
    assert turns is not None and isinstance(prompts, GrowingPrompts)
    rows = np.flatnonzero(prompts.base >= 0)  # that go on from another
    steps = np.zeros(len(workload), np.int64)  # none goes on
    # Rows are in the order of turns: the soonest is written last, and stays.
    for row in rows[::-1]:
        steps[prompts.base[row]] = turns.turn[row] - turns.turn[prompts.base[row]]
    said = {count: read_only({STEPS: count}) for count in set(steps.tolist()) - {0}}
    return replace(workload, extra=[said.get(count, NO_EXTRA) for count in steps.tolist()])
