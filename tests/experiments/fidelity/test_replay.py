"""The promise of the project: simulator and engine plan the same, step by step."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pagedsim.backends.base import StoppableRecorder
from pagedsim.build import POLICIES
from pagedsim.core import ConfigError, PrefixMemory, SamplingParams, Scheduler, Unified
from pagedsim.core.offload import IndexedTier, OffloadConnector
from pagedsim.core.offload.connector import ROUNDS
from pagedsim.engine import drive
from pagedsim.fidelity.engine_model import scheduler_of
from pagedsim.fidelity.recorded import Recorded, recorded_runs
from pagedsim.fidelity.replay import Difference, _Retold, replayed
from pagedsim.metrics.arms import Run
from pagedsim.policies.past_future import PastFuture
from pagedsim.run.job import Job, run_job
from pagedsim.run.store import Tables, recipe_of
from pagedsim.spec.composed import Composed
from pagedsim.spec.run import RunSpec
from pagedsim.user_error import UserError
from tests.experiments.fidelity.test_calibrate import recorded
from tests.run.studies import CONF, carried_out

pytest.importorskip("torch")

AXES = (
    ("fcfs", "priority"),
    ("recompute", "swap", "cheapest"),
    ("prefill_first", "unified", "static"),
    ("paged", "prefix"),
)
COMBINATIONS: list[tuple[str, ...]] = list(product(*AXES))
PAIRS = [
    each
    for each in COMBINATIONS
    if sum(axis.index(name) for axis, name in zip(AXES, each, strict=True)) % 2 == 0
]
"""Half of them, with each pair of names on two axes."""
OTHERS: list[tuple[str, ...]] = [
    (name, preemption, batching, {"lpm": "prefix", "dfs_weight": "radix"}.get(name, "paged"))
    for number, name in enumerate(POLICIES)
    if "session" not in POLICIES[name].needs
    for preemption in (("recompute", "swap")[number % 2 and name != "dfs_weight"],)
    for batching in (("unified", "prefill_first", "one_by_one")[number % 3],)
]
"""Every policy there is, once, but for those that go by sessions, which the engine has not."""
OF_SGLANG: list[tuple[str, ...]] = [
    (name, "recompute", "sglang", memory)
    for name in ("fcfs", "priority", "lpm", "dfs_weight", "lof", "hrrn_tokens", "past_future")
    for memory in ("radix", "paged")
    if memory == "radix" or name != "dfs_weight"
]

pytestmark = pytest.mark.usefixtures("a_small_model")


@cache
def usual() -> Composed:
    """What all configurations have in common."""
    words = [
        *("experiment=record", "backend=engine", "backend.limit=null", "backend.shrink=1"),
        *("backend.hurry=1", "server.max_model_len=40", "workload.requests=10"),
        *("workload.max_len=40", "workload.lengths.shape=uniform"),
        *("+workload.lengths.prompt_min=1", "+workload.lengths.prompt_max=24"),
        *("+workload.lengths.output_min=1", "+workload.lengths.output_max=16"),
        *("workload.priority={0:0.5,1:0.5}", "workload.client={a:0.5,b:0.5}"),
        *("workload.deadline=0.05", "predictor=noisy", "workload.prefixes={tokens:4}"),
    ]
    return Composed.of(words, CONF)


@cache
def base(*combination: str) -> Any:
    """A configuration of these axes."""
    axes = ("policy", "preemption", "batching", "memory")
    words = [f"{axis}={name}" for axis, name in zip(axes, combination, strict=True)]
    return usual().changed(words).resolved(missing=True)


def drawn(rng: random.Random, *combination: str, ahead: bool = False) -> dict[str, Any]:
    """Requests of up to 40 tokens on a pool that holds hardly one and a half of them.

    `ahead`: steps are planned while the one before runs.
    """
    config = deepcopy(base(*combination))
    workload: dict[str, Any] = rng.choice(
        (
            {"arrivals": "closed", "users": 3, "think_time": rng.choice((0.0, 0.01))},
            {"arrivals": "gamma", "cv": 3.0, "rate": 400.0},
            {"arrivals": "poisson", "rate": rng.choice((30.0, 100.0, 1000.0))},
            {"arrivals": "burst"},
        )
    )
    config["workload"] |= workload
    config["memory"] |= {"block_size": rng.choice((1, 4, 8)), "cpu_blocks": rng.choice((1, 3, 20))}
    config["backend"] |= {"cache_tokens": rng.choice((48, 64, 96))}
    config["server"] |= {
        "max_seqs": rng.choice((3, 8)),
        "max_batched_tokens": rng.choice((48, 64)),
        "async_scheduling": ahead,
    }
    return dict(config)


def drawn_for_sglang(rng: random.Random, *combination: str, ahead: bool) -> dict[str, Any]:
    """The same with settings under which SGLang's batching cuts prompts, retracts and displaces."""
    config = drawn(rng, *combination, ahead=ahead)
    config["workload"] |= {"requests": 16, "priority": {0: 0.3, 1: 0.3, 2: 0.4}}
    if rng.random() < 0.5:
        load = {"arrivals": "closed", "users": 8, "think_time": 0.0, "cv": None}
    else:
        load = {"arrivals": "poisson", "rate": 200.0, "users": None, "think_time": None, "cv": None}
    config["workload"] |= load
    config["workload"]["lengths"] |= {"prompt_max": 12, "output_min": 12, "output_max": 24}
    # Memory for few requests, or few seats, for which requests of high priority preempt others.
    tokens, config["server"]["max_seqs"] = rng.choice(((96, 8), (128, 8), (256, 3), (256, 3)))
    config["backend"]["cache_tokens"] = tokens
    chunk = rng.choice((8, 8, 16, None))
    config["batching"] |= {
        "chunked_prefill_size": chunk,
        "mixed_chunk": chunk is not None and rng.random() < 0.5,
        "conservativeness": rng.choice((0.0, 0.0, 0.0, 1.0)),
        "prefill_max_requests": rng.choice((None, None, 2)),
        "preemption_threshold": rng.choice((0, 0, 10)),
        "retraction": rng.choice(("length", "rank")),
    }
    return config


