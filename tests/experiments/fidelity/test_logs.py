"""Request logs: formats that are read, prompt contents, refusals, and recording."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pagedsim.core import ConfigError
from pagedsim.fidelity.logs.consistency_checks import inconsistencies
from pagedsim.fidelity.logs.log import check_log, read_log
from tests.experiments.fidelity.test_fit import TRUE, serve, server

VLLM = {
    "request_id": "a",
    "input_toks": 7,
    "output_toks": 3,
    "arrival_time": 1000.0,
    "queued_ts": 5.25,
    "first_token_ts": 6.0,
    "last_token_ts": 8.0,
}


def test_two_clocks_are_laid_over_each_other(tmp_path: Path) -> None:
    """The second request is queued at once; the first waits for 0.25 s before it is seen."""
    second = VLLM | {"request_id": "b", "arrival_time": 1001.0, "queued_ts": 6.0}
    path = tmp_path / "log.jsonl"
    path.write_text(f"{json.dumps(second)}\n{json.dumps(VLLM)}\n")
    with pytest.raises(ConfigError, match=r"log.jsonl:1: arrives at 1001, has its first token at"):
        read_log(path)
    second["first_token_ts"] = 7.5
    path.write_text(f"{json.dumps(second)}\n{json.dumps(VLLM)}\n")
    log = read_log(path)
    assert log.places == [f"{path}:2", f"{path}:1"]
    assert log.arrived.tolist() == [0, 1]
    assert log.latencies.ttft.tolist() == [1.0, 1.5]
    assert log.latencies.e2e.tolist() == [3.0, 2.0]
    assert log.latencies.tpot.tolist() == [1.0, 0.25]


def test_parquet_and_csv_are_read_alike(tmp_path: Path) -> None:
    columns = {
        "arrived_at": [1.0, 2.5],
        "num_prefill_tokens": [4, 5],
        "num_decode_tokens": [1, 9],
        "ttft": [0.5, 0.25],
        "finished_at": [1.5, 4.0],
    }
    pq.write_table(pa.table(columns), tmp_path / "log.parquet")
    with (tmp_path / "log.csv").open("w") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(zip(*columns.values(), strict=True))
    for name in ("log.parquet", "log.csv"):
        log = read_log(tmp_path / name)
        assert log.arrived.tolist() == [0, 1.5]
        assert log.prompt.tolist() == [4, 5]
        assert log.latencies.ttft.tolist() == [0.5, 0.25]
        assert log.latencies.e2e.tolist() == [0.5, 1.5]
        assert np.isnan(log.latencies.tpot[0])


HEADER = "arrived_at,num_prefill_tokens,num_decode_tokens,ttft,e2e"
GOOD = '{"arrived_at": 0, "num_prefill_tokens": 5, "num_decode_tokens": 3, "ttft": 1, "e2e": 2}'


@pytest.mark.parametrize(
    ("name", "text", "line"),
    [
        ("a.csv", "", "{}: the file is empty"),
        ("a.csv", f"{HEADER}\n0,5,3,1,2\n1,5,3,,2", "{}:3: ttft=: must be a number"),
        ("a.csv", f"{HEADER}\n0,5,0,1,2", "{}:2: num_decode_tokens=0: must be a whole number"),
        ("a.csv", f"{HEADER}\n0,5,3,2,1", "{}:2: arrives at 0, has its first token at 2 and"),
        ("a.csv", "arrived_at,ttft\n0,1", "{}:2: has no finished_at or e2e, only arrived_at"),
        ("a.jsonl", '{"arrived_at": 1\n', "{}:1: not JSON: "),
        ("a.jsonl", '{"arrived_at": 1}\n[]\n', "{}:2: must be an object, one a line"),
        ("a.jsonl", '[{"arrived_at": 1}]', "{}: is a JSON list: must be JSON lines"),
        ("a.csv", f"{HEADER}\n0,5,3,1,2,9", "{}:2: has more fields than the header"),
        ("a.csv", f"{HEADER},ttft\n0,5,3,1,2,1", "{}:1: column 'ttft' is there 2 times: must be"),
        ("a.csv", f"{HEADER}\n0,5,3,1,2\n0,5,3,1,{'1' * 140_000}", "{}:3: is not CSV: field larg"),
        ("a.csv", f"{HEADER},hash_ids\n0,5,3,1,2,{'[' * 99_999}", "{}:2: hash_ids=[["),
        ("a.jsonl", f"{GOOD}\n{'[' * 99_999}", "{}:2: not JSON: a number too long, or lists to"),
        ("a.jsonl", GOOD.replace("5", "5" * 5000), "{}:1: not JSON: a number too long, or list"),
        ("a.jsonl", GOOD.replace("5", "5" * 400), "{}:1: num_prefill_tokens=5555"),
        ("a.parquet", "PAR0", "{}: cannot be read: "),
    ],
)
def test_unreadable_logs_are_refused(name: str, text: str, line: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        read_log(path)
    assert str(error.value).startswith(line.format(path))
    assert "\n" not in str(error.value)


# -- recording -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("no/log.csv", "there is no folder {}/no"),
        ("log.txt", "must end in .csv"),
        (".", "is a folder, must be a file"),
        ("other.csv", "is there already, and no log that was recorded so"),
    ],
)
def test_other_files_are_not_written_over(name: str, why: str, tmp_path: Path) -> None:
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    path = tmp_path / name
    with pytest.raises(ConfigError) as error:
        check_log(path)
    assert str(error.value) == f"record={path}: {why.format(tmp_path)}"


# -- contents of prompts ---------------------------------------------------------------------------

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
        for line in inconsistencies(paged, serve(paged, TRUE), TRUE)
    )


def test_first_tokens_that_come_too_soon_are_noted(tmp_path: Path) -> None:
    log = read_log(written(tmp_path / "log.jsonl", rows(**STATED["prefix_id"])))
    times = serve(server(log, BLOCKS), TRUE).latencies
    # As measured on a server whose software took no time.
    quick = replace(times, ttft=times.ttft - TRUE["front_ms"] / 1e3)
    unsaid = server(replace(log, latencies=quick, contents=None), BLOCKS)
    told = [line for line in inconsistencies(unsaid, serve(unsaid, TRUE), TRUE) if "stated" in line]
    assert told and told[0].startswith(f"{ROWS - 1} of {ROWS} first tokens came sooner")
    said = server(replace(log, latencies=quick), BLOCKS)
    assert not any("stated" in line for line in inconsistencies(said, serve(said, TRUE), TRUE))


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


@pytest.mark.parametrize(
    ("columns", "line"),
    [
        ({"prefix_id": lambda row: "a"}, ":1: has prefix_id without prefix_tokens: needs both"),
        (
            {"cached_tokens": lambda row: 5000},
            ":1: cached_tokens=5000: must be a whole number from 0 to the 1088 tokens",
        ),
        ({"cached_tokens": lambda row: "many"}, ":1: cached_tokens=many: must be a whole"),
        ({"hash_ids": lambda row: [1, 2, 3, 4]}, ":1: hash_ids has 4 blocks for 1088 tokens"),
        ({"hash_ids": lambda row: "x y"}, ":1: hash_ids=x y: must be a list of whole numbers"),
        ({"prompt_token_ids": lambda row: [1]}, ":1: prompt_token_ids has 1 tokens, and the"),
        (
            {"cached_tokens": lambda row: 5, "hash_ids": lambda row: [1]},
            ":1: has hash_ids and cached_tokens: must have one of them",
        ),
    ],
)
def test_wrong_contents_are_refused(tmp_path: Path, columns: Any, line: str) -> None:
    path = written(tmp_path / "log.jsonl", rows(**columns))
    with pytest.raises(ConfigError) as caught:
        read_log(path)
    assert str(caught.value).startswith(f"{path}{line}")
