"""Third-party clients on our server: the server's means, and the table."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("fastapi")

from experiments.benchmarks.clients import main, make_tokenizer, means_between, rows, totals
from pagedsim.serve.metrics import Metrics
from tests.serve.serving import paced, serving


def test_means_are_of_the_requests_in_between() -> None:
    metrics = Metrics()
    with serving(paced(metrics=metrics, step=0.02), metrics=metrics) as server:
        server.post("/v1/completions", prompt="Before", max_tokens=30)
        before = totals(server.url)
        server.post("/v1/completions", prompt="Once", max_tokens=5)
        means = means_between(before, totals(server.url))
    assert means["ITL"] == pytest.approx(20)
    assert means["E2E"] == pytest.approx(means["TTFT"] + 4 * 20)


def test_a_row_compares_a_client_with_the_server_and_with_bench() -> None:
    ours = {"TTFT": 100.0, "tokens/s": 50.0}
    first, second = rows("other", {"TTFT": 102.0, "tokens/s": 49.0}, {"TTFT": 100.5}, ours)
    assert re.findall(r"[+-][\d.]+%?", " ".join(first)) == ["+1.50", "+1.49%", "+2.00%"]
    assert re.findall(r"[+-][\d.]+%?", " ".join(second)) == ["-2.00%"]


def test_the_tokenizer_is_one_that_the_server_takes(tmp_path: Path) -> None:
    tokenizer = pytest.importorskip("pagedsim.engine.tokenizer")
    make_tokenizer(tmp_path / "tokenizer")
    made = tokenizer.load_tokenizer(tmp_path / "tokenizer")
    ids = made.encode("the scheduler of the server")
    assert made.decode(ids) == "the scheduler of the server"
    assert 4 <= len(ids) <= 10
    question = [{"role": "user", "content": "the server"}]
    assert made.chat(question, add_generation_prompt=True) == made.encode("the server")


@pytest.mark.slow
def test_bench_alone_is_printed_beside_the_server(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tokenizers")
    main(["--requests", "4", "--rate", "4", "--prompt", "64", "--output", "8"])
    printed = capsys.readouterr().out
    assert re.findall(r"^\| bench \| (\S+)", printed, re.MULTILINE) == [
        *("TTFT", "ITL", "E2E", "tokens/s")
    ]
    assert printed.count(" | +0.00% |\n") == 4
