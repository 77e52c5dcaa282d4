"""The working set is what a count of tokens, one by one, makes of it."""

from __future__ import annotations

from math import inf, nan
from pathlib import Path

import numpy as np
import pytest

from pagedsim.workload import Workload, chat_sessions, trace
from pagedsim.workload.working_set import WINDOW, working_set
from tests.workload.test_agents import lanes

LENGTHS = {"shape": "uniform", "prompt_min": 1, "prompt_max": 9, "output_min": 1, "output_max": 6}


def touched(made: Workload, row: int, output: int) -> set[object]:
    """Tokens, each by itself and all those before it."""
    assert made.prompts is not None
    runs, answer = [*made.prompts[row].runs], made.prompts.answer(row)
    runs.append((-row - 1 if answer is None else answer.streams[0], output))
    before: tuple[object, ...] = ()
    tokens: set[object] = set()
    for stream, length in runs:
        tokens |= {(before, stream, place) for place in range(length)}
        before = (*before, (stream, length))
    return tokens


@pytest.mark.parametrize("kind", ["conversations", "agents"])
def test_it_counts_distinct_tokens_of_the_last_minute(kind: str, tmp_path: Path) -> None:
    if kind == "agents":
        replay = {"plays": 3}
        made = trace(path=lanes(tmp_path), arrivals="closed", users=2, replay=replay)
    else:
        prefixes = {"tokens": 7, "count": 2}
        made = chat_sessions(
            sessions=12, arrivals="burst", turns=4, lengths=LENGTHS, prefixes=prefixes
        )
    random, rows = np.random.default_rng(0), np.arange(len(made))
    begin = np.round(random.uniform(0, 400, len(made)), 1)
    end = begin + random.uniform(0, 90, len(made))
    output = random.integers(0, made.output_len, endpoint=True).astype(np.int32)
    begin[:2], end[2] = nan, inf
    assert made.prompts is not None
    sizes = working_set(made.prompts, rows, begin, end, output)
    tokens = [touched(made, row, output.item(row)) for row in rows.tolist()]
    for now, size in zip(begin.tolist(), sizes.tolist(), strict=True):
        touching = np.flatnonzero((begin <= now) & (now < end + WINDOW)).tolist()
        expected = len(set().union(*(tokens[row] for row in touching)))
        assert size == expected or (np.isnan(now) and np.isnan(size))
    assert np.nanmax(sizes) > 2 * made.prompt_len.max()
