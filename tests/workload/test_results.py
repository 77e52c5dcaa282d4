"""Results of load generators as traces and as logs: vLLM's, SGLang's, GuideLLM's, aiperf's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pagedsim.core import ConfigError
from pagedsim.fidelity.logs.log import read_log
from pagedsim.workload import trace
from pagedsim.workload.traces.read import format_of
from pagedsim.workload.traces.results import RESULTS

FILES = Path(__file__).parent / "results"
BENCH: dict[str, Any] = {
    **{"endpoint_type": "vllm", "request_rate": "inf", "max_concurrency": 2, "mean_ttft_ms": 200.0},
    **{"input_lens": [5, 6, 7, 8], "output_lens": [2, 3, 2, 0], "ttfts": [0.1, 0.2, 0.3, 0.0]},
    **{"itls": [[0.4], [0.1, 0.1], [0.1], []], "errors": ["", "", "", "refused"]},
    "start_times": [10.0, 10.5, 11.5, 12.0],
}
SGLANG = {
    **{key: value for key, value in BENCH.items() if key not in ("endpoint_type", "start_times")},
    **{"dataset_name": "random", "mean_e2e_latency_ms": 430.0, "request_rate": float("inf")},
}


def written(folder: Path, content: Any, name: str = "result.json") -> Path:
    path = folder / name
    path.write_text(content if isinstance(content, str) else json.dumps(content) + "\n")
    return path


def check_alike(path: Path, count: int, failed: int = 0) -> None:
    """Fail unless the file is the same requests as a trace and as a log, by any way to name it."""
    name = format_of(path, "auto").name
    assert name in RESULTS
    log = read_log(path)
    same = read_log(path, name)
    assert len(log) == count and log.failed == failed
    assert np.array_equal(log.latencies.e2e, same.latencies.e2e)
    assert (log.latencies.ttft > 0).all() and (log.latencies.ttft <= log.latencies.e2e).all()
    workload = trace(path=path, format=name)
    requests = [request for request, _ in workload.requests()]
    assert [request.arrival for request in requests] == pytest.approx(log.arrived.tolist())
    assert any("without tokens" in line for line in workload.notices) == (failed > 0)


def test_results_that_the_tools_wrote_are_read() -> None:
    for path, count, failed in ((FILES / "aiperf-docs.jsonl", 1, 1),):
        check_alike(path, count, failed)


def test_vllms_lists_are_requests(tmp_path: Path) -> None:
    path = written(tmp_path, BENCH)
    check_alike(path, 3, failed=1)
    log = read_log(path)
    assert log.arrived.tolist() == [0, 0.5, 1.5]
    assert (log.prompt.tolist(), log.output.tolist()) == ([5, 6, 7], [2, 3, 2])
    assert log.latencies.ttft.tolist() == pytest.approx([0.1, 0.2, 0.3])
    assert log.latencies.e2e.tolist() == pytest.approx([0.5, 0.4, 0.4])


def test_a_closed_loop_says_when_its_requests_were_sent(tmp_path: Path) -> None:
    """SGLang saves no start times: two at a time, the third is sent when the second has ended."""
    path = written(tmp_path, SGLANG, "result.jsonl")
    check_alike(path, 3, failed=1)
    assert read_log(path).arrived.tolist() == pytest.approx([0, 0, 0.4])
    assert (
        read_log(written(tmp_path, SGLANG | {"max_concurrency": None})).arrived.tolist() == [0] * 3
    )
    with pytest.raises(ConfigError, match=r"has no start_times, and request_rate=4\.0"):
        read_log(written(tmp_path, SGLANG | {"request_rate": 4.0}))


GUIDE = {
    "metadata": {"guidellm_version": "0.8.1"},
    "benchmarks": [{"requests": {"successful": [
        {"request_start_time": 7.5, "prompt_tokens": 4, "output_tokens": 2,
         "time_to_first_token_ms": 250.0, "request_latency": 1.0},
    ], "errored": [{}], "incomplete": []}}],
}  # fmt: skip


def test_the_names_of_guidellm(tmp_path: Path) -> None:
    path = written(tmp_path, GUIDE)
    check_alike(path, 1, failed=1)
    assert read_log(path).latencies.ttft.tolist() == [0.25]
    two = GUIDE | {"benchmarks": [*GUIDE["benchmarks"], {}]}
    with pytest.raises(ConfigError, match="has 2 benchmarks: must have one"):
        read_log(written(tmp_path, two))


PLAIN = "Arrived_At,NUM_PREFILL_TOKENS,num_decode_tokens,TTFT,e2e\n"


@pytest.mark.parametrize("date", ["2026-01-31T12:00:{}Z", "2026-01-31 12:00:{}+00:00"])
def test_headers_have_any_case_and_times_are_dates_too(tmp_path: Path, date: str) -> None:
    lines = "".join(f"{date.format(second)},5,3,1,2\n" for second in ("00.5", "02"))
    path = written(tmp_path, PLAIN + lines, "log.csv")
    assert read_log(path).arrived.tolist() == [0, 1.5]
    assert [request.arrival for request, _ in trace(path=path).requests()] == [0, 1.5]
    row = {"arrived_at": date.format("02"), "num_prefill_tokens": 5, "num_decode_tokens": 3}
    rows = "".join(
        json.dumps(row | {"arrived_at": date.format(at)}) + "\n" for at in ("00.5", "02")
    )
    jsonl = written(tmp_path, rows, "log.jsonl")
    assert [request.arrival for request, _ in trace(path=jsonl).requests()] == [0, 1.5]


def test_columns_of_ones_own_are_named(tmp_path: Path) -> None:
    path = written(tmp_path, "at,in,out,first,took\n1,5,3,1,2\n3,5,3,1,2\n", "log.csv")
    columns = {"arrival": "at", "prompt": "in", "output": "out", "ttft": "first", "e2e": "took"}
    assert read_log(path, columns=columns).arrived.tolist() == [0, 2]
    with pytest.raises(ConfigError, match="has no missing"):
        read_log(path, columns=columns | {"ttft": "missing"})


@pytest.mark.parametrize(
    ("content", "settings", "line"),
    [
        (BENCH, {"format": "guidellm"}, "has no list benchmarks"),
        (BENCH, {"format": "plain"}, "has no arrived_at"),
        (BENCH, {"format": "bench"}, "unknown format 'bench'"),
        (BENCH, {"columns": {"first": "x"}}, "unknown columns 'first'"),
        ({"a": 1, "b": 2}, {}, "no known format has a, b (plain: arrived_at, "),
        (BENCH | {"itls": None}, {}, "has no list itls: --save-result --save-detailed saves"),
        (BENCH | {"input_lens": [5]}, {}, "its lists of requests differ in length"),
        (BENCH | {"start_times": [0.0]}, {}, "its lists of requests differ in length"),
        (BENCH | {"itls": [1, 2, 3, 4]}, {}, "ttfts must be numbers, itls lists"),
        (BENCH | {"errors": ["no"] * 4}, {}, "none of its 4 requests was answered"),
        (json.dumps(BENCH) * 2, {}, "has 2 results: must have one"),
    ],
)
def test_a_bad_log(tmp_path: Path, content: Any, settings: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_log(written(tmp_path, content), **settings)
    assert line in str(caught.value) and "\n" not in str(caught.value)


def test_a_trace_of_no_format_is_told_what_there_is(tmp_path: Path) -> None:
    path = written(tmp_path, {"when": 1, "size": 2})
    with pytest.raises(ConfigError, match=r"no known format has fields when, size \(bailian: "):
        trace(path=path)
