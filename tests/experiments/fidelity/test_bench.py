"""`bench`: load on a server from the command line, with all that a study leaves."""

from __future__ import annotations

import json
from pathlib import Path

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


def test_its_page_names_every_setting() -> None:
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
