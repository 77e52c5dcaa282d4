"""A study's runs on the engine: what is served, recorded and refused."""

from __future__ import annotations

import json
import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pagedsim.backends import engine as serving
from pagedsim.backends.base import StoppableRecorder
from pagedsim.backends.engine import ModelCache, Serving, the_machine
from pagedsim.core import ConfigError
from pagedsim.fidelity.engine_model import replica_of
from pagedsim.metrics.arms import Run
from pagedsim.run.job import Failure, Interrupted, Job, run_job
from pagedsim.run.parts import build
from pagedsim.server import CACHE_DTYPES
from pagedsim.spec.run import RunSpec
from tests.run.studies import Impatient, settings_of
from tests.workload.files import MOONCAKE, written

# -- a study's runs on the engine: what is served, what is recorded, what is refused ---------------


pytest.importorskip("torch")

QUICK = (
    *(
        "backend=engine",
        "workload.rate=100",
        "backend.limit=8",
        "backend.shrink=16",
        "backend.hurry=1",
    ),
    *("memory.block_size=4", "memory.blocks=64", "server.max_model_len=160"),
)


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """For other engines on this machine: no time matters here."""
    monkeypatch.setattr(serving, "the_machine", nullcontext)


def configured(*overrides: str) -> dict[str, Any]:
    return settings_of("experiment=single", *QUICK, *overrides)


def job(folder: Path, *overrides: str) -> Job:
    return Job("a", 0, configured(*overrides), folder / "runs/a/seed-0")


class Served(NamedTuple):
    """What a run left in its folder."""

    requests: pa.Table
    steps: pa.Table
    summary: dict[str, Any]


def run(folder: Path, *overrides: str) -> Served:
    outcome = run_job(job(folder, *overrides), StoppableRecorder())
    assert isinstance(outcome, Run), outcome
    return left(outcome.folder)


def left(folder: Path) -> Served:
    return Served(
        pq.read_table(folder / "requests.parquet"),
        pq.read_table(folder / "steps.parquet"),
        json.loads((folder / "summary.json").read_text()),
    )


def test_the_engine_serves_what_the_simulator_would(tmp_path: Path) -> None:
    """The same requests, each with its lengths; shorter and fewer, and the report says so."""
    served = run(tmp_path)
    workload = build(configured(), seed=0).workload
    requests = served.requests.sort_by("request")
    assert set(requests["state"].to_pylist()) == {"finished"}
    assert requests["prompt_tokens"].to_pylist() == workload.prompt_len.tolist()
    assert requests["output_tokens"].to_pylist() == workload.output_len.tolist()
    assert len(workload) == 8
    assert "16 times shorter" in str(served.summary["notices"])
    simulated = build({**configured(), "backend": SIMULATED}, seed=0).workload
    first = simulated.prompt_len[:8] // 16
    assert workload.prompt_len.tolist() == np.maximum(first, 1).tolist()


def test_arrivals_hurry_and_deadlines_stay_as_far(tmp_path: Path) -> None:
    plain, quick = (
        build(configured("workload.deadline=5", f"backend.hurry={hurry}"), seed=0).workload
        for hurry in (1, 4)
    )
    assert quick.arrival.tolist() == (plain.arrival / 4).tolist()
    assert np.allclose(quick.deadline - quick.arrival, plain.deadline - plain.arrival)


SIMULATED = {"_target_": "pagedsim.backends.sim.Simulated"}


def test_the_tables_of_a_run(tmp_path: Path) -> None:
    served = run(tmp_path, "preemption=swap", "memory.cpu_blocks=32")
    steps = served.steps
    lasted = steps["end"].to_numpy() - steps["start"].to_numpy()
    parts = [steps[f"{part}_seconds"].to_numpy() for part in ("feed", "plan", "launch", "sample")]
    assert np.allclose(sum(parts), lasted)
    ends, starts = steps["end"].to_numpy()[:-1], steps["start"].to_numpy()[1:]
    assert (starts >= ends).all()
    assert np.count_nonzero(starts == ends) > len(starts) / 2  # no gap where it was busy
    assert (steps["commit_seconds"].to_numpy() > 0).all()
    machine = served.summary["machine"]
    assert machine["model"] == "tiny"
    assert (machine["blocks"], machine["block_size"], machine["cpu_blocks"]) == (64, 4, 32)
    assert machine["threads"] == 1
    assert "mfu" not in served.summary or served.summary["mfu"] is None


