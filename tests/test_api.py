"""Experiments from Python: what the command does, with its checks and without Hydra."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import pagedsim as ps
from pagedsim import api
from pagedsim.core import (
    ConfigError,
    PagedsimError,
    PolicyWrapper,
    PrefixMemory,
    Request,
    ServerState,
    StepPlan,
    Unified,
)
from pagedsim.core.batching.base import AdmissionChanges
from pagedsim.core.policy import RankChanges
from pagedsim.policies.routing.simple import Uniform
from pagedsim.spec.roots import Server
from pagedsim.spec.words import parse, text_of

SMALL: dict[str, Any] = {
    "workload": ps.synthetic(rate=4.0, requests=40),
    "seeds": 2,
    "jobs": 1,
}


class Longest(ps.Policy):
    """Longest prompts first, scaled by its setting."""

    rank_changes: RankChanges = "never"

    def __init__(self, factor: float = 1.0) -> None:
        self.factor = factor

    def rank(self, request: Request, state: ServerState) -> float:
        return -self.factor * request.prompt_len


def test_arms_are_names_objects_and_classes() -> None:
    result = ps.compare(
        policy={"fcfs": "fcfs", "object": Longest(2.0), "class": Longest},
        metrics=["ttft", "e2e_p99"],
        baseline="class",
        gpu="h100",
        model="llama-3.1-8b",
        memory=ps.option("prefix", block_size=32),
        server={"max_seqs": 2},
        **SMALL,
    )
    assert [(run.arm, run.seed) for run in result.runs][::2] == [
        ("fcfs", 0),
        ("object", 0),
        ("class", 0),
    ]
    table = result.table().to_pydict()
    assert set(table["baseline"]) == {"class"} and set(table["metric"]) >= {"ttft_mean", "e2e_p99"}
    same = [d for arm, d in zip(table["arm"], table["difference"], strict=True) if arm == "object"]
    other = [d for arm, d in zip(table["arm"], table["difference"], strict=True) if arm == "fcfs"]
    assert not any(same) and any(other)
    config = result.runs[0].config
    assert config["memory"]["block_size"] == 32 and config["hardware"]["name"] == "h100"
    assert config["server"]["max_seqs"] == 2
    assert result.requests.num_rows == 3 * 2 * 40
    assert result.steps.column_names[:3] == ["arm", "seed", "start"]
    assert "fcfs" in repr(result) and result.finding[0] in " ".join(repr(result).split())


def test_the_result_is_that_of_the_command(tmp_path: Path, call: Callable[..., Any]) -> None:
    result = ps.simulate(folder=tmp_path / "script", policy="priority", **SMALL)
    words = ("workload=sharegpt", "workload.rate=4", "workload.requests=40", "seeds=2", "jobs=1")
    code, _, errors = call(
        *("experiment=single", "policy=priority", *words, "tracking=none", "report=false"),
        f"hydra.run.dir={tmp_path}/command",
    )
    assert (code, errors) == (0, "")
    for name in ("comparison.csv", "runs/run/seed-1/requests.parquet"):
        assert (tmp_path / "script" / name).read_bytes() == (
            tmp_path / "command" / name
        ).read_bytes()
    assert result.table().num_rows == 7


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_call_leaves_no_objects_behind(jobs: int) -> None:
    def tracked_and_frozen() -> tuple[int, int]:
        for _ in range(2):  # the first calls fill caches
            ps.simulate(**SMALL | {"jobs": jobs})
        gc.collect()
        return len(gc.get_objects()), gc.get_freeze_count()

    tracked, frozen = tracked_and_frozen()
    later = tracked_and_frozen()
    assert later[0] < tracked + 100 and later[1] <= frozen


def test_settings_with_arms_are_combined() -> None:
    sizes = {"16": 16, "32 tokens, it's": 32}
    policies = {"f": "fcfs", "p": "priority"}
    result = ps.compare({"memory.block_size": sizes}, policy=policies, **SMALL)
    assert [run.arm for run in result.runs[::2]] == [
        "16, f",
        "16, p",
        "32 tokens, it's, f",
        "32 tokens, it's, p",
    ]
    for table in (result.requests, result.steps, result.events):
        kinds = [str(table.schema.field(name).type) for name in ("memory.block_size", "policy")]
        assert kinds == ["int64", "string"]
    columns = (result.steps[name].to_pylist() for name in ("arm", "memory.block_size", "policy"))
    assert {*zip(*columns, strict=True)} == {
        (f"{size}, {short}", blocks, policy)
        for size, blocks in sizes.items()
        for short, policy in policies.items()
    }


def test_a_folder_goes_on_and_a_report_is_what_the_command_leaves(tmp_path: Path) -> None:
    ps.simulate(folder=tmp_path / "runs", **SMALL)
    before = (tmp_path / "runs/runs/run/seed-0/requests.parquet").stat().st_mtime_ns
    result = ps.simulate(folder=tmp_path / "runs", **SMALL)
    assert (tmp_path / "runs/runs/run/seed-0/requests.parquet").stat().st_mtime_ns == before
    page = result.report(tmp_path / "out")
    left = {one.name for one in (tmp_path / "out").iterdir()}
    assert left == {
        *("comparison.csv", "config.yaml", "plots", "report.html", "result.json", "runs"),
        *("table.tex", "timeline.json"),
    }
    assert result.finding == json.loads((tmp_path / "out/result.json").read_text())["finding"]
    assert "<svg" in page.read_text()


def test_a_plot_is_a_figure(tmp_path: Path) -> None:
    result = ps.simulate(**SMALL)
    plot = result.plot("latency")
    plot.save(tmp_path / "latency.pdf")
    assert (tmp_path / "latency.pdf").read_bytes()[:4] == b"%PDF"
    assert plot.svg == plot._repr_svg_() and "<svg" in plot.svg
    for place in (tmp_path / "plot.xyz", tmp_path / "absent" / "plot.svg"):
        with pytest.raises(ConfigError, match=r"plot\.\w+: cannot be written: "):
            plot.save(place)


def test_a_temporary_folder_ends_with_its_result() -> None:
    result = ps.simulate(**SMALL)
    folder = result.folder
    assert folder.is_dir()
    del result
    assert not folder.exists()


def test_arms_are_servers() -> None:
    servers = {"V0": "vllm-0.6", "V1": "vllm-0.33", "small": ps.option("sglang-0.5", max_seqs=3)}
    result = ps.compare(server=servers, **{**SMALL, "seeds": 1})
    found = [
        (run.arm, run.config["batching"]["_target_"].rpartition(".")[2], run.config["server"])
        for run in result.runs
    ]
    limits = ("max_seqs", "max_batched_tokens", "async_scheduling")
    assert [(arm, batching, *map(own.get, limits)) for arm, batching, own in found] == [
        ("V0", "PrefillFirst", 256, None, False),
        ("V1", "Unified", 256, 2048, True),
        ("small", "SGLang", 3, 16384, True),
    ]


def test_a_preset_has_the_settings_of_a_server() -> None:
    small, large = ps.preset("vllm-0.33"), ps.preset("vllm-0.33", gpu="h100", model="opt-13b")
    assert (small.max_seqs, large.max_seqs) == (256, 1024)
    assert ps.preset("sglang-0.5", {"server.max_seqs": 3}).max_seqs == 3
    assert tuple(one.name for one in fields(Server)) == api._LIMITS


@pytest.mark.slow
def test_other_experiments() -> None:
    estimate = ps.estimate(prompt=1000, model="llama-3.1-8b", gpu="h100")
    assert estimate.table().num_rows > 0 and estimate.finding
    swept = ps.sweep("memory.block_size", [8, 16], **{**SMALL, "seeds": 1})
    assert [run.arm for run in swept.runs] == ["8", "16"]
    gpus = ps.sweep("gpu", ["a10", "h100"], **{**SMALL, "seeds": 1})
    assert [run.config["hardware"]["name"] for run in gpus.runs] == ["a10", "h100"]
    routers = {"turns": "round_robin", "least": "least_requests"}
    several = ps.compare({"fleet.replicas": 2}, router=routers, **SMALL)
    assert len(several.runs[0].replicas) == 2 and len(several.runs) == 4
    preemption = ps.experiment("preemption", {"workload.requests": 20}, seeds=1, jobs=1)
    assert preemption.runs
    found = ps.capacity({"ttft_p99": 2.0}, policy={"mine": Longest()}, **{**SMALL, "seeds": 1})
    assert found.table().to_pydict()["arm"] == ["mine"]


def test_a_fleet_has_replicas_or_pools_and_perhaps_arms() -> None:
    alike = ps.fleet(2, router="least_requests", **SMALL)
    assert alike.runs[0].config["fleet"]["replicas"] == 2 and len(alike.runs) == 2
    pools: dict[str, Any] = {"fast": {"replicas": 1, "set": ["hardware=h100"]}}
    pools["slow"] = {"replicas": 2}
    compared = ps.fleet(pools, router={"a": "round_robin", "b": "least_requests"}, **SMALL)
    assert {run.arm for run in compared.runs} == {"a", "b"}
    assert set(compared.requests["replica"].to_pylist()) == {0, 1, 2}


def test_what_is_absent_is_said_and_keeps_its_columns() -> None:
    result = ps.compare(policy=AB, metrics=["ttft", "session_time"], **SMALL)
    assert "no run has a value of Session time mean, Session time P99" in result.notes
    assert result.events.num_rows == 0
    assert result.events.column_names[:5] == ["arm", "seed", "time", "request", "by"]


def test_a_trace_of_one_s_own_columns(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text("my_time,in,out,tenant\n10,5,3,a\n11.5,7,2,b\n")
    columns = {"arrival": "my_time", "prompt": "in", "output": "out", "client": "tenant"}
    found = ps.simulate(workload=ps.trace(path, columns=columns), seeds=1, jobs=1)
    rows = found.requests.to_pylist()
    assert [(row["arrival"], row["client"]) for row in rows] == [(0.0, "a"), (1.5, "b")]


@pytest.mark.parametrize("policy", ["sjf", "nowhere.Policy"])
def test_the_line_is_that_of_the_command(policy: str, call: Callable[..., Any]) -> None:
    with pytest.raises(PagedsimError) as error:
        ps.simulate(policy=policy)
    _, _, errors = call("experiment=single", f"policy={policy}", "tracking=none")
    assert errors.splitlines()[0] == f"pagedsim: {error.value}"


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from(["a", "b c", "d-e.f"]), inner),
    max_leaves=6,
)


@given(plain)
def test_plain_values_are_read_as_they_were_written(value: Any) -> None:
    assert parse(f"key={text_of(value)}").value == value


def test_numbers_of_numpy_and_paths() -> None:
    assert text_of(np.float64(0.5)) == "0.5" and text_of(np.int32(3)) == "3"
    assert text_of(Path("a b")) == '"a b"'


AB: Mapping[str, str] = {"a": "fcfs", "a, b": "vtc"}


class Around(PolicyWrapper):
    """Another policy, as it is."""


class Both(ps.Autoscaler):
    """As many replicas as that."""

    def __init__(self, count: int = 2) -> None:
        self.count = count

    def desired(self, view: Any) -> int:
        return self.count


class Drawing(ps.Policy):
    def __init__(self, seed: int = 0) -> None:
        self.seed = seed


class Wide(Unified):
    admission_changes: ClassVar[AdmissionChanges] = "never"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("policy", Around(Longest())),
        ("policy", ps.option("aging", of=Longest(2.0), rate=0.1)),
        ("policy", ps.option(Longest, factor=3.0)),
        ("policy", Drawing),
        ("batching", Wide),
        ("batching", Wide()),
        ("batching", Unified),
        ("memory", PrefixMemory),
        ("memory", PrefixMemory(900, 4)),
        ("memory", ps.option(PrefixMemory, blocks=900)),
        ("router", ps.option(Uniform, seed=3)),
        ("backend", ps.option("sim", overlap=True)),
    ],
)  # fmt: skip
def test_what_a_setting_may_be(key: str, value: object) -> None:
    result = ps.simulate({key: value}, **{**SMALL, "seeds": 1})
    assert result.requests.num_rows == 40


@pytest.mark.parametrize(
    "autoscaler",
    [Both(3), ps.option(Both, count=3), Both],
    ids=["object", "class with settings", "class"],
)
def test_autoscalers(autoscaler: object) -> None:
    own = {"fleet.replicas": 3, "fleet.autoscale.interval_s": 0.5, "fleet.autoscale.startup_s": 0.5}
    result = ps.simulate({**own, "fleet.autoscale": autoscaler}, **{**SMALL, "seeds": 1})
    used = set(result.requests["replica"].to_pylist())
    assert used == ({0, 1} if autoscaler is Both else {0, 1, 2})


def test_a_report_is_written_where_it_is_asked_for(tmp_path: Path) -> None:
    ps.simulate(folder=tmp_path, report=True, slo={"ttft": 1.0}, **SMALL)
    assert (tmp_path / "report.html").exists()


SCRIPT = """
import sys
import pagedsim as ps
assert not [name for name in sys.modules if name.startswith(("pagedsim.", "numpy", "pyarrow"))]
ps.compare(policy={"a": "fcfs", "b": "priority"}, seeds=1, workload=ps.synthetic(requests=10))
print([name for name in ("torch", "wandb", "matplotlib") if name in sys.modules])
"""


def test_a_script_imports_no_torch(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, cwd=tmp_path
    )
    assert (done.stdout, done.stderr) == ("[]\n", "")


EDITED = """
import pagedsim as ps
from pagedsim.core import PolicyWrapper
class Around(PolicyWrapper):
    pass
