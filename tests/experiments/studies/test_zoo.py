"""The zoo: its arms, those left out and why, and the report of the others."""

from __future__ import annotations

import csv
import json
import re
from importlib.metadata import EntryPoint
from math import nan
from pathlib import Path
from typing import Any

import pytest

from experiments.studies.zoo import Zoo, listings, sentences
from experiments.studies.zoo_arms import every_policy
from pagedsim import build
from pagedsim.build import POLICIES, plugin_policies
from pagedsim.core import ConfigError, Policy
from pagedsim.run.runs import Runs
from tests.conftest import Call
from tests.metrics.tables import ranking_of
from tests.run.studies import carried_out, command

FEW = ("experiment=policy_zoo", "workload.requests=60", "seeds=2", "report=false")
OWN = (
    "from pagedsim.core import Policy\n\n\nclass Last(Policy):\n"
    "    def rank(self, request, state):\n        return -request.arrival\n"
)


class Offered(Policy):
    """A policy of a user's own."""


def zoo(**settings: Any) -> Zoo:
    return Zoo(title="Zoo", question="Who?", criteria=["e2e"], **settings)


def asked(folder: Path, *words: str) -> tuple[list[str], str]:
    """The arms that an experiment would run, and the note of those left out."""
    from omegaconf import OmegaConf

    from pagedsim.run.objects import make
    from pagedsim.run.study import Study

    given = command(folder, "experiment=policy_zoo", *words)
    settings: Any = OmegaConf.to_container(OmegaConf.create(given.config), resolve=True)
    study = make("study", settings["study"], Study)
    assert isinstance(study, Zoo)
    arms = study.next_runs(Runs(given, quiet=True))
    return [arm.name for arm in arms], "\n".join(study.notes_of_left_out())


# -- arms ------------------------------------------------------------------------------------------


def test_every_policy_of_the_registry_is_in_it(hydra: None, tmp_path: Path) -> None:
    arms, left_out = asked(tmp_path)
    assert left_out == ""
    for name, kind in POLICIES.items():
        if "session" in kind.needs:
            assert name not in arms  # its requests are of none
        elif "predictor" in kind.needs:
            assert {f"{name} by oracle", f"{name} by noisy"} <= set(arms)
        else:
            assert name in arms
    assert len(arms) > len(POLICIES)


def test_what_a_package_offers_is_in_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint("mine", f"{__name__}:Offered", build.PLUGIN_GROUP)
    monkeypatch.setattr(build, "entry_points", lambda group: [point])
    plugin_policies.cache_clear()
    try:
        assert every_policy(["oracle"])["mine"] == ["policy=mine"]
    finally:
        monkeypatch.undo()
        plugin_policies.cache_clear()


def test_arms_are_chosen_and_left_out_by_name() -> None:
    arms = {"mine": ["policy=fcfs"]}
    assert list(zoo(arms=arms, only=["vtc", "mine", "fcfs"]).chosen) == ["fcfs", "vtc", "mine"]
    less = zoo(arms=arms, without=["mlfq", "mine"])
    assert set(less.every) - set(less.chosen) == {"mlfq", "mine"}
    assert [arm for arm in zoo(predictors=["bucket"]).chosen if arm.startswith("sjf")] == [
        "sjf by bucket"
    ]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"only": ["vct"]}, "only: unknown arm 'vct': did you mean 'vtc'?"),
        ({"without": ["sjf"]}, "without: unknown arm 'sjf': choose from aging, cap, "),
        ({"only": "fcfs"}, "only=fcfs: must be a list of arms, such as [fcfs, vtc]"),
        ({"only": ["vtc"], "baseline": "fcfs"}, "baseline=fcfs: must be one of the arms vtc"),
        ({"only": ["vtc"], "without": ["vtc"]}, "only=['vtc'], without=['vtc']: leaves no arm"),
        ({"objectives": {"batch": {"e2e": -1}}}, "objectives.batch.e2e=-1: must be a number of at"),
        ({"predictors": []}, "predictors=[]: must be a list such as [oracle]"),
        ({"planes": [["e2e_mean"]]}, "planes: ['e2e_mean']: must be a pair of metrics"),
        ({"criteria": ["in_system_mean"]}, "criteria: in_system_mean: neither way is better"),
        ({"arms": {"mine": "policy=fcfs"}}, "arms.mine=policy=fcfs: must be a list"),
    ],
)
def test_what_cannot_be_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        Zoo(**{"title": "Zoo", "question": "Who?", "criteria": ["e2e"]} | settings)
    assert str(refused.value).startswith(message)


