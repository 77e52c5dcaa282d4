"""A log predicted with what was fitted to another: what is reported, drawn and refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experiments.fidelity.calibrate import scored
from pagedsim.core import ConfigError
from pagedsim.fidelity.logs.consistency_checks import Course, course_of_steps, read_course, signs
from pagedsim.fidelity.logs.fit import cold_start, spread
from pagedsim.fidelity.logs.log import Latencies, read_log
from pagedsim.fidelity.logs.score import score
from pagedsim.fidelity.logs.server import Fit, serve
from tests.experiments.fidelity.test_external import TRUE, answered, asked, perform, server

pytestmark = pytest.mark.usefixtures("hydra")


def fit_of(path: Path, **changes: Any) -> Path:
    """What a calibration would leave that found everything."""
    of = server(asked(20))
    facts = {**of.facts, **changes}
    Fit(TRUE, facts, {"decode_count": 256}, "first.csv", ["host_request_us"]).save(path)
    return path


def test_another_log_is_predicted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit, log = fit_of(tmp_path / "fit.json"), answered(tmp_path / "log.csv", 40)
    found = perform(tmp_path / "out", "experiment=predict", f"fit={fit}", f"requests={log}")
    errors = found["scores"]["all"]["errors"]
    assert set(errors) == {"ttft", "tpot", "e2e"}
    assert all(abs(error["mean"]) < 1e-3 and error["each"] < 1e-3 for error in errors.values())
    lines = found["over_time"]
    assert lines["measured"]["running"] == lines["simulated"]["running"]
    assert max(lines["simulated"]["kv"]) > 50
    said = " ".join(capsys.readouterr().out.split())
    assert "predicted with what was fitted to first.csv" in said
    assert "the fitted log did not decide host_request_us" in said
    assert "fitted for" not in said


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"hardware": "a100-80gb"}, "fitted for hardware=a100-80gb, but hardware=rtx4090 is"),
        ({"tensor_parallel": 2}, "fitted for tensor_parallel=2, but tensor_parallel=1 is"),
        ({"kv_cache_dtype": "fp8_e4m3"}, "fitted for kv_cache_dtype=fp8_e4m3, but"),
        ({"stack": "vllm-2023"}, "fitted for stack=vllm-2023, but stack=vllm-2026 is"),
        (
            {"model": "mistral-7b"},
            "fitted for model=mistral-7b, and llama-3.1-8b is predicted: the",
        ),
    ],
)
def test_what_is_not_as_it_was_is_told(tmp_path: Path, changes: Any, line: str) -> None:
    of, fit = server(asked(4)), Fit.load(fit_of(tmp_path / "fit.json", **changes))
    told = list(fit.doubts(of, serve(of, TRUE)))
    assert any(one.startswith(line) for one in told), told


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("{", "fit={}: is not JSON"),
        ("[]", "fit={}: must hold an object with constants, server, largest, source, undecided"),
        ({"constants": {}}, "fit={}: constants must be an object that has front_ms"),
        ({"constants": {"front_ms": -1}}, "fit={}: constants.front_ms=-1: must be a number of 0"),
        (
            {"constants": {"front_ms": 1, "bandwidth_efficiency": 1.2}},
            "fit={}: constants.bandwidth_efficiency=1.2: must be",
        ),
    ],
)
def test_a_fit_that_cannot_be_read(tmp_path: Path, text: Any, line: str) -> None:
    path = fit_of(tmp_path / "fit.json")
    if isinstance(text, dict):
        text = json.dumps(json.loads(path.read_text()) | text)
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        Fit.load(path)
    assert str(error.value).startswith(line.format(path))


def test_what_predict_needs(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^fit, requests: both must be given"):
        perform(tmp_path / "a", "experiment=predict")
    with pytest.raises(ConfigError, match=r"must be the folder or the fit\.json of an experiment="):
        perform(tmp_path / "b", "experiment=predict", f"fit={tmp_path}", "requests=x.csv")
    strange = fit_of(tmp_path / "fit.json")
    found = json.loads(strange.read_text())
    found["constants"]["wit"] = 1.0
    strange.write_text(json.dumps(found))
    with pytest.raises(ConfigError, match=r"^fit: has wit: cost= has only compute_efficiency"):
        Fit.load(strange).of(server(asked(4)))
    with pytest.raises(ConfigError, match="must be cost=roofline"):
        scored(server(asked(4), "cost=distserve-opt-13b-tp1").config, asked(4))


# -- the log ---------------------------------------------------------------------------------------


def test_a_cold_start_is_told_apart() -> None:
    log = asked(10, rate=1.0)
    warm = Latencies(np.full(10, 0.1), np.full(10, 2.0), log.output)
    usual = replace(log, latencies=Latencies(np.full(10, 0.12), np.full(10, 2.0), log.output))
    assert cold_start(usual, warm).requests == 0
    late = np.full(10, 0.12)
    late[0] = 1.0
    cold = cold_start(replace(log, latencies=Latencies(late, late + 2, log.output)), warm)
    assert cold.requests == int((log.arrived < 1.0).sum()) >= 1
    assert cold.seconds == 1.0
    assert cold.warm == pytest.approx(0.12)


def test_two_replicas_behind_one_log_are_told() -> None:
    """Two servers at once are faster than one can be; one of them is not."""
    log = asked(120, rate=20.0)
    rows = [np.arange(first, 120, 2) for first in (0, 1)]
    ttft, e2e = np.empty(120), np.empty(120)
    for part in rows:
        half = replace(
            log,
            places=[log.places[row] for row in part.tolist()],
            arrived=log.arrived[part],
            prompt=log.prompt[part],
            latencies=Latencies(ttft[part], e2e[part], log.output[part]),
            client=[""] * len(part),
        )
        times = serve(server(half), {**TRUE, "bandwidth_efficiency": 0.9}).latencies
        ttft[part], e2e[part] = times.ttft, times.e2e
    both = replace(log, latencies=Latencies(ttft, e2e, log.output))
    of = server(both)
    told = list(signs(of, serve(of, TRUE), TRUE))
    assert any("more than one replica may be behind this log" in line for line in told)
    one = serve(server(log), TRUE)
    alone = server(replace(log, latencies=one.latencies))
    assert list(signs(alone, one, TRUE)) == []


def test_a_server_that_runs_as_many_as_it_may_is_no_sign_of_another() -> None:
    """Requests that are seen to end a step after their seat was given away overlap."""
    log = asked(60, rate=50.0)
    limits = "server.max_seqs=8", "memory.blocks=9000"
    times = serve(server(log, *limits), TRUE).latencies
    late = replace(times, e2e=times.e2e + 0.9 * np.nan_to_num(times.tpot))
    of = server(replace(log, latencies=late), *limits)
    assert not any("server.max_seqs" in line for line in signs(of, serve(of, TRUE), TRUE))


def test_settings_that_the_log_fits_better_are_named() -> None:
    """A log of 8 sequences at most and chunked prompts, taken for one of 256 and whole prompts."""
    log = asked(80, rate=30.0)
    limits = "memory.blocks=9000", "server.max_batched_tokens=8192", "server.max_model_len=4096"
    times = serve(server(log, *limits, "server.max_seqs=8"), TRUE).latencies
    of = server(replace(log, latencies=times), *limits, "batching=prefill_first")
    (line,) = [line for line in signs(of, serve(of, TRUE), TRUE) if "these settings" in line]
    assert "server.max_seqs=8 it would be" in line
    right = server(replace(log, latencies=times), *limits, "server.max_seqs=8")
    assert not any("these settings" in one for one in signs(right, serve(right, TRUE), TRUE))


def test_more_requests_than_a_server_runs_are_told() -> None:
    log = asked(30, rate=1e6)
    long = Latencies(np.full(30, 100.0), np.full(30, 200.0), log.output)
    of = server(replace(log, latencies=long), "server.max_seqs=8", "memory.blocks=9000")
    assert any(
        line.startswith(
            "up to 30 requests had begun and not ended at a time, and server.max_seqs=8"
        )
        for line in signs(of, serve(of, TRUE), TRUE)
    )


def test_the_queue_is_read_and_scored(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    head = "arrived_at,num_prefill_tokens,num_decode_tokens,ttft,e2e,queue"
    path.write_text(f"{head}\n0,5,3,1,2,0.5\n1,5,3,1,2,0\n")
    log = read_log(path)
    assert log.latencies.queue is not None and log.latencies.queue.tolist() == [0.5, 0.0]
    twice = replace(log.latencies, queue=2 * log.latencies.queue)
    queue = score(log, twice, np.arange(2)).errors["queue"]
    assert (queue.off.mean, queue.each) == (1.0, 1.0)  # of the one that waited
    assert "queue" not in score(log, log.latencies.without_queue, np.arange(2)).errors
    path.write_text(f"{head}\n0,5,3,1,2,0.5\n1,5,3,1,2,-1\n")
    with pytest.raises(ConfigError, match=r"log.csv:3: queue=-1: the request is -1 s in the queue"):
        read_log(path)


# -- over time -------------------------------------------------------------------------------------


def test_a_course_by_hand() -> None:
    log = asked(2)
    log = replace(
        log,
        arrived=np.array([0.0, 1.0]),
        prompt=np.array([100, 50]),
        latencies=Latencies(
            np.array([1.0, 4.0]), np.array([4.0, 9.0]), np.array([30, 10]), np.array([0.0, 2.0])
        ),
    )
    course = Course.of(log, log.latencies, server(log).scheduler)
    at = int(np.searchsorted(course.times, 3.5))
    now = float(course.times[at])
    assert (course.running[at], course.waiting[at]) == (2, 0)
    tokens = 100 + 30 * (now - 1) / 3 + 50
    assert course.kv[at] == pytest.approx(100 * tokens / (450 * 16))
    assert course.waiting[int(np.searchsorted(course.times, 2.0))] == 1


def test_a_servers_own_counts_are_drawn(tmp_path: Path) -> None:
    log = answered(tmp_path / "log.csv", 40)
    of = server(read_log(log))
    true = course_of_steps(serve(of, TRUE), of.scheduler)
    series = tmp_path / "series.csv"
    rows = zip(true.times, true.running, true.waiting, true.kv, strict=True)
    lines = "\n".join(",".join(map(str, row)) for row in rows)
    series.write_text(f"t,running,waiting,kv_cache_pct\n{lines}\n")
    words = (f"fit={fit_of(tmp_path / 'fit.json')}", f"requests={log}")
    found = perform(tmp_path / "out", "experiment=predict", *words, f"study.timeseries={series}")[
        "over_time"
    ]
    assert found["measured"]["kv"] == pytest.approx(found["simulated"]["kv"], abs=5)
    assert max(found["simulated"]["waiting"]) > 0


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (None, "study.timeseries={}: no such file"),
        ("t,running\n0,1", "study.timeseries={}: has no waiting, kv_cache_pct: needs t, running"),
        ("t,running,waiting,kv_cache_pct\n", "study.timeseries={}: holds no rows"),
        ("t,running,waiting,kv_cache_pct\n0,1,-2,3", "{}:2: waiting='-2': must be a number, 0 or"),
        ("t,running,waiting,kv_cache_pct\n0,1,2,x", "{}:2: kv_cache_pct='x': must be a number"),
        ("t,running,waiting,kv_cache_pct\n1,1,2,3\n0,1,2,3", "study.timeseries={}: t must not"),
    ],
)
def test_counts_that_cannot_be_read(tmp_path: Path, text: str | None, line: str) -> None:
    path = tmp_path / "series.csv"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError) as error:
        read_course(path)
    assert str(error.value).startswith(line.format(path))


def test_points_lie_everywhere() -> None:
    points = np.stack(spread(64, 5))
    assert points.shape == (64, 5)
    assert np.abs(points).max() < 1
    for column in points.T:
        assert np.histogram(column, 4, (-1, 1))[0].min() >= 14
