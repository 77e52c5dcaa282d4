"""`bench`: load on a server from the command line, with all that a study leaves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hydra import compose

from pagedsim.fidelity.logs.log import read_log
from pagedsim.run.help import BENCH_HELP, WIDTH
from tests.conftest import Call
from tests.run.http.fake import Fake

LOAD = ("workload=alpaca", "workload.requests=25", "workload.rate=300")


def test_it_tells_what_its_client_saw_and_records_a_log(call: Call, fake: Fake) -> None:
    words = (*LOAD, "tracking=none", "report=false", "hydra.run.dir=out")
    code, told, errors = call("bench", f"url={fake.url}", *words, "record=log.csv")
    assert (code, errors) == (0, "")
    assert "TTFT mean" in told and f"requests were sent to {fake.url}, which served fake" in told
    assert "recorded  25 requests: log.csv" in told
    assert "requests=log.csv, with the server's own model= and hardware=\n" in told
    assert "experiment=calibrate requests=log.csv" in told
    log = read_log("log.csv")
    assert len(log) == 25 and (log.latencies.ttft > 0).all()
    result = json.loads(Path("out/result.json").read_text())
    assert (
        result["experiment"] == "bench" and Path("out/runs/bench/seed-0/vllm_bench.json").exists()
    )


def test_a_log_is_written_over_and_nothing_else_is(call: Call, fake: Fake) -> None:
    words = ("bench", f"url={fake.url}", *LOAD, "tracking=none", "report=false")
    for _ in range(2):
        assert call(*words, "record=log.csv")[0] == 0
    Path("other.csv").write_text("a,b\n1,2\n")
    asked = len(fake.asked)
    code, _, errors = call(*words, "record=other.csv")
    assert code == 1 and Path("other.csv").read_text() == "a,b\n1,2\n"
    assert (
        errors == "pagedsim: record=other.csv: is there already, and no log that was recorded so\n"
    )
    for path, why in (
        ("no/log.csv", "there is no folder no"),
        ("log.txt", "must end in .csv"),
        (".", "is a folder, must be a file"),
    ):
        assert call(*words, f"record={path}")[2] == f"pagedsim: record={path}: {why}\n"
    refused = call(*words, "record=log.csv", "seeds=2")[2]
    assert refused == "pagedsim: record=log.csv: must be of one run, not of seeds=2\n"
    assert len(fake.asked) == asked


def test_where_nothing_was_answered_the_first_reason_is_the_error(call: Call, fake: Fake) -> None:
    fake.fails = lambda number, body: 503
    words = ("backend.warmup=0", *LOAD, "tracking=none", "report=false", "hydra.run.dir=out")
    code, told, errors = call("bench", f"url={fake.url}", *words)
    assert code == 1 and "results   out" in told
    assert errors == ("pagedsim: no request finished: 25 of 25 requests failed: HTTP 503 (no 0)\n")


def test_it_has_a_page_of_its_own(call: Call) -> None:
    for words in (("bench", "--help"), ("--help", "bench"), ("bench", "url=localhost:1", "-h")):
        code, page, errors = call(*words)
        assert (code, errors) == (0, "") and page.startswith("python -m pagedsim bench url=")
    assert max(map(len, page.splitlines())) <= WIDTH


def test_its_page_names_every_setting(hydra: None) -> None:
    for key in compose("config", overrides=["experiment=bench"]).backend:
        assert key.startswith("_") or f"backend.{key}" in BENCH_HELP or f" {key}=" in BENCH_HELP, (
            key
        )


def test_two_servers_are_compared(call: Call, fake: Fake) -> None:
    arms = f'{{a: ["backend.url={fake.url}"], b: ["backend.url={fake.url}/v1"]}}'
    words = (*LOAD, "tracking=none", "report=true", "seeds=1", "hydra.run.dir=out")
    code, told, errors = call("experiment=compare", "backend=http", f"study.arms={arms}", *words)
    assert (code, errors) == (0, ""), errors
    assert "TTFT" in told and Path("out/plots/load.png").exists()


def test_a_sweep_of_the_rate_is_one_report(call: Call, fake: Fake) -> None:
    words = ("experiment=sweep", "study.values=[200,400]", "workload=alpaca", "seeds=1")
    more = ("workload.requests=10", "tracking=none", "report=false")
    code, told, errors = call("bench", f"url={fake.url}", *words, *more)
    assert (code, errors) == (0, "") and "400" in told


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            ("experiment=fcfs_vs_priority", "backend=http"),
            "backend=http: experiment=fcfs_vs_priority takes backend=sim, engine: it asks what "
            "happens inside a server",
        ),
        (
            ("experiment=capacity", "backend=http"),
            "backend=http: experiment=capacity takes backend=sim: ",
        ),
        (
            ("bench", "backend=sim"),
            "backend=sim: experiment=bench takes backend=http: it is load on a server elsewhere",
        ),
        (("experiment=single", "record=a.csv"), "record=a.csv: changes nothing here; "),
        (("bench",), "backend.url: must be given: backend.url=http://host:port"),
        (("bench", "url=127.0.0.1:9"), "backend.url=http://127.0.0.1:9: cannot be reached: "),
    ],
)
def test_what_makes_no_sense_is_one_line(words: tuple[str, ...], told: str, call: Call) -> None:
    code, out, errors = call(*words, "tracking=none")
    assert (code, out) == (1, "")
    assert errors.startswith(f"pagedsim: {told}") and errors.count("\n") == 1


def test_arms_that_a_server_cannot_tell_apart_are_refused(call: Call, fake: Fake) -> None:
    arms = 'study.arms={a: ["policy=fcfs"], b: ["policy=priority"]}'
    words = ("backend=http", f"backend.url={fake.url}", arms, *LOAD, "tracking=none")
    code, _, errors = call("experiment=compare", *words)
    assert code == 1 and errors.startswith("pagedsim: study.arms.b: sends what 'a' sends")


def test_settings_of_a_server_change_nothing_and_that_is_said(call: Call, fake: Fake) -> None:
    words = (*LOAD, "tracking=none", "report=false", "server.max_seqs=4")
    told = call("bench", f"url={fake.url}", *words)[1]
    assert "note: server.max_seqs=4 changes nothing: the server has its own settings" in told