# -- arms left out ---------------------------------------------------------------------------------


def test_who_lacks_what_it_needs_is_left_out_with_the_reason(hydra: None, tmp_path: Path) -> None:
    arms, left_out = asked(tmp_path, "workload=sharegpt", "study.predictors=[none]")
    gone = {"edf", "vtc", "drr", "priority", "slo", "longest_prefix", "sjf by none"}
    assert not gone & set(arms) and {"fcfs", "hrrn", "past_future"} <= set(arms)
    assert (
        "left out: edf, edf that sheds: EDF goes by deadlines, and no request has one" in left_out
    )
    assert "left out: vtc, past_future of vtc: VTC goes by clients, and all requests " in left_out
    assert "set workload.client=, or workload.client_column= of a trace" in left_out
    assert "SLO goes by priorities, and all requests have the same" in left_out
    assert "LongestPrefix goes by what prompts have in common" in left_out
    assert "SRPT goes by predicted lengths, and none are predicted" in left_out


def test_longest_prefix_needs_a_cache(hydra: None, tmp_path: Path) -> None:
    arms, left_out = asked(tmp_path, "memory=paged")
    assert "longest_prefix" not in arms and "fcfs" in arms
    assert left_out.startswith("left out: longest_prefix: goes by what is cached, and memory=paged")


def test_what_does_not_go_together_is_left_out(hydra: None, tmp_path: Path) -> None:
    arms, left_out = asked(tmp_path, "batching=static", "preemption=recompute")
    assert "srpt by oracle" not in arms and "fcfs" in arms
    assert "srpt by oracle, srpt by noisy: SRPT displaces running requests: a static" in left_out


def test_what_is_wrong_for_all_is_an_error(hydra: None, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="max_model_len=2048: memory of 10 blocks"):
        asked(tmp_path, "memory.blocks=10")