def record(folder: Path, config: dict[str, Any], seed: int = 0) -> Recorded:
    job = Job("run", seed, config, folder / f"runs/run/seed-{seed}")
    made_of = recipe_of(job)
    run = run_job(job, StoppableRecorder())
    assert isinstance(run, Run), run
    Tables().store(job, made_of, run)
    (recorded,) = (one for one in recorded_runs(str(folder)) if one.seed == seed)
    return recorded


EVERY = [
    pytest.param(
        *(combination, ahead),
        id="-".join((*combination, "ahead" if ahead else "in turn")),
        marks=() if combination in PAIRS or number % 3 == 0 else pytest.mark.slow,
    )
    for some, ways in ((PAIRS, 1), (OTHERS, 2))
    for number, combination in enumerate(some)
    for ahead in ((number % 2 == 0), (number % 2 > 0))[:ways]
]
"""Each pair of names in one of the two ways; a third of the other policies is quick."""


either_way = pytest.mark.parametrize("ahead", [False, True], ids=["in turn", "ahead"])


@pytest.mark.parametrize(("combination", "ahead"), EVERY)
def test_the_simulator_plans_what_the_engine_planned(
    combination: tuple[str, ...], ahead: bool, tmp_path: Path
) -> None:
    rng = random.Random("-".join(combination))
    run = record(tmp_path, drawn(rng, *combination, ahead=ahead))
    assert run.steps.num_rows > 5
    assert replayed(run) is None


@either_way
@pytest.mark.parametrize(("policy", "seed"), [("vtc", 24), ("vtc", 45), ("drr", 36), ("drr", 93)])
def test_fair_policies_with_arrivals_during_a_step(
    policy: str, seed: int, ahead: bool, tmp_path: Path
) -> None:
    """A new client is lifted to the least served one, and a step may change which that is."""
    combination = (policy, "recompute", ("one_by_one", "unified")[seed % 2], "paged")
    rng = random.Random(f"{combination} {seed}")
    assert replayed(record(tmp_path, drawn(rng, *combination, ahead=ahead), seed)) is None


