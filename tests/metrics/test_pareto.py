"""Best and dominated arms, against values by hand or brute force, and which arms are comparable."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from pagedsim.experiments.studies.zoo_pareto import Criterion, Dominated, pareto_front
from pagedsim.metrics.arms import by_class
from tests.metrics.tables import arms_with, ranking_of, study_of, with_rejected

E2E, TTFT = Criterion("e2e_mean"), Criterion("ttft_p99")
SLOW = {"e2e_mean": [10.0, 12.0, 11.0], "ttft_p99": [5.0, 6.0, 5.5]}
FAST = {"e2e_mean": [5.0, 6.0, 5.4], "ttft_p99": [9.0, 11.0, 10.2]}
LATE = {"e2e_mean": [12.0, 14.0, 13.3], "ttft_p99": [5.0, 6.0, 5.5]}
ABOUT = {"e2e_mean": [5.5, 5.2, 6.1], "ttft_p99": [9.5, 10.5, 12.0]}


@given(st.dictionaries(st.text(max_size=3), st.tuples(st.integers(0, 6), st.integers(0, 6))))
def test_unbeaten_are_those_that_no_other_is_as_good_as(
    points: dict[str, tuple[float, float]],
) -> None:
    found = pareto_front(points)
    assert sorted(found) == sorted(
        name
        for name, (x, y) in points.items()
        if not any(a >= x and b >= y and (a, b) != (x, y) for a, b in points.values())
    )
    assert [points[one][0] for one in found] == sorted((points[o][0] for o in found), reverse=True)


def test_the_frontier_goes_the_better_way_of_each_metric() -> None:
    more = {"e2e_mean": [5.0], "output_tokens_per_s": [9.0]}
    arms = {
        "best": more,
        "fast": {"e2e_mean": [4.0], "output_tokens_per_s": [8.0]},
        "neither": {"e2e_mean": [6.0], "output_tokens_per_s": [8.5]},
    }
    ranking = ranking_of(arms, "e2e_mean", "output_tokens_per_s")
    assert ranking.frontier(E2E, Criterion("output_tokens_per_s")) == ["fast", "best"]


def test_the_best_arm_its_equals_and_what_it_costs() -> None:
    ranking = ranking_of({"slow": SLOW, "fast": FAST, "about": ABOUT}, "e2e_mean", "ttft_p99")
    assert ranking.best(E2E) == "fast"
    assert ranking.as_good(E2E) == ["about"]
    assert ranking.surely_better("fast", "slow", E2E)
    cost = ranking.price("fast")
    assert cost is not None and (cost.key, cost.baseline) == ("ttft_p99", "slow")
    assert ranking.price("slow") is None
    assert ranking.best(Criterion("mfu")) is None


def test_dominated_arms_are_nowhere_better_and_somewhere_surely_worse() -> None:
    ranking = ranking_of({"slow": SLOW, "fast": FAST, "late": LATE}, "e2e_mean", "ttft_p99")
    assert ranking.dominated() == {"late": Dominated("slow", 1)}
    by_one = ranking_of({"slow": SLOW, "fast": FAST, "late": LATE}, "e2e_mean")
    assert by_one.dominated().keys() == {"slow", "late"}
    alike = ranking_of({"slow": SLOW, "twin": SLOW, "late": LATE}, "e2e_mean", "ttft_p99")
    assert alike.same() == ["twin"]


def test_an_arm_that_only_seems_worse_is_not_dominated() -> None:
    near = {"e2e_mean": [10.1, 11.9, 11.2]}
    assert ranking_of({"slow": SLOW, "near": near}, "e2e_mean").dominated() == {}


def test_an_arm_that_finished_fewer_is_in_no_comparison_of_latencies() -> None:
    few = {"e2e_mean": [1.0, 1.1, 1.2], "output_tokens_per_s": [3.0, 3.1, 3.2]}
    all_ = SLOW | {"output_tokens_per_s": [1.0, 1.1, 1.2]}
    arms = {"all": all_, "few": few | {"finished": [9, 10, 9]}}
    ranking = ranking_of(arms, "e2e_mean", "output_tokens_per_s")
    assert ranking.selective == {"few": 2}
    assert ranking.best(E2E) == "all" and ranking.best(Criterion("output_tokens_per_s")) == "few"
    assert ranking.compared("few", "all", E2E) is None
    assert ranking.frontier(E2E, Criterion("output_tokens_per_s")) == ["all"]
    assert ranking.dominated() == {}


def test_classes_take_the_place_of_clients_and_have_the_workload_s_names() -> None:
    config = {"workload": {"classes": {"chat": {"priority": 0}, "a": {"priority": 1}, "b": {}}}}
    arms = arms_with({"one": {"e2e_mean": [1.0]}}, config)
    arms.runs[0].summary["classes"] = {"0": {"e2e_mean": 2.0}, "1": {"e2e_mean": 3.0}}
    found = by_class(arms)
    # Two classes have priority 0: b says none.
    assert found.clients == ("priority 0", "a")
    assert found.runs[0].summary["clients"]["a"] == {"e2e_mean": 3.0}
    assert arms.clients == ()


# -- comparable arms -------------------------------------------------------------------------------


def test_arms_that_finished_different_requests_are_pointed_out(tmp_path: Path) -> None:
    study = study_of(tmp_path)
    assert study.notes == []
    study.runs[4] = with_rejected(study.runs[4], 3)  # the second seed of the second arm
    [note] = study.notes
    assert note == (
        "the arms finished different requests (fcfs 120, urgent 117), and their latencies are of "
        "those alone: compare them with care"
    )
    run = study.runs[4]  # unless they were sent different ones
    study.runs[4] = replace(run, config={**run.config, "workload": {"rate": 2}})
    assert study.notes == []
