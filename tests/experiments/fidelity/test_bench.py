"""`bench`: load on a server from the command line, with all that a study leaves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pagedsim.fidelity.logs.log import read_log
from pagedsim.run.help import BENCH_HELP, WIDTH
from tests.conftest import Call
from tests.run.http.fake import Fake
from tests.run.studies import compose

LOAD = ("workload=alpaca", "workload.requests=8", "workload.rate=300", "tracking=none")
QUICK = (*LOAD, "report=false", "hydra.run.dir=out")


def test_a_run_reports_its_latencies_and_records_a_log(call: Call, fake: Fake) -> None:
    words = (*QUICK, "record=log.csv", "server.max_seqs=4")
    code, told, errors = call("bench", f"url={fake.url}", *words)
    assert (code, errors) == (0, "")
    assert "TTFT mean" in told and f"requests were sent to {fake.url}, which served fake" in told
    assert "recorded  8 requests: log.csv" in told
    assert "requests=log.csv, with the server's own model= and hardware=\n" in told
    assert "experiment=calibrate requests=log.csv" in told
    assert "note: server.max_seqs=4 changes nothing: the server has its own settings" in told
    log = read_log("log.csv")
    assert len(log) == 8 and (log.latencies.ttft > 0).all()
    assert json.loads(Path("out/result.json").read_text())["experiment"] == "bench"
    assert Path("out/runs/bench/seed-0/vllm_bench.json").exists()


def test_where_nothing_was_answered_the_first_reason_is_the_error(call: Call, fake: Fake) -> None:
    fake.fails = lambda number, body: 503
    code, told, errors = call("bench", f"url={fake.url}", *QUICK, "backend.warmup=0")
    assert code == 1 and "results   out" in told
    assert errors == "pagedsim: no request finished: 8 of 8 requests failed: HTTP 503 (no 0)\n"


def test_the_manual_page(call: Call) -> None:
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
    words = (*LOAD, "report=true", "seeds=1", "hydra.run.dir=out")
    code, told, errors = call("experiment=compare", "backend=http", f"study.arms={arms}", *words)
    assert (code, errors) == (0, ""), errors
    assert "TTFT" in told and Path("out/plots/load.png").exists()


def test_a_sweep_of_the_rate_is_one_report(call: Call, fake: Fake) -> None:
    words = ("experiment=sweep", "study.over=workload.rate", "study.values=[200,400]", "seeds=1")
    code, told, errors = call("bench", f"url={fake.url}", *words, *QUICK)
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
            ("bench", "backend=sim"),
            "backend=sim: experiment=bench takes backend=http: it is load on a server elsewhere",
        ),
        (("experiment=single", "record=a.csv"), "record=a.csv: changes nothing here; "),
        (("bench",), "backend.url: must be given: backend.url=http://host:port"),
        (("bench", "url=127.0.0.1:9"), "backend.url=http://127.0.0.1:9: cannot be reached: "),
        (("bench", "url={}", "record=l.csv", "seeds=2"), "record=l.csv: must be of one run, not "),
        (("bench", "url={}", "record=log.txt"), "record=log.txt: must end in .csv"),
        (
            (
                *("experiment=compare", "backend=http", "backend.url={}"),
                'study.arms={a: ["policy=fcfs"], b: ["policy=priority"]}',
            ),
            "study.arms.b: sends what 'a' sends",
        ),
    ],
)
def test_what_makes_no_sense_is_one_line(
    words: tuple[str, ...], told: str, call: Call, fake: Fake
) -> None:
    code, out, errors = call(*(word.replace("{}", fake.url) for word in words), "tracking=none")
    assert (code, out) == (1, "")
    assert errors.startswith(f"pagedsim: {told}") and errors.count("\n") == 1
    assert not fake.asked
