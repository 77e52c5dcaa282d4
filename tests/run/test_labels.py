"""Short names of an arm's settings, as Weights & Biases has them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pagedsim.spec.factors import factors_of, labels_of
from pagedsim.spec.study import StudySpec
from pagedsim.spec.words import Change


def labelled(*words: str, **arms: list[str | Change]) -> dict[str, dict[str, Any]]:
    return labels_of(StudySpec.of(["experiment=single", *words], Path("out")), arms)


def test_options_of_groups_are_labels_and_typed_settings_go_by_their_last_word() -> None:
    words = ("workload.rate=8", "model=llama-3.1-8b", "seeds=3", "tracking.mode=online")
    labels = labelled(*words, a=[], b=["policy=vtc", "memory.block_size=32"])
    for arm, policy, size in (("a", "fcfs", 16), ("b", "vtc", 32)):
        has = labels[arm]
        assert (has["policy"], has["rate"], has["block_size"]) == (policy, 8, size)
        assert (has["model"], has["memory"], has["workload"]) == (
            *("llama-3.1-8b", "paged", "sharegpt"),
        )
        assert not {"seeds", "mode", "tracking", "experiment", "requests"} & has.keys()


def test_a_key_whose_last_word_is_another_s_stays_whole() -> None:
    (has,) = labelled("slo.ttft=3", "qoe.ttft=2", "slo.tpot=1", a=[]).values()
    assert (has["slo.ttft"], has["qoe.ttft"], has["tpot"]) == (3, 2, 1) and "ttft" not in has
    deep = labelled("workload=four_clients", a=["workload.classes.batch.rate=3"])["a"]
    assert deep["workload.classes.batch.rate"] == 3


def test_a_class_stands_for_the_option_of_its_group() -> None:
    typed = "policy._target_=pagedsim.policies.ordering.Priority"
    labels = labelled(typed, a=[], b=["memory=prefix"])
    assert [has["policy"] for has in labels.values()] == ["Priority"] * 2
    assert [has["memory"] for has in labels.values()] == ["paged", "prefix"]
    assert labelled(a=[typed])["a"]["policy"] == "Priority"


def test_an_option_that_sets_others_and_a_search_s_own_changes_are_labels() -> None:
    change = Change("workload.rate", 2.5, "replace")
    has = labelled(a=["server=sglang-0.5", change])["a"]
    assert (has["server"], has["batching"], has["memory"], has["rate"]) == (
        *("sglang-0.5", "sglang", "radix", 2.5),
    )


@pytest.mark.parametrize("typed", [True, False])
def test_an_arm_that_overrides_nothing_has_the_study_s_own_class(typed: bool) -> None:
    words = ["policy._target_=pagedsim.policies.ordering.Priority"] if typed else []
    spec = StudySpec.of(["experiment=single", *words], Path("out"))
    other = "policy._target_=pagedsim.policies.ordering.FCFS"
    factors = factors_of(spec, {"a": [], "b": [other]})
    assert [of["policy"] for of in factors.values()] == ["Priority" if typed else "fcfs", "FCFS"]
