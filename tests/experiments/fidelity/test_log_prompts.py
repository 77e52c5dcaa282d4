"""Logs that say which prompts begin alike."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pagedsim.core import ConfigError
from pagedsim.fidelity.logs.consistency_checks import signs
from pagedsim.fidelity.logs.log import read_log
from pagedsim.fidelity.logs.server import serve
from tests.experiments.fidelity.test_external import TRUE, server

pytestmark = pytest.mark.usefixtures("hydra")
ROWS, SHARED, OWN = 24, 1024, 64
BLOCKS = "memory.blocks=9000"


def rows(**columns: Any) -> list[dict[str, Any]]:
    """Requests a second apart, so that each is alone; `columns`: by row."""
    return [
        {
            **{"arrived_at": float(row), "num_prefill_tokens": SHARED + OWN},
            **{"num_decode_tokens": 8, "ttft": 0.5, "e2e": 0.6},
            **{name: column(row) for name, column in columns.items()},
        }
        for row in range(ROWS)
    ]


def written(path: Path, of: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(one) + "\n" for one in of))
    return path


STATED: dict[str, dict[str, Any]] = {
    "prefix_id": {"prefix_id": lambda row: "system", "prefix_tokens": lambda row: SHARED},
    "hash_ids": {"hash_ids": lambda row: [*range(SHARED // 64), 1000 + row]},
    "prompt_token_ids": {"prompt_token_ids": lambda row: [*range(SHARED), *([10_000 + row] * OWN)]},
    "cached_tokens": {"cached_tokens": lambda row: SHARED},
}
"""Ways to say that all prompts begin with the same tokens."""


@pytest.mark.parametrize("columns", STATED.values(), ids=STATED)
def test_only_the_first_computes_what_all_share(tmp_path: Path, columns: Any) -> None:
    log = read_log(written(tmp_path / "log.jsonl", rows(**columns)))
    found = serve(server(log, BLOCKS), TRUE).latencies.ttft
    unlike = serve(server(replace(log, contents=None), BLOCKS), TRUE).latencies.ttft
    assert found[0] == unlike[0]
    assert (found[1:] < 0.5 * unlike[1:]).all()
    paged = server(log, BLOCKS, "memory=paged")
    assert serve(paged, TRUE).latencies.ttft[1:] == pytest.approx(unlike[1:], rel=0.01)
    assert any(
        "memory=prefix has a prefix cache" in line
        for line in signs(paged, serve(paged, TRUE), TRUE)
    )


def test_first_tokens_sooner_than_prompts_can_be_computed_are_told(tmp_path: Path) -> None:
    log = read_log(written(tmp_path / "log.jsonl", rows(**STATED["prefix_id"])))
    times = serve(server(log, BLOCKS), TRUE).latencies
    # As measured on a server whose software took no time.
    quick = replace(times, ttft=times.ttft - TRUE["front_ms"] / 1e3)
    unsaid = server(replace(log, latencies=quick, contents=None), BLOCKS)
    told = [line for line in signs(unsaid, serve(unsaid, TRUE), TRUE) if "stated" in line]
    assert told and told[0].startswith(f"{ROWS - 1} of {ROWS} first tokens came sooner")
    said = server(replace(log, latencies=quick), BLOCKS)
    assert not any("stated" in line for line in signs(said, serve(said, TRUE), TRUE))


def test_two_beginnings_are_told_apart(tmp_path: Path) -> None:
    column = {
        "prefix_id": lambda row: ["a", "b", ""][row % 3],
        "prefix_tokens": lambda row: [SHARED, SHARED // 2, ""][row % 3],
    }
    log = read_log(written(tmp_path / "log.jsonl", rows(**column)))
    assert log.contents is not None
    first, second, third, fourth = (log.contents[row] for row in range(4))
    assert first[0:SHARED] == fourth[0:SHARED] and first[SHARED:] != fourth[SHARED:]
    assert first[0:16] != second[0:16] and third[0:16] != log.contents[5][0:16]
    assert {len(log.contents[row]) for row in range(ROWS)} == {SHARED + OWN}


def test_rows_are_put_in_order_with_their_contents(tmp_path: Path) -> None:
    turned = rows(prompt_token_ids=lambda row: [row] * (SHARED + OWN))[::-1]
    log = read_log(written(tmp_path / "log.jsonl", turned))
    assert log.contents is not None
    assert [log.contents[row][0] for row in range(ROWS)] == list(range(ROWS))
    assert np.all(np.diff(log.arrived) > 0)


@pytest.mark.parametrize(
    ("columns", "line"),
    [
        ({"prefix_id": lambda row: "a"}, ":1: has prefix_id without prefix_tokens: needs both"),
        (
            {"cached_tokens": lambda row: 5000},
            ":1: cached_tokens=5000: must be a whole number from 0 to the 1088 tokens",
        ),
        ({"cached_tokens": lambda row: "many"}, ":1: cached_tokens='many': must be a whole"),
        ({"hash_ids": lambda row: [1, 2, 3, 4]}, ":1: hash_ids has 4 blocks for 1088 tokens"),
        ({"hash_ids": lambda row: "x y"}, ":1: hash_ids='x y': must be a list of whole numbers"),
        ({"prompt_token_ids": lambda row: [1]}, ":1: prompt_token_ids has 1 tokens, and the"),
        (
            {"cached_tokens": lambda row: 5, "hash_ids": lambda row: [1]},
            ":1: has hash_ids and cached_tokens: must have one of them",
        ),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, columns: Any, line: str) -> None:
    path = written(tmp_path / "log.jsonl", rows(**columns))
    with pytest.raises(ConfigError) as caught:
        read_log(path)
    assert str(caught.value).startswith(f"{path}{line}")
