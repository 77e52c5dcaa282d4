"""What a run of a fleet leaves."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pagedsim.core import ConfigError, Request
from pagedsim.metrics.files import read_summary
from pagedsim.metrics.recorder import Recorder
from tests.run.studies import carried_out, run_of

WORDS = ("experiment=single", "workload.requests=60", "workload.rate=40", "seeds=1")
POOLS = (
    'fleet.pools={fast: {replicas: 2, set: ["hardware=h100"]}, '
    'slow: {replicas: 1, set: ["memory.block_size=32", "tensor_parallel=2"]}}'
)


def test_its_summary_has_a_row_a_replica(tmp_path: Path) -> None:
    run = run_of(tmp_path, WORDS, (POOLS,))
    rows = read_summary(run.folder)["replicas"]
    named = [(row["name"], row["pool"], row["role"], row["hardware"]) for row in rows]
    assert named == [
        ("fast-0", "fast", "both", "h100"),
        ("fast-1", "fast", "both", "h100"),
        ("slow-0", "slow", "both", "2 × a100-80gb"),
    ]
    requests, steps = run.requests(), run.steps()
    assert [row["requests"] for row in rows] == np.bincount(requests["replica"]).tolist()
    for name in ("prompt_tokens", "output_tokens", "preemptions"):
        assert sum(row[name] for row in rows) == np.sum(requests[name].to_numpy())
    computed = steps["prefill_tokens"].to_numpy() + steps["decode_seqs"].to_numpy()
    each = np.bincount(steps["replica"], computed)
    assert [row["computed_tokens"] for row in rows] == each.tolist()
    assert run.summary["load_imbalance"] == each.max() / each.mean()
    assert np.isnan(run.summary["block_size"])


def test_a_rejected_request_was_at_no_replica() -> None:
    recorder = Recorder()
    replicas = [recorder.add_replica() for _ in range(2)]
    leave = [replicas[1].left, recorder.left, replicas[0].left]
    for number, left in enumerate(leave):
        left(Request(number, 4))
    assert recorder.requests_table()["replica"].to_pylist() == [1, -1, 0]


def test_a_study_of_one_server_takes_no_fleet(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^fleet\.replicas=2: this experiment asks what one"):
        carried_out(tmp_path, "experiment=paper_fig13", "fleet.replicas=2")


def test_transfers_are_in_the_summary(tmp_path: Path) -> None:
    run = run_of(tmp_path, WORDS, ("fleet=prefill_decode",))
    moved = run.requests("came_from")["came_from"]
    told = run.summary["transfers"]
    assert told["transfers"] == len(moved) - moved.null_count == 60
    cache = 2 * 32 * 4096 * 2  # keys and values of 32 layers, 4,096 values of 2 bytes each
    assert told["bytes"] == cache * run.requests("prompt_tokens")["prompt_tokens"].to_numpy().sum()
    assert told["migrations"] == 0
    # As many bytes leave two GPUs, each over a link of its own.
    parallel = run_of(tmp_path / "two", WORDS, ("fleet=prefill_decode", "tensor_parallel=2"))
    both = parallel.summary["transfers"]
    assert both["bytes"] == told["bytes"] and 2 * both["busy_s"] == pytest.approx(told["busy_s"])
    prefill, decode = run.replicas
    assert (
        prefill["prompt_tokens"] == run.requests("prompt_tokens")["prompt_tokens"].to_numpy().sum()
    )
    assert (decode["prompt_tokens"], prefill["output_tokens"]) == (0, 0)


def test_answers_are_cut_at_the_limit_of_their_pool(tmp_path: Path) -> None:
    decode = 'fleet.pools.decode.set=["server.max_model_len=256"]'
    run = run_of(tmp_path, WORDS, ("fleet=prefill_decode", decode))
    table = run.requests("prompt_tokens", "output_tokens", "state")
    prompts, outputs = (table[name].to_numpy() for name in table.column_names[:2])
    refused = table["state"].to_numpy() == "rejected"
    assert (refused == (prompts > 256)).all() and (prompts + outputs <= 257)[~refused].all()
    told = {one["what"]: one["count"] for one in run.summary["notices"]}
    assert told.pop("requests were rejected") == refused.sum() > 0
    (what,) = (what for what in told if "cut" in what)
    assert what == "answers were cut at max_model_len=256 tokens (fleet.pools: decode)"
    assert run.summary["finished"] == (~refused).sum()


def test_a_study_shows_it(tmp_path: Path) -> None:
    words = ("experiment=single", "workload.requests=20", "seeds=1", "fleet.replicas=2")
    carried_out(tmp_path, *words)
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    for told in ("<h2>Replicas</h2>", "replica-1", "Requests at each replica"):
        assert told in page
    assert "<dt>Load imbalance</dt>" in page and "<dt>Imbalance over time</dt>" in page
    assert "replica-1" in (tmp_path / "timeline.json").read_text(encoding="utf-8")