class Mine(ps.Policy):
    rank_changes = "never"
    def rank(self, request, state):
        return SIGN * request.prompt_len
if __name__ == "__main__":
    load = ps.synthetic(rate=9, requests=60)
    settings = {"server.max_seqs": 2}
    result = ps.simulate(settings, folder="here", policy=Around(Mine()), seeds=1, workload=load)
    print(result.requests["finished"].to_pylist())
"""


@pytest.mark.slow
def test_a_run_is_made_again_where_the_class_in_the_script_has_changed(tmp_path: Path) -> None:
    def printed(sign: str) -> str:
        (tmp_path / "mine.py").write_text(EDITED.replace("SIGN", sign))
        command = [sys.executable, "mine.py"]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
        assert done.stderr == ""
        return done.stdout

    assert printed("1") == printed("1") != printed("-1")


WITHOUT_SOURCE = """
import pagedsim as ps
exec('class Mine(ps.Policy): pass')
ps.simulate(folder="here", policy=Mine, seeds=1, workload=ps.synthetic(requests=9))
"""


def test_a_run_under_a_class_without_source_is_complete(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WITHOUT_SOURCE]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.stderr == ""
    assert (tmp_path / "here/runs/run/seed-0/run.json").exists()


class Line(ps.CostModel):
    """A cost model with settings of its own, which does not take the replica."""

    def __init__(self, seconds: float = 0.01) -> None:
        self.seconds = seconds

    def step_seconds(self, plan: StepPlan) -> float:
        return self.seconds if self.replica.model.layers else 0.0


@pytest.mark.parametrize("cost", [Line, Line(0.01), ps.option(Line, seconds=0.01)])
def test_a_cost_model_need_not_take_the_replica(cost: Any) -> None:
    steps = ps.simulate(cost=cost, **{**SMALL, "seeds": 1}).steps.to_pydict()
    lengths = {round(b - a, 6) for a, b in zip(steps["start"], steps["end"], strict=True)}
    assert lengths == {0.01}
