"""The list of policies: all of them, and those of others."""

from __future__ import annotations

import sys
from importlib.metadata import EntryPoint
from typing import Any, get_args

import pytest

from pagedsim import build
from pagedsim.__main__ import command
from pagedsim.build import (
    POLICIES,
    inner_policy,
    make_policy,
    plugin_policies,
    policies,
)
from pagedsim.core import ConfigError, Policy
from pagedsim.core.policy import Need
from pagedsim.policies.victims import VICTIMS
from pagedsim.run.help import NEEDS, incompatible, policies_page
from pagedsim.user_error import UserError


class Offered(Policy):
    """A plugin."""


@pytest.fixture
def offers(monkeypatch: pytest.MonkeyPatch) -> Any:
    def offer(**paths: str) -> None:
        points = [EntryPoint(name, path, build.PLUGIN_GROUP) for name, path in paths.items()]
        monkeypatch.setattr(build, "entry_points", lambda group: points)
        plugin_policies.cache_clear()

    yield offer
    monkeypatch.undo()
    plugin_policies.cache_clear()


def test_every_policy_and_every_victim_is_on_the_page_once() -> None:
    page = policies_page()
    starts = [line.split()[0] for line in page.splitlines() if line and line[0] != " "]
    assert [name for name in starts if name in POLICIES] == list(POLICIES)
    assert all(f"\n  {victim} " in page for victim in VICTIMS)
    assert max(map(len, page.splitlines())) <= 96
    assert NEEDS.keys() == set(get_args(Need))


def test_incompatible_settings_are_found_by_trying() -> None:
    assert incompatible("fcfs") == []
    (line,) = incompatible("srpt")
    assert line.startswith("batching=static: SRPT displaces running requests")
    (line,) = incompatible("continuum")
    assert line.startswith("memory=paged: Continuum pins blocks of a prefix cache")


def test_a_plugin_goes_by_its_name(offers: Any) -> None:
    offers(mine=f"{__name__}:Offered")
    assert type(make_policy("mine")).__name__ == "Offered"


def test_a_name_that_is_taken_is_left_as_it_is(offers: Any) -> None:
    offers(fcfs=f"{__name__}:Offered")
    assert policies()["fcfs"] is POLICIES["fcfs"]


def test_a_plugin_that_cannot_be_imported(offers: Any) -> None:
    offers(mine="no_such_module:Policy")
    with pytest.raises(ConfigError, match=r"policy=no_such_module\.Policy: cannot be imported"):
        make_policy("mine")
    assert type(make_policy("fcfs")) is POLICIES["fcfs"]  # no plugin replaces it


def test_a_broken_plugin_and_a_taken_name_are_noted_on_the_page(offers: Any) -> None:
    offers(broken="no_such_module:Policy", mine=f"{__name__}:Offered", fcfs=f"{__name__}:Offered")
    page = policies_page()
    assert "\nmine              A plugin.\n" in page
    unwrapped = " ".join(page.split())
    assert "broken not there: entry point broken = no_such_module:Policy: " in unwrapped
    assert f"not that of entry point fcfs = {__name__}:Offered: the name is taken" in unwrapped
    with pytest.raises(ConfigError, match=r"^entry point broken = no_such_module:Policy: policy="):
        policies()


def test_plugins_are_among_the_choices(offers: Any) -> None:
    offers(mine=f"{__name__}:Offered")
    for choose in (make_policy, inner_policy):
        with pytest.raises(ConfigError, match=r"choose from .*, ltr, mine, mlfq"):
            choose("absent")


def test_the_page_takes_no_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["pagedsim", "policies", "foo"])
    with pytest.raises(UserError, match="policies foo: takes no words"):
        command()
