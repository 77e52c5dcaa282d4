"""The check of autoscalers passes those that keep their promises, and names a broken one."""

from __future__ import annotations

import random
from threading import Lock
from typing import Any

import pytest

from pagedsim.build import AUTOSCALERS, make_autoscaler
from pagedsim.policies.autoscaling import Autoscaler, ScalingView
from pagedsim.testing import check_autoscaler


class Most(Autoscaler):
    def desired(self, view: ScalingView) -> Any:
        return view.max_replicas + 3  # the run keeps it within the bounds


class Halves(Most):
    def desired(self, view: ScalingView) -> Any:
        return len(view.replicas) / 2


class Drawn(Most):
    def desired(self, view: ScalingView) -> Any:
        return random.randint(1, view.max_replicas)


class Local(Most):
    def __init__(self) -> None:
        self.count = Lock()


@pytest.mark.parametrize("name", AUTOSCALERS)
def test_the_rules_of_pagedsim_keep_their_promises(name: str) -> None:
    bounds = {"up": 1, "down": 3} if name == "freeness" else {"up": 2, "down": 0.5}
    check_autoscaler(lambda: make_autoscaler(name, **bounds), cases=6)


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        (Halves, r"Halves: Halves\.desired gave 0\.5: must be a whole number of at least 0, in ca"),
        (Drawn, r"Drawn\.desired gave \d and \d at [\d.]+ s in two runs of the same requests"),
        (Local, r"Local: cannot be copied: TypeError: .*lock"),
    ],
)
def test_the_first_broken_promise_is_named(kind: type[Autoscaler], told: str) -> None:
    with pytest.raises(AssertionError, match=rf"^{told}") as error:
        check_autoscaler(kind)
    assert "\n" not in str(error.value)