def test_a_selection_that_leaves_no_arm_is_refused(hydra: None, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^left out: edf: EDF goes by deadlines, and no request"):
        asked(tmp_path, "workload=sharegpt", "study.only=[edf]")


# -- what is said ----------------------------------------------------------------------------------


def test_without_finished_requests_there_is_no_finding() -> None:
    nothing = {"e2e_mean": [nan], "finished": [0.0]}
    ranking = ranking_of({"a": nothing, "b": nothing}, "e2e_mean")
    assert sentences(ranking, [], ["oracle"]) == ["No request finished."]
    assert listings(ranking) == []


def test_a_policy_of_one_s_own_joins(call: Call) -> None:
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


def test_a_mistake_in_an_arm_of_one_s_own_is_an_error(call: Call) -> None:
    own = '+study.arms.mine=["policy=srtp"]'
    code, _, errors = call(*FEW, "study.only=[fcfs,mine]", own, "tracking=none")
    assert code == 1 and errors.startswith("pagedsim: study.arms.mine: policy=srtp")


def test_on_other_requests_it_judges_by_what_they_give(hydra: None, tmp_path: Path) -> None:
    found = carried_out(tmp_path / "out", *FEW, "workload=sharegpt", "study.only=[fcfs,hrrn,vtc]")
    assert [one["of"] for one in found["data"]["frontiers"]] == [["e2e_mean", "e2e_p99"]]
    assert found["notes"][0].startswith("left out: vtc: VTC goes by clients")
    told = "nothing to judge by in these requests: SLO attainment, Service gap, Service Jain"
    assert found["notes"][1] == told
    assert set(found["data"]["means"]) == {"all"}


def test_its_notes_say_what_conclusions_rest_on(hydra: None, tmp_path: Path) -> None:
    found = carried_out(
        tmp_path / "out", *FEW, 'study.only=[fcfs,past_future,"sjf by noisy"]', "workload.rate=30",
    )  # fmt: skip
    holds, shared, *others = found["notes"]
    assert holds.startswith("who wins holds for these requests on this server")
    assert shared.startswith("past_future: memory=prefix keeps a beginning that requests share")
    (guesses,) = (one for one in others if "predicted lengths" in one)  # of two seeds
    assert re.fullmatch(
        r"sjf by noisy: predicted lengths are off by \d+% (to \d+% )?in .*", guesses
    )
    found = carried_out(tmp_path / "paged", *FEW, "study.only=[past_future,vtc]", "memory=paged")
    assert not any("share" in one for one in found["notes"])
    plain = ("study.only=[past_future,hrrn]", "workload=sharegpt")  # prompts have no contents
    found = carried_out(tmp_path / "plain", *FEW, *plain)
    assert not any("share" in one for one in found["notes"])


def test_a_typed_objective_of_no_class_is_refused(hydra: None, tmp_path: Path) -> None:
    says = "study.objectives.interactve: unknown class 'interactve': did you mean 'interactive'?"
    with pytest.raises(ConfigError, match=re.escape(says)):
        asked(tmp_path, "+study.objectives.interactve={ttft: 1}", "study.only=[fcfs]")
    arms, _ = asked(tmp_path, "~workload.classes.batch", "study.only=[fcfs]")
    assert arms == ["fcfs"]  # what the experiment itself sets is not at fault


def test_an_arm_with_a_space_in_its_name(hydra: None, tmp_path: Path) -> None:
    own = 'study.arms={a b: ["policy=fcfs"]}'
    arms, _ = asked(tmp_path, "++" + own, "study.only=[a b]")
    assert arms == ["a b"]


def test_of_a_long_pareto_front_some_are_named() -> None:
    alike = {f"arm{number}": {"e2e_mean": [1.0], "ttft_mean": [1.0]} for number in range(14)}
    ranking = ranking_of(alike, "e2e_mean", "ttft_mean")
    plane = (ranking.criteria[0], ranking.criteria[1])
    (front, *_) = sentences(ranking, [plane], ["oracle"])
    assert front.endswith("arm8, arm9 and 4 more.")


def test_one_arm_alone_is_told_as_one(hydra: None, tmp_path: Path) -> None:
    found = carried_out(tmp_path / "out", *FEW, "study.only=[vtc]")
    assert found["finding"][0].startswith("vtc: E2E mean ") and found["pictures"] == []


def test_a_shedding_arm_is_compared_with_no_latencies(hydra: None, tmp_path: Path) -> None:
    words = ("workload.rate=60", "workload.classes.interactive.deadline=1", "memory.blocks=300")
    found = carried_out(tmp_path / "out", *FEW, *words, "study.only=[fcfs,edf,edf that sheds]")
    assert any(
        one.startswith("Fewer requests than others finished edf that sheds (")
        for one in found["finding"]
    )
    assert "edf that sheds" not in found["data"]["frontiers"][0]["arms"]
    assert {one["arm"] for label, one in found["data"]["best"].items() if "E2E" in label} <= {
        "fcfs",
        "edf",
    }


@pytest.mark.slow
def test_the_engine_serves_it(hydra: None, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    pytest.importorskip("torch")
    request.getfixturevalue("a_small_model")
    engine = ("backend=engine", "backend.clock=cpu", "seeds=1", "backend.limit=8")
    found = carried_out(
        tmp_path / "out", *FEW, *engine, "study.only=[fcfs,vtc,longest_prefix,srpt by oracle]"
    )
    assert len(found["data"]["means"]["all"]) == 4