@either_way
@pytest.mark.parametrize(
    ("preemption", "batching", "memory"),
    [
        ("recompute", "prefill_first", "paged"),
        ("recompute", "unified", "prefix"),
        ("swap", "unified", "paged"),
        ("swap", "prefill_first", "prefix"),
    ],
)
def test_groups_of_sequences_are_planned_alike(
    preemption: str, batching: str, memory: str, ahead: bool, tmp_path: Path
) -> None:
    rng = random.Random(preemption)
    config = drawn(rng, "fcfs", preemption, batching, memory, ahead=ahead)
    config["workload"]["n"] = 2
    config["backend"]["cache_tokens"] = 96
    run = record(tmp_path, config)
    assert max(run.requests["sequences"].to_pylist()) == 2
    assert replayed(run) is None


def test_beams_share_memory_and_cannot_be_replayed(tmp_path: Path) -> None:
    config = drawn(random.Random(1), "fcfs", "recompute", "unified", "paged")
    config["workload"]["beam"] = 3
    config["backend"]["cache_tokens"] = 128
    run = record(tmp_path, config)
    assert max(run.steps["shared_blocks"].to_pylist()) > 0
    with pytest.raises(ConfigError, match="beam searches cannot be replayed"):
        replayed(run)


@pytest.mark.slow
@either_way
@pytest.mark.parametrize("seed", range(7))
def test_five_hundred_times(seed: int, ahead: bool, tmp_path: Path) -> None:
    """7 × 36 × 2 = 504 runs, in most of which requests are preempted."""
    preempted = 0
    for combination in COMBINATIONS:
        name = "-".join(combination)
        config = drawn(random.Random(f"{name} {seed}"), *combination, ahead=ahead)
        run = record(tmp_path / name, config, seed)
        assert replayed(run) is None, name
        preempted += sum(run.requests["preemptions"].to_pylist()) > 0
    assert preempted > 12


def replayed_to_its_ends(run: Recorded, monkeypatch: pytest.MonkeyPatch) -> Difference | None:
    """Replay a run whose answers ended with the tokens that they ended with."""
    ids, tokens = (run.requests[name].to_pylist() for name in ("request", "output_ids"))
    outputs = dict(zip(ids, tokens, strict=True))
    lengths = np.array([len(outputs[number]) for number in sorted(outputs)])
    whole = RunSpec(run.config, run.seed).workload()
    with monkeypatch.context() as patched:
        patched.setattr(RunSpec, "workload", lambda _: replace(whole, output_len=lengths))
        return replayed(run)


QUICK = [(*one, number % 2 > 0) for number, one in enumerate(OF_SGLANG[1::2])]


@pytest.mark.parametrize("case", QUICK, ids=lambda case: f"{case[0]}-{case[3]}-{case[4]}")
def test_sglang_plans_the_same(case: tuple[Any, ...], tmp_path: Path) -> None:
    *combination, ahead = case
    config = drawn_for_sglang(random.Random(str(case)), *combination, ahead=ahead)
    assert replayed(record(tmp_path, config)) is None


