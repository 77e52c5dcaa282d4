"""A trace's windows, drawn with replacement for each seed."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pagedsim.core import ConfigError
from pagedsim.workload import Workload, trace


@pytest.fixture
def bursts(tmp_path: Path) -> Path:
    """20 windows of 10 s; window i has i + 1 requests of i + 1 tokens, 1 s from each other at most,
    and the last ends the trace."""
    rows = ["arrived_at,num_prefill_tokens,num_decode_tokens"]
    for number in range(20):
        rows += [f"{10 * number + k / (number + 1)},{number + 1},5" for k in range(number + 1)]
    rows.append(f"{200 * 210 / 211},20,5")
    file = tmp_path / "bursts.csv"
    file.write_text("\n".join(rows) + "\n")
    return file


def windows(workload: Workload) -> list[tuple[int, int]]:
    """The prompt tokens and the number of the requests of each window, which are all alike."""
    at = ((workload.arrival + 1e-6) // 10).astype(int)
    runs = []
    for number in sorted(set(at.tolist())):
        lengths = set(workload.prompt_len[at == number].tolist())
        assert len(lengths) == 1
        runs.append((lengths.pop(), int((at == number).sum())))
    return runs


def test_a_seed_serves_whole_windows_as_often_as_they_were_drawn(bursts: Path) -> None:
    drawn: Counter[int] = Counter()
    for seed in range(40):
        workload = trace(path=bursts, resample=10, seed=seed)
        served = windows(workload)
        assert len(served) == 20 and workload.drawn
        assert all(count == tokens + (tokens == 20) for tokens, count in served)
        drawn.update(tokens for tokens, _ in served)
        assert "20 windows of 10 s" in workload.notices[-1]
    assert set(drawn) == set(range(1, 21))
    assert max(drawn.values()) < 40 * 2.2  # each is as likely as the others


def test_seeds_differ_and_rates_do_not(bursts: Path) -> None:
    first, again, other = (trace(path=bursts, resample=10, seed=seed) for seed in (1, 1, 2))
    assert first.prompt_len.tolist() == again.prompt_len.tolist() != other.prompt_len.tolist()
    twice = trace(path=bursts, resample=10, seed=1, rate_scale=2.0)
    assert twice.prompt_len.tolist() == first.prompt_len.tolist()
    assert twice.arrival == pytest.approx(first.arrival / 2)
    assert not trace(path=bursts).drawn


def test_few_windows_are_said(bursts: Path) -> None:
    assert "4 windows say little" in trace(path=bursts, resample=50).notices[-1]


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"resample": 150}, "resample=150: must be at most half of the trace's 200 s"),
        ({"resample": 0}, "resample=0: must be a number above 0"),
        ({"resample": 10, "arrivals": "poisson", "rate": 2}, "only with arrivals=trace"),
    ],
)
def test_what_cannot_be_drawn(bursts: Path, settings: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError, match=line):
        trace(path=bursts, **settings)


def test_sessions_stay_together(tmp_path: Path) -> None:
    """Each of 30 sessions has a turn 25 s after its first, in another window."""
    rows = [
        {"session_id": f"s{number}", "timestamp": 1000 * at, "input_length": 10 + number}
        | {"output_length": 3}
        for number in range(30)
        for at in (10 * number, 10 * number + 25)
    ]
    file = tmp_path / "turns.jsonl"
    ordered = sorted(rows, key=lambda row: float(str(row["timestamp"])))
    file.write_text("".join(json.dumps(row) + "\n" for row in ordered))
    workload = trace(path=file, format="turns", resample=10, seed=3)
    assert workload.turns is not None
    firsts: dict[int, int] = {}
    for row, (session, turn) in enumerate(
        zip(workload.turns.session, workload.turns.turn, strict=True)
    ):
        if turn == 1:
            assert session not in firsts
            firsts[session] = row
            continue
        begin = firsts.pop(session)
        assert workload.prompt_len[row] == workload.prompt_len[begin]
        assert workload.arrival[row] - workload.arrival[begin] == pytest.approx(25)
        assert list(workload.turns.after(row)) == [begin]
    assert not firsts


def test_blocks_of_a_window_alone_are_known_to_one_copy_of_it(tmp_path: Path) -> None:
    rows = [
        {"timestamp": 1000 * at, "input_length": 1024, "output_length": 3}
        | {"hash_ids": [0, 1 + at // 10]}
        for at in range(0, 200, 5)
    ]
    file = tmp_path / "blocks.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    workload = trace(path=file, format="mooncake", resample=10, seed=0)
    prompts: Any = workload.prompts
    pairs = prompts.ids.reshape(-1, 2)
    assert set(pairs[:, 0]) == {0}  # in all windows
    counts = Counter(pairs[:, 1].tolist())
    assert len(counts) == 20 and set(counts.values()) == {2}
    assert len(np.unique(workload.arrival)) == 40
