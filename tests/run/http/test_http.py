"""Servers over HTTP: tables, metrics and files of what a client sees."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
import pytest

from pagedsim.backends.base import StoppableRecorder
from pagedsim.backends.http import backend
from pagedsim.backends.http.client import Address, base_of
from pagedsim.backends.http.load import Seen
from pagedsim.backends.http.results import benchmark
from pagedsim.core import ConfigError, Request
from pagedsim.metrics.arms import Run
from pagedsim.report.load import load_of
from pagedsim.run.job import Failure, run_job
from pagedsim.workload import Workload
from tests.run.http.fake import Fake, serving
from tests.run.studies import job_of, run_of

# -- a workload is sent over HTTP, and what its client sees becomes tables, metrics and files ------

FIXED = ("workload=fixed", "workload.lengths.prompt=20", "workload.lengths.output=5")
LOAD = ("experiment=bench", *FIXED, "workload.requests=12", "workload.rate=400")


def words(fake: Fake, *more: str) -> tuple[str, ...]:
    return (*LOAD, f"backend.url={fake.url}", *more)


def notices(run: Run) -> list[str]:
    return [one["what"] for one in run.summary["notices"]]


def failed(fake: Fake, folder: Path, *more: str) -> str:
    outcome = run_job(job_of(folder, words(fake, *more)), StoppableRecorder())
    assert isinstance(outcome, Failure) and outcome.expected
    return outcome.reason


def test_requests_are_answered_and_measured(fake: Fake, tmp_path: Path) -> None:
    run = run_of(tmp_path, words(fake))
    table = run.requests().to_pydict()
    assert run.summary["finished"] == 12
    assert set(table["prompt_tokens"]) == {20} and set(table["output_tokens"]) == {5}
    assert table["arrival"] == pytest.approx([row / 400 for row in range(12)])
    for arrival, sent, first, times, last in zip(
        *(table[name] for name in ("arrival", "sent", "first_token", "token_times", "finished")),
        strict=True,
    ):
        assert arrival <= sent < first == times[0] <= times[-1] == last and len(times) == 5
    assert run.summary["output_tokens_per_s"] > 0 and run.summary["machine"]["model"] == "fake"


def test_metrics_of_the_server_alone_are_null(fake: Fake, tmp_path: Path) -> None:
    run = run_of(tmp_path, words(fake))
    told = json.loads((run.folder / "summary.json").read_text())
    for name in (
        *("preemptions", "recomputed_tokens", "swapped_blocks", "cached_tokens", "queue_time_p50"),
        *("kv_utilisation_mean", "kv_waste_mean", "batch_size_mean", "batch_fill_mean"),
        *("total_blocks", "block_size", "max_seqs"),
    ):
        assert told[name] is None, name
    assert run.requests("preemptions")["preemptions"].null_count == 12
    assert run.steps().num_rows == 0


def test_the_load_over_time_is_of_waiting_and_running_requests(fake: Fake, tmp_path: Path) -> None:
    fake.delay = 0.002
    run = run_of(tmp_path, words(fake))
    edges, series = load_of(run, 40)
    table = {name: run.requests(name)[name].to_numpy() for name in run.requests().column_names}
    seconds = {name: values.sum() * (edges[1] - edges[0]) for name, values in series.items()}
    assert seconds == {
        "waiting": pytest.approx((table["first_token"] - table["arrival"]).sum()),
        "running": pytest.approx((table["finished"] - table["first_token"]).sum()),
    }


def test_a_chat_has_words(fake: Fake, tmp_path: Path) -> None:
    run = run_of(tmp_path, words(fake, "backend.endpoint=chat"))
    assert run.summary["finished"] == 12 and "messages" in fake.asked[-1]
    assert set(run.requests()["prompt_tokens"].to_pylist()) == {27}
    assert any("prompts had 27.0 tokens" in what for what in notices(run))


@pytest.mark.parametrize(
    ("how", "tokens", "note"),
    [
        ({"usage": False}, 5, "answers came without usage: their parts are counted"),
        ({"together": 5}, 5, "answers came in 0.20 parts a token"),
        ({"short": 2}, 3, "shorter"),
    ],
    ids=lambda case: next(iter(case)) if isinstance(case, dict) else "",
)
def test_unusual_answers_are_noted(
    how: dict[str, Any], tokens: int, note: str, fake: Fake, tmp_path: Path
) -> None:
    vars(fake).update(how)
    run = run_of(tmp_path, words(fake))
    assert set(run.requests()["output_tokens"].to_pylist()) == {tokens}
    assert any(note in what for what in notices(run))


def test_errors_are_counted_by_kind_and_the_others_are_measured(fake: Fake, tmp_path: Path) -> None:
    fake.fails = lambda number, body: {3: 429, 5: 429, 7: 0, 9: 500}.get(number)
    run = run_of(tmp_path, words(fake))
    told = {one["what"]: one["count"] for one in run.summary["notices"] if one["count"]}
    either = "requests failed: HTTP 429 (no 5)"  # the first that was told of, and both may be it
    told |= {"requests failed: HTTP 429 (no 3)": told.pop(either)} if either in told else {}
    assert told == {
        "requests failed: HTTP 429 (no 3)": 2,
        "requests failed: the connection broke (ClientPayloadError)": 1,
        "requests failed: HTTP 500 (no 9)": 1,
    }
    assert (run.summary["finished"], run.summary["aborted"]) == (8, 4)
    reasons = run.requests().filter(pc.equal(run.requests()["state"], "aborted"))["reason"]
    assert sorted(reasons.to_pylist()) == sorted(
        ["HTTP 429", "HTTP 429", "HTTP 500", "the connection broke"]
    )
    bench = json.loads((run.folder / "vllm_bench.json").read_text())
    assert (bench["completed"], bench["failed"]) == (8, 4)
    assert sum(error != "" for error in bench["errors"]) == 4
    assert sum(bench["output_lens"]) == bench["total_output_tokens"] == 40


def test_requests_after_a_lost_server_are_aborted(fake: Fake, tmp_path: Path) -> None:
    def gone(number: int, body: dict[str, Any]) -> int:
        if number == 5:
            fake.stop()
        return 0

    fake.fails = lambda number, body: gone(number, body) if number > 4 else None
    run = run_of(tmp_path, words(fake, "workload.rate=40"))
    told = {one["what"]: one["count"] for one in run.summary["notices"] if one["count"]}
    assert told["requests failed: no connection (Connection refused)"] > 1
    assert run.summary["finished"] == 4 and run.summary["aborted"] == 8


def test_an_answer_that_takes_too_long_is_given_up(fake: Fake, tmp_path: Path) -> None:
    fake.delay = 0.5
    more = ("backend.timeout=0.05", "backend.warmup=0", "workload.requests=2")
    run = run_of(tmp_path, words(fake, *more))
    assert run.summary["aborted"] == 2
    assert "requests failed: no answer within backend.timeout" in notices(run)


def test_what_fails_before_the_clock_starts_ends_the_run(fake: Fake, tmp_path: Path) -> None:
    fake.fails = lambda number, body: 400
    assert failed(fake, tmp_path) == (
        f"backend.url={fake.url}: a first request failed: HTTP 400: no 0; "
        "backend.prompt=text sends words"
    )
    assert "sends words" not in failed(fake, tmp_path, "backend.prompt=text")


def test_warm_up_requests_are_not_counted_and_short(fake: Fake, tmp_path: Path) -> None:
    run = run_of(tmp_path, words(fake, "backend.warmup=3", "workload.lengths.output=20"))
    assert run.summary["requests"] == 12 and len(fake.asked) == 15
    assert [body["max_tokens"] for body in fake.asked] == [8] * 3 + [20] * 12
    assert fake.asked[0]["prompt"] != fake.asked[3]["prompt"]


def test_a_run_that_is_stopped_keeps_what_it_has(fake: Fake, tmp_path: Path) -> None:
    fake.delay = 0.002
    recorder = StoppableRecorder()

    def fails(number: int, body: dict[str, Any]) -> None:
        if number == 8:
            fake.delay = 60
            recorder.stop()

    fake.fails = fails
    job = job_of(tmp_path, words(fake, "workload.rate=50"))
    run_job(job, recorder)
    states = Run("", 0, job.folder, {}, {}).requests("state")["state"].to_pylist()
    assert "finished" in states and "unfinished" in states
    assert json.loads((job.folder / "summary.json").read_text())["partial"] is True


def test_vllms_names_have_vllms_meanings(fake: Fake, tmp_path: Path) -> None:
    fake.delay = 0.001
    run = run_of(tmp_path, words(fake, "slo.ttft=5"))
    bench = json.loads((run.folder / "vllm_bench.json").read_text())
    table = run.requests().to_pydict()
    assert (bench["num_prompts"], bench["total_output_tokens"]) == (12, 60)
    assert bench["request_rate"] == pytest.approx(400)
    assert bench["input_lens"] == [20] * 12 and bench["output_lens"] == [5] * 12
    ttft = np.array(table["first_token"]) - np.array(table["sent"])
    assert bench["ttfts"] == pytest.approx(ttft.tolist())
    assert bench["mean_ttft_ms"] == pytest.approx(1e3 * ttft.mean())
    e2el = np.array(table["finished"]) - np.array(table["sent"])
    assert bench["p99_e2el_ms"] == pytest.approx(1e3 * np.percentile(e2el, 99))
    assert bench["median_tpot_ms"] == pytest.approx(1e3 * np.median((e2el - ttft) / 4))
    assert [len(gaps) for gaps in bench["itls"]] == [4] * 12
    assert bench["generated_texts"] == [" x" * 5] * 12
    assert bench["request_goodput"] == pytest.approx(bench["request_throughput"])
    assert 1 <= bench["max_concurrent_requests"] <= 12


def test_a_load_without_a_rate_has_vllms_infinite_one(fake: Fake, tmp_path: Path) -> None:
    run = run_of(tmp_path, words(fake, "workload.arrivals=closed", "workload.users=2"))
    bench = json.loads((run.folder / "vllm_bench.json").read_text())
    assert (bench["request_rate"], bench["max_concurrency"]) == ("inf", 2)


def test_a_missing_aiohttp_names_the_extra(
    fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend, "find_spec", lambda name: None)
    assert failed(fake, tmp_path) == (
        "backend=http: needs aiohttp, which is not installed: "
        "pip install -c constraints.txt '.[serve]'"
    )


def test_a_key_is_sent_and_kept_nowhere(
    fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sesame")
    run_of(tmp_path, words(fake))
    assert all(one["Authorization"] == "Bearer sesame" for one in fake.headers)
    for path in tmp_path.rglob("*"):
        assert not path.is_file() or b"sesame" not in path.read_bytes(), path


def test_beams_are_refused(fake: Fake, tmp_path: Path) -> None:
    assert failed(fake, tmp_path, "workload.beam=2").startswith("workload.beam: must be null")


# -- a server that is not there, or does not say what it serves, gives one line --------------------


@pytest.mark.parametrize(
    ("url", "base"),
    [
        ("http://host:8000", "http://host:8000"),
        ("host:8000/v1/", "http://host:8000"),
        ("https://host/llm/v1", "https://host/llm"),
        ("http://[::1]:80/", "http://[::1]:80"),
    ],
)
def test_addresses(url: str, base: str) -> None:
    assert base_of(url) == base


def test_a_key_in_an_address_is_refused_and_not_shown() -> None:
    with pytest.raises(ConfigError, match="OPENAI_API_KEY is for keys") as told:
        base_of("http://me:secret@host")
    assert "secret" not in str(told.value)


def test_a_server_without_a_list_of_models_serves_one_that_is_named(fake: Fake) -> None:
    fake.models = 404
    assert Address.found(fake.url, "mine").model == "mine"
    with pytest.raises(ConfigError, match="gives HTTP 404; name the model"):
        Address.found(fake.url, None)


def test_a_key_that_is_refused_is_not_shown(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sesame")
    fake.models = 401
    with pytest.raises(ConfigError, match=r"refuses us \(HTTP 401\)") as told:
        Address.found(fake.url, "mine")
    assert "sesame" not in str(told.value)


def test_a_key_goes_to_no_other_server(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sesame")
    with serving(Fake()) as other:
        fake.elsewhere = f"{other.url}/v1/models"
        assert Address.found(fake.url, None).model == "fake"
        assert "Authorization" not in other.headers[-1]
    assert fake.headers[-1]["Authorization"] == "Bearer sesame"


# -- names of vLLM's, of requests whose times are given --------------------------------------------


CONFIG: dict[str, Any] = {
    "workload": {},
    "slo": {"ttft": None, "tpot": None, "e2e": None, "clients": {}},
}


def seen(sent: float, *times: float, error: str = "") -> Seen:
    """A request that was sent then, and whose tokens came at these times."""
    one = Seen(Request(0, 3), len(times))
    one.sent, one.answer.error = sent, error
    for time in times:
        one.answer.feed(b'data: {"choices": [{"index": 0, "text": " x"}]}\n', time)
    one.ended(times[-1])
    return one


def told(*some: Seen) -> dict[str, Any]:
    ones = [1] * len(some)
    workload = Workload.of(ones, ones, ones)
    return benchmark(some, workload, "completions", "m", CONFIG)


def test_peaks_are_of_whole_seconds_from_the_first_request_on() -> None:
    one_after_another = [seen(0.5 + 0.2 * i, 0.6 + 0.2 * i, 0.65 + 0.2 * i) for i in range(4)]
    found = told(*one_after_another, seen(1.45, 1.55, 1.6, 1.7), seen(0.5, 1.2, 1.3, error="x"))
    assert found["max_concurrent_requests"] == 5  # in second 0.5 to 1.5; the last begins in it, too
    assert found["max_output_tokens_per_s"] == 8