@pytest.mark.slow
@pytest.mark.parametrize("stops", [False, True], ids=["by length", "by token"])
@either_way
def test_sglang_a_hundred_times(
    ahead: bool, stops: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """4 × 26 runs. Answers end where the workload says, or with one token in eight."""
    if stops:
        from tests.engine.architectures import VOCAB

        params = SamplingParams(temperature=0.0, stop_token_ids=tuple(range(0, VOCAB, 8)))
        monkeypatch.setattr(drive, "_greedy", lambda _: params)
    plans: list[str] = []
    ends: set[str] = set()
    for seed, combination in enumerate(OF_SGLANG * 2):
        name = f"{'-'.join(combination)}-{seed}"
        config = drawn_for_sglang(random.Random(f"{name} {ahead}"), *combination, ahead=ahead)
        if stops:  # such answers are short and seldom fill a pool
            config["backend"]["cache_tokens"], config["server"]["max_seqs"] = 56, 8
            config["batching"] |= {"conservativeness": 0.0, "prefill_max_requests": None}
            crowd = {"arrivals": "closed", "users": 8, "think_time": 0.0, "rate": None}
            config["workload"] |= crowd
        run = record(tmp_path / name, config, seed)
        assert (replayed_to_its_ends(run, monkeypatch) if stops else replayed(run)) is None, name
        plans += run.steps["plan"].to_pylist()
        ends.update(run.requests["reason"].to_pylist())
    for event in ("preempted", "hits", "decodes"):
        assert any(event in plan for plan in plans), event
    assert any("chunks" in plan and "decodes" in plan for plan in plans)
    assert ("stop" in ends) == stops


def drawn_with_host_tier(
    rng: random.Random, memory: str, ahead: bool, folder: Path
) -> dict[str, Any]:
    """Prompts with common beginnings on a pool that forgets them, above a tier that has them, and
    perhaps one of files."""
    if memory == "radix":
        combination = (rng.choice(("fcfs", "lpm")), "recompute", "sglang", memory)
        config = drawn_for_sglang(rng, *combination, ahead=ahead)
        prefixes = {"tokens": rng.choice((12, 16)), "count": rng.choice((3, 6))}
        config["workload"] |= {"requests": 30, "prefixes": prefixes}
        config["batching"]["conservativeness"] = 1.0
        config["offload"] = {
            "_target_": "pagedsim.sglang.HiCacheOffload",
            "blocks": rng.choice((20, 60, 200)) // config["memory"]["block_size"],
            "write_policy": rng.choice(("write_through", "write_through_selective", "write_back")),
        }
        return config
    policy = rng.choice(("fcfs", "priority"))
    config = drawn(rng, policy, "recompute", "unified", memory, ahead=ahead)
    config["memory"]["cpu_blocks"] = None
    config["workload"] |= {"requests": 20, "prefixes": {"tokens": rng.choice((8, 16))}}
    config["offload"] = {
        "_target_": "pagedsim.core.offload.VLLMOffload",
        "chunks": rng.choice((4, 20, 100)),
        "chunk_tokens": config["memory"]["block_size"] * rng.choice((1, 1, 2)),
        "eviction": rng.choice(("lru", "arc")),
        "store_threshold": rng.choice((0, 0, 2)),
        "prompt_only": rng.random() < 0.3,
        "sync_tokens": rng.choice((0, 0, 16)),
    }
    if rng.random() < 0.5:
        config["offload"] |= {"store_threshold": 0, "protect_promoted": True}
        config["offload"]["tiers"] = {"disk": {"folder": str(folder / "files")}}
    return config


@pytest.mark.parametrize("seed", [pytest.param(0), pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("memory", ["paged", "prefix", "radix"])
@either_way
def test_with_a_host_tier(
    ahead: bool, memory: str, seed: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """2 × 2 runs of each memory, and 100 of each connector that are slow; copies end late, also in
    pauses."""
    plans: list[str] = []
    awaited = 0
    for number in range((50 if memory == "radix" else 25) if seed else 2):
        name = f"{memory} {ahead} {seed} {number}"
        rng = random.Random(name)
        slow_copies(rng, monkeypatch)
        config = drawn_with_host_tier(rng, memory, ahead, tmp_path / name)
        run = record(tmp_path / name, config, number)
        assert replayed(run) is None, name
        plans += run.steps["plan"].to_pylist()
        awaited += sum(map(len, run.steps["awaited"].to_pylist()))
    assert awaited or not seed
    for event in ("stores", "loads", "flushed")[: 3 if seed else 1]:
        assert any(event in plan for plan in plans), event


def slow_copies(rng: random.Random, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies of engines that are made within the test end late."""
    from pagedsim.engine import runner
    from pagedsim.engine.host_copies import HostCopies
    from tests.engine.test_cache_memory import SlowBus

    haste = rng.choice((0.02, 0.1, 0.5))

    def late(cache: Any, layout: str) -> HostCopies:
        return HostCopies(cache, layout, (SlowBus(rng, haste), SlowBus(rng, haste)))

    monkeypatch.setattr(runner, "HostCopies", late)


def test_the_first_difference_is_reported_with_both_plans(tmp_path: Path) -> None:
    record(tmp_path, drawn(random.Random(1), *COMBINATIONS[0]))
    file = tmp_path / "runs/run/seed-0/steps.parquet"
    table = pq.read_table(file)
    plans = table["plan"].to_pylist()
    wanted, plans[3] = plans[3], "decodes 99; free 1; queues 0 0"
    place = table.column_names.index("plan")
    pq.write_table(table.set_column(place, "plan", pa.array(plans)), file)
    with pytest.raises(UserError) as error:
        carried_out(tmp_path / "out", "experiment=replay", f"run={tmp_path}")
    assert "step 3 of" in str(error.value)
    assert "engine:    decodes 99; free 1" in str(error.value)
    assert f"simulator: {wanted}" in str(error.value)
    assert (tmp_path / "out/result.json").is_file()


def test_a_study_of_several_runs(tmp_path: Path) -> None:
    config = drawn(random.Random(2), *COMBINATIONS[7])
    steps = sum(record(tmp_path, config, seed).steps.num_rows for seed in (0, 1))
    found = carried_out(tmp_path / "out", "experiment=replay", f"run={tmp_path}")
    assert found["finding"] == [
        f"All {steps} steps of 2 runs were planned by the simulator as by the engine."
    ]


def test_what_a_policy_draws_goes_by_the_seed_of_the_run(tmp_path: Path) -> None:
    config = drawn(random.Random(1), "past_future", "recompute", "unified", "paged")
    run = record(tmp_path, config, 7)
    policy = scheduler_of(RunSpec(run.config, run.seed), run.machine, Scheduler).policy
    assert isinstance(policy, PastFuture) and policy.seed == 7


def test_files_that_changed_since_are_found(tmp_path: Path) -> None:
    run = record(tmp_path, drawn(random.Random(1), *COMBINATIONS[0]))
    assert run.changed == []
    made = run.folder / "run.json"
    recipe = json.loads(made.read_text())
    recipe |= {"simulator": "another", "files": {}}
    recipe["config"]["workload"]["seed_of_lengths"] = {"path": "lengths.csv"}
    made.write_text(json.dumps(recipe))
    (other,) = recorded_runs(str(tmp_path))
    assert other.changed == ["pagedsim's own code"]
    (tmp_path / "lengths.csv").write_text("1,2")
    recipe["config"]["workload"]["seed_of_lengths"]["path"] = str(tmp_path / "lengths.csv")
    made.write_text(json.dumps(recipe))
    (other,) = recorded_runs(str(tmp_path))
    assert other.changed == ["pagedsim's own code", str(tmp_path / "lengths.csv")]


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of a run, without the engine."""
    return recorded(tmp_path_factory.mktemp("left") / "run", 20)


def edited(file: str, *keys: str, value: Any = None) -> Callable[[Path], object]:
    """Another value in one of a run's files; None: nothing there."""

    def edit(folder: Path) -> None:
        whole = inner = json.loads((folder / file).read_text())
        for key in keys[:-1]:
            inner = inner[key]
        inner[keys[-1]] = value
        if value is None:
            del inner[keys[-1]]
        (folder / file).write_text(json.dumps(whole))

    return edit


def written(file: str, content: bytes | None) -> Callable[[Path], object]:
    """Other content of a file; None: no file."""
    if content is None:
        return lambda folder: (folder / file).unlink()
    return lambda folder: (folder / file).write_bytes(content)


SIMULATED = {"_target_": "pagedsim.backends.sim.Simulated"}


@pytest.mark.parametrize(
    ("edit", "line"),
    [
        (written("run.json", None), "run={0}: holds no complete run"),
        (written("summary.json", None), "{1}/summary.json: is missing, so the run is not whole"),
        (written("requests.parquet", b""), "{1}/requests.parquet: is no parquet file, or not "),
        (written("run.json", b"[1]"), "{1}/run.json: must hold an object, not [1]"),
        (written("run.json", b"\xff{"), "{1}/run.json: is not JSON, or not whole: "),
        (edited("run.json", "version", value="0.0.1"), "{1}: was recorded by pagedsim 0.0.1, and "),
        (edited("run.json", "seed", value="x"), "{1}/run.json: seed='x': must be a whole number"),
        (edited("run.json", "config", "policy"), "{1}/run.json: config has no settings of policy"),
        (edited("summary.json", "machine"), "{1}/summary.json: has no facts of the machine that "),
        (edited("summary.json", "machine", "device"), "{1}/summary.json: machine.device=None: mus"),
        (edited("summary.json", "machine", "blocks", value=0), "{1}/summary.json: machine.blocks="),
    ],
)
def test_unreadable_runs_are_refused(
    edit: Callable[[Path], object], line: str, left: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "runs/a"
    shutil.copytree(left, folder)
    assert len(recorded_runs(str(tmp_path))) == 1
    edit(folder)
    with pytest.raises(ConfigError) as error:
        recorded_runs(str(tmp_path))
    assert str(error.value).startswith(line.format(tmp_path, folder))
    assert "\n" not in str(error.value)


def test_simulated_runs_are_not_taken(left: Path, tmp_path: Path) -> None:
    folder = tmp_path / "runs/a"
    shutil.copytree(left, folder)
    edited("run.json", "config", "backend", value=SIMULATED)(folder)
    edited("summary.json", "machine")(folder)
    with pytest.raises(ConfigError, match="holds simulated runs only; experiment=record backend="):
        recorded_runs(str(tmp_path))


def test_what_no_simulator_can_repeat_is_refused(tmp_path: Path) -> None:
    run = record(tmp_path, drawn(random.Random(1), *COMBINATIONS[0]))
    for fact, line in (
        ("failed_copies", "3 of its copies failed"),
        ("failed_steps", "3 of its steps failed"),
    ):
        edited("summary.json", "machine", fact, value=3)(run.folder)
        (again,) = recorded_runs(str(tmp_path))
        with pytest.raises(ConfigError, match=f"{run.folder}: {line}"):
            replayed(again)


def test_a_replay_protects_promotions_when_the_engine_did() -> None:
    connector = OffloadConnector(4, tiers=[IndexedTier()])
    scheduler = _Retold(memory=PrefixMemory(4, 4), batching=Unified(), connector=connector)
    connector._rounds = ROUNDS
    scheduler.plan(0.0)
    assert connector.lower.protecting and not connector.promotes_for_ever


@pytest.mark.parametrize(
    ("file", "column", "values", "line"),
    [
        ("steps.parquet", "plan", None, "/steps.parquet: has no column plan"),
        ("requests.parquet", "output_ids", [], ": requests.parquet has 0 tokens in output_ids of"),
    ],
)
def test_incomplete_tables_are_refused(
    file: str, column: str, values: list[int] | None, line: str, tmp_path: Path
) -> None:
    run = record(tmp_path, drawn(random.Random(1), *COMBINATIONS[0]))
    table = pq.read_table(run.folder / file)
    place, kind = table.column_names.index(column), table.schema.field(column).type
    table = table.remove_column(place)
    if values is not None:
        table = table.append_column(column, pa.array([values] * table.num_rows, kind))
    pq.write_table(table, run.folder / file)
    with pytest.raises(ConfigError) as error:
        carried_out(tmp_path / "out", "experiment=replay", f"run={tmp_path}")
    assert str(error.value).startswith(f"{run.folder}{line}")


def test_a_missing_folder_is_refused(tmp_path: Path) -> None:
    for run, line in (("null", "run: must be given"), ("''", "run=: no such folder")):
        with pytest.raises(ConfigError, match=line):
            carried_out(tmp_path, "experiment=replay", f"run={run}")