def test_keys_and_values_in_8_bits(tmp_path: Path) -> None:
    """The same key acts on either backend, and a run says what it had."""
    plain, half = run(tmp_path / "auto"), run(tmp_path / "fp8", "kv_cache_dtype=fp8")
    machines = [one.summary["machine"] for one in (plain, half)]
    assert [one["kv_cache_dtype"] for one in machines] == ["auto", "fp8_e4m3"]
    assert machines[0]["block_bytes"] == 4 * machines[1]["block_bytes"]  # the tiny one has float32
    twins = [replica_of(configured(), one) for one in machines]
    assert [one.kv_format for one in twins] == ["auto", "fp8_e4m3"]
    blocks = []
    for name in ("auto", "fp8_e5m2"):
        words = f"kv_cache_dtype={name}", "memory.blocks=null", "memory.block_size=16"
        settings = {**configured(*words), "backend": SIMULATED}
        blocks.append(RunSpec(settings).prepare().scheduler.memory.total)
    assert blocks[1] // 2 == blocks[0]


def test_both_backends_know_the_same_formats() -> None:
    from pagedsim.kernels.float8 import AUTO, FORMATS

    assert (AUTO, "fp8", *FORMATS) == CACHE_DTYPES


def test_cheapest_gets_prices_of_this_machine(tmp_path: Path) -> None:
    served = run(tmp_path, "preemption=cheapest", "memory.blocks=40", "memory.cpu_blocks=40")
    prices = served.summary["machine"]["prices"]
    for base, each in prices.values():  # seconds, and seconds a token or block
        assert base >= 0
        assert each >= 0
        assert base + each > 0
    assert set(served.requests["state"].to_pylist()) == {"finished"}


@pytest.mark.parametrize(
    ("batching", "preemption"),
    [
        ("prefill_first", "swap"),
        ("unified", "recompute"),
        ("static", "recompute"),
    ],
)
def test_every_axis(batching: str, preemption: str, tmp_path: Path) -> None:
    """Twelve blocks of four tokens for requests of up to 40: requests are preempted."""
    served = run(
        tmp_path, f"batching={batching}", f"preemption={preemption}", "policy=priority",
        "memory.blocks=14", "server.max_model_len=56", "workload.arrivals=burst",
    )  # fmt: skip
    assert "finished" in served.requests["state"].to_pylist()
    if batching != "static":
        assert served.summary["preemptions"] > 0
        rows = pq.read_table(tmp_path / "runs/a/seed-0/preemptions.parquet").to_pylist()
        finished = {one["request"]: one["finished"] for one in served.requests.to_pylist()}
        assert len(rows) == served.summary["preemptions"]
        assert {row["how"] for row in rows} <= {"recompute", preemption}
        for row in rows:  # all of them are served to their end
            assert row["time"] <= row["back_at"] < finished[row["request"]]


def test_a_model_by_its_shape_gets_random_weights(tmp_path: Path) -> None:
    shape = (
        "backend.model=null",
        "model=tiny",
        "model.name=mini",
        "model.layers=1",
        "model.hidden=64",
        "model.head_dim=8",
    )
    served = run(tmp_path, *shape, "backend.dtype=float32")
    assert served.summary["machine"]["model"] == "mini, random weights"
    assert set(served.requests["state"].to_pylist()) == {"finished"}


@pytest.mark.parametrize(
    ("words", "served"),
    [
        ((), "tiny"),
        (("model=smollm2", "scale=full"), "smollm2"),
        (("model=tiny", "scale=full"), "tiny"),
        (("model=hf", "model.config=nowhere/config.json", "scale=full"), "nowhere"),
        (("model=opt-13b", "scale=full"), "opt-13b, random weights"),
    ],
)
def test_which_model_is_served(words: tuple[str, ...], served: str) -> None:
    config = configured(*words)
    stage = RunSpec(config).prepare()
    assert isinstance(stage, Serving) and stage.name == served


def test_a_run_that_is_stopped_leaves_what_it_has(tmp_path: Path) -> None:
    outcome = run_job(job(tmp_path), Impatient(5))
    assert isinstance(outcome, Interrupted)
    assert outcome.folder is not None
    requests, steps, summary = left(outcome.folder)
    assert steps.num_rows == 5
    assert "unfinished" in requests["state"].to_pylist()
    assert summary["partial"]


