"""The zoo: its arms, those left out and why, and the report of the others."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from typing import Any

import pytest

from pagedsim.build import POLICIES
from pagedsim.core import ConfigError
from pagedsim.experiments.studies.zoo import Zoo
from pagedsim.run.runs import Runs
from tests.conftest import Call
from tests.run.studies import carried_out, command

FEW = ("experiment=policy_zoo", "workload.requests=60", "seeds=2", "report=false")
OWN = (
    "from pagedsim.core import Policy\n\n\nclass Last(Policy):\n"
    "    def rank(self, request, state):\n        return -request.arrival\n"
)


def zoo(**settings: Any) -> Zoo:
    return Zoo(title="Zoo", question="Who?", criteria=["e2e"], **settings)


def asked(folder: Path, *words: str) -> tuple[list[str], str]:
    """The arms that an experiment would run, and the note of those left out."""
    from omegaconf import OmegaConf

    from pagedsim.run.study import Study
    from pagedsim.spec.objects import make

    given = command(folder, "experiment=policy_zoo", *words)
    settings: Any = OmegaConf.to_container(OmegaConf.create(given.config), resolve=True)
    study = make("study", settings["study"], Study)
    assert isinstance(study, Zoo)
    arms = study.next_runs(Runs(given, quiet=True))
    return [arm.name for arm in arms], "\n".join(study.left_out)


# -- arms ------------------------------------------------------------------------------------------


def test_every_policy_of_the_registry_is_in_it(tmp_path: Path) -> None:
    arms, left_out = asked(tmp_path)
    assert left_out.startswith("left out: dfs_weight: DFSWeight walks the tree")
    assert left_out.count("\n") == 0
    for name, kind in POLICIES.items():
        if "session" in kind.needs:
            assert name not in arms  # its requests are of none
        elif "predictor" in kind.needs:
            assert {f"{name} by oracle", f"{name} by noisy"} <= set(arms)
        else:
            assert (name in arms) != kind.walks_tree  # memory=prefix is no tree
    assert len(arms) > len(POLICIES)


def test_arms_are_chosen_and_left_out_by_name() -> None:
    arms = {"mine": ["policy=fcfs"]}
    assert list(zoo(arms=arms, only=["vtc", "mine", "fcfs"]).chosen) == ["fcfs", "vtc", "mine"]
    less = zoo(arms=arms, without=["mlfq", "mine"])
    assert set(less.every) - set(less.chosen) == {"mlfq", "mine"}
    assert [arm for arm in zoo(predictors=["bucket"]).chosen if arm.startswith("sjf")] == [
        "sjf by bucket"
    ]


# -- arms left out ---------------------------------------------------------------------------------


def test_policies_without_their_inputs_are_left_out_with_the_reason(tmp_path: Path) -> None:
    arms, left_out = asked(tmp_path, "workload=sharegpt", "study.predictors=[none]")
    gone = {"edf", "vtc", "drr", "priority", "slo", "lpm", "sjf by none"}
    assert not gone & set(arms) and {"fcfs", "hrrn", "past_future"} <= set(arms)
    assert (
        "left out: edf, edf that sheds: EDF goes by deadlines, and no request has one" in left_out
    )
    assert "left out: vtc, past_future of vtc: VTC goes by clients, and all requests " in left_out
    assert "set workload.client=, or workload.columns.client= of a trace" in left_out
    assert "SLO goes by priorities, and all requests have the same" in left_out
    assert "LongestPrefix goes by what prompts have in common" in left_out
    assert "SRPT goes by predicted lengths, and none are predicted" in left_out


def test_unbuildable_arms_are_left_out(tmp_path: Path) -> None:
    words = ("batching=static", "preemption=recompute", "memory=paged")
    own = '++study.arms={mine: ["policy=aging", "policy.of=lpm"]}'
    arms, left_out = asked(tmp_path, *words, own)
    assert "srpt by oracle" not in arms and "fcfs" in arms
    assert "left out: lpm, dfs_weight, mine: goes by what is cached, and memory=paged" in left_out
    assert "srpt by oracle, srpt by noisy: SRPT displaces running requests: a static" in left_out


# -- what is said ----------------------------------------------------------------------------------


def test_a_plugin_policy_joins(call: Call) -> None:
    Path("mine.py").write_text(OWN)
    own = '+study.arms.mine=["policy._target_=mine.Last"]'
    code, out, errors = call(
        *FEW, 'study.only=[fcfs,vtc,"sjf by oracle","sjf by noisy",mine]', own, "tracking=none",
        "hydra.run.dir=out", "jobs=1", "workload.rate=30",
    )  # fmt: skip
    assert (code, errors) == (0, "")
    result = json.loads(Path("out/result.json").read_text())
    assert set(result["data"]["means"]) == {"interactive", "batch", "all"}
    assert "mine" in result["data"]["means"]["interactive"]
    assert result["finding"][0].startswith("Pareto front of E2E mean and E2E P99: ")
    assert any("with predictor=noisy in the place of oracle" in one for one in result["finding"])
    assert "Which one wins where" in out
    with Path("out/comparison.csv").open() as file:
        groups = {row["client"] for row in csv.DictReader(file)}
    assert groups == {"interactive", "batch", "shop", "school", "archive", "lab", "all"}


def test_a_typed_objective_of_no_class_is_refused(tmp_path: Path) -> None:
    says = "study.objectives.interactve: unknown class 'interactve': did you mean 'interactive'?"
    with pytest.raises(ConfigError, match=re.escape(says)):
        asked(tmp_path, "+study.objectives.interactve={ttft: 1}", "study.only=[fcfs]")
    arms, _ = asked(tmp_path, "~workload.classes.batch", "study.only=[fcfs]")
    assert arms == ["fcfs"]  # what the experiment itself sets is not at fault
    own = '++study.arms={a b: ["policy=fcfs"]}'
    assert asked(tmp_path, own, "study.only=[a b]")[0] == ["a b"]


@pytest.mark.slow
def test_the_engine_serves_it(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    pytest.importorskip("torch")
    request.getfixturevalue("a_small_model")
    engine = ("backend=engine", "backend.clock=cpu", "seeds=1", "backend.limit=8")
    found = carried_out(tmp_path / "out", *FEW, *engine, "study.only=[fcfs,vtc,lpm,srpt by oracle]")
    assert len(found["data"]["means"]["all"]) == 4
