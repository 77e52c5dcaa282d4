"""What a policy goes by, and what is said where the requests lack it."""

from __future__ import annotations

from typing import Any

import pytest

from pagedsim.core import ConfigError, Policy
from pagedsim.run.parts import refuse_unmet, remarks
from pagedsim.workload import Workload
from policies.aging import Aging
from policies.fairness import DRR, VTC
from policies.ordering import FCFS, Priority
from policies.slo import SLO
from policies.victims import VictimRule

CLIENTS: dict[str, Any] = {"client": [0, 1, 1], "clients": ("a", "b")}


def three(**columns: Any) -> Workload:
    return Workload.of([0.0, 1.0, 2.0], [8, 8, 8], [4, 4, 4], **columns)


@pytest.mark.parametrize(
    ("policy", "lacks", "columns"),
    [
        (VTC(), "VTC goes by clients, and all requests are of one", CLIENTS),
        (Aging(DRR()), "DRR goes by clients, and all requests are of one", CLIENTS),
        (SLO(), "SLO goes by priorities, and all requests have the same", {"priority": [0, 0, 1]}),
        (Priority(), "Priority goes by priorities, and all requests", {"priority": [0, 0, 1]}),
    ],
)
def test_a_policy_that_finds_nothing_to_go_by_is_told(
    policy: Policy, lacks: str, columns: dict[str, Any]
) -> None:
    (line,) = remarks(policy, three())
    assert line.startswith(lacks) and ": alone it is first come, first served; set " in line
    assert list(remarks(policy, three(**columns))) == []


def test_who_goes_by_nothing_lacks_nothing() -> None:
    assert list(remarks(FCFS(), three())) == []


def test_requests_without_a_target_are_counted() -> None:
    around = Aging(SLO({0: 1.0, 1: 5.0}))
    assert list(remarks(around, three(priority=[0, 1, 2]))) == [
        "1 of 3 requests have no target, since their priority is beyond those of "
        "policy.of.targets (0, 1): they go last"
    ]
    assert list(remarks(around, three(priority=[0, 0.5, 1]))) == []


@pytest.mark.parametrize(
    ("policy", "key"),
    [
        (VTC(weights={"c": 2}), "policy"),
        (VictimRule(DRR(weights={"c": 2}), "last"), "policy"),
        (Aging(Aging(VTC(weights={"c": 2}))), "policy.of.of"),
    ],
)
def test_a_weight_of_an_unknown_client_is_refused(policy: Policy, key: str) -> None:
    for columns, there in (({}, "it has none with a name"), (CLIENTS, "choose from a, b")):
        with pytest.raises(ConfigError) as error:
            refuse_unmet(policy, three(**columns))
        assert str(error.value) == f"{key}.weights.c: no such client in the workload; {there}"


def test_a_weight_of_a_known_client_is_accepted() -> None:
    refuse_unmet(VTC(weights={"a": 2}), three(**CLIENTS))