def test_a_failed_step_is_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pagedsim.engine.runner import Runner

    carry_out, calls = Runner.carry_out, iter(range(1000))

    def fails_once(self: Runner, *work: Any) -> Any:
        if next(calls) == 4:
            raise RuntimeError("a bad day")
        return carry_out(self, *work)

    monkeypatch.setattr(Runner, "carry_out", fails_once)
    served = run(tmp_path, "server.max_seqs=2")  # so that it ends two of them at most
    told = str(served.summary["notices"])
    assert "steps failed and ended their requests; the first: RuntimeError: a bad day" in told
    states = served.requests["state"].to_pylist()
    assert "aborted" in states
    assert "finished" in states


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (
            ("memory=reserved_max",),
            "memory=reserved_max: backend=engine has paged, prefix, radix",
        ),
        (
            ("tensor_parallel=2", "backend.clock=cpu"),
            "backend.clock=cpu: must be wall with tensor_parallel=2",
        ),
        (
            ("backend.load_format=dumy",),
            "backend.load_format=dumy: unknown; did you mean 'dummy'? choose",
        ),
        (
            ("backend.model=null", "model=mixtral-8x7b", "+model.moe.shared_experts=1"),
            "model=mixtral-8x7b: no model with random weights has its shape",
        ),
    ],
)
def test_invalid_settings(overrides: tuple[str, ...], line: str, tmp_path: Path) -> None:
    outcome = run_job(job(tmp_path, *overrides), StoppableRecorder())
    assert isinstance(outcome, Failure)
    assert outcome.expected
    assert outcome.reason.startswith(line)


def test_a_shared_beginning_is_as_much_shorter_as_the_prompts(tmp_path: Path) -> None:
    words = ("+workload.prefixes.tokens=64",)
    shorter, whole = (
        RunSpec(config).workload()
        for config in (configured(*words), configured(*words, "backend.shrink=1"))
    )
    assert shorter.prompts is not None and whole.prompts is not None
    for row in range(len(whole)):
        ours, theirs = shorter.prompts[row], whole.prompts[row]
        assert theirs.runs[0][1] == 64 and ours.runs[0] == (theirs.runs[0][0], 4)
        assert len(ours) == shorter.prompt_len[row] == len(theirs) // 16


def test_what_requests_ask_for_is_as_much_shorter_as_their_answers() -> None:
    made = RunSpec(configured("++workload.max_tokens=exact")).workload()
    assert all(request.max_tokens == output for request, output in made.requests())


def test_the_blocks_of_a_trace_are_as_long_as_they_are(tmp_path: Path) -> None:
    path = written(tmp_path, MOONCAKE)
    words = ["experiment=single", *QUICK, "workload=mooncake", f"workload.path={path}"]
    config = settings_of(*(word for word in words if "rate" not in word))
    with pytest.raises(ConfigError, match=r"backend\.shrink=16: must be 1 where prompts are b"):
        RunSpec(config).workload()


def test_errors_name_settings_of_the_command_line(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    folder = tmp_path / "model"
    transformers.LlamaConfig(num_hidden_layers=1).save_pretrained(folder)
    outcome = run_job(job(tmp_path, f"backend.model={folder}"), StoppableRecorder())
    assert isinstance(outcome, Failure) and outcome.expected
    assert outcome.reason.endswith("; backend.load_format=dummy makes random ones")


def test_one_engine_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second one waits, and gives up waiting when it is asked to stop."""
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    asked = iter([False, False, True])
    with the_machine(lambda: False), the_machine(lambda: next(asked)):
        pass
    assert next(asked, None) is None
    with the_machine(lambda: False):  # free again
        pass


# -- a study loads its model once, not once a run --------------------------------------------------


torch = pytest.importorskip("torch")


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was loaded."""
    from pagedsim.engine import assemble

    seen: list[Any] = []

    def load(model: Any, **settings: Any) -> Any:
        seen.append(settings["seed"])
        if settings["seed"] == 99:
            raise ConfigError("nowhere to be found")
        return object()

    monkeypatch.setattr(assemble, "load_model", load)
    return seen


def arguments(model: Any = "tiny", **settings: Any) -> Any:
    from pagedsim.engine.engine_args import Arguments

    return Arguments.of(model=model, device="cpu", **settings)


def test_a_model_is_loaded_once_while_it_is_the_same(loads: list[Any]) -> None:
    keeper = ModelCache()
    first = keeper.model(arguments(block_size=8))
    assert keeper.model(arguments(block_size=16, policy="priority")) is first
    other = keeper.model(arguments(seed=1))
    assert other is not first
    assert keeper.model(arguments()) not in (first, other)
    assert loads == [0, 1, 0]


# -- a study over several processes of one model ---------------------------------------------------


pytest.importorskip("torch")
