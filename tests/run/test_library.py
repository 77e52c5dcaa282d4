"""The list of policies: all of them, and those of others."""

from __future__ import annotations

import sys
from importlib.metadata import EntryPoint
from types import SimpleNamespace
from typing import Any, get_args

import pytest

from pagedsim import build
from pagedsim.__main__ import command
from pagedsim.build import (
    POLICIES,
    inner_policy,
    make_policy,
    plugin_policies,
    plugin_sources,
    policies,
)
from pagedsim.core import ConfigError, Policy
from pagedsim.core.policy import Need
from pagedsim.run.help import NEEDS, incompatible, policies_page
from pagedsim.user_error import UserError
from policies.victims import VICTIMS


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
    starts = [line.split()[0] for line in policies_page().splitlines() if line and line[0] != " "]
    assert [name for name in starts if name in POLICIES] == list(POLICIES)
    assert all(f"\n  {victim} " in policies_page() for victim in VICTIMS)
    assert max(map(len, policies_page().splitlines())) <= 96


def test_what_a_policy_may_need_has_words() -> None:
    assert NEEDS.keys() == set(get_args(Need))
    assert {need for kind in POLICIES.values() for need in kind.needs} <= NEEDS.keys()


def test_what_does_not_go_together_is_found_by_trying() -> None:
    assert incompatible("fcfs") == []
    (line,) = incompatible("srpt")
    assert line.startswith("batching=static: SRPT displaces running requests")


def test_a_package_s_own_has_its_name(offers: Any) -> None:
    offers(mine=f"{__name__}:Offered")
    assert type(make_policy("mine")).__name__ == "Offered"
    assert "\nmine              A plugin.\n" in policies_page()


def test_a_name_that_is_taken_is_left_as_it_is(offers: Any) -> None:
    offers(fcfs=f"{__name__}:Offered")
    assert policies()["fcfs"] is POLICIES["fcfs"]


def test_an_offer_that_leads_nowhere_is_told(offers: Any) -> None:
    offers(mine="no_such_module:Policy")
    with pytest.raises(ConfigError, match=r"policy=no_such_module\.Policy: cannot be imported"):
        make_policy("mine")
    assert type(make_policy("fcfs")) is POLICIES["fcfs"]  # no plugin replaces it


def unwrapped() -> str:
    """The page, in one line."""
    return " ".join(policies_page().split())


def test_one_that_leads_nowhere_leaves_the_others_on_the_page(offers: Any) -> None:
    offers(broken="no_such_module:Policy", mine=f"{__name__}:Offered")
    assert "\nmine              A plugin.\n" in policies_page()
    assert "broken not there: entry point broken = no_such_module:Policy: " in unwrapped()
    with pytest.raises(ConfigError, match=r"^entry point broken = no_such_module:Policy: policy="):
        policies()


def test_a_package_is_named(monkeypatch: pytest.MonkeyPatch, offers: Any) -> None:
    offers(mine="no_such_module:Policy")
    monkeypatch.setattr(EntryPoint, "dist", SimpleNamespace(name="lab"), raising=False)
    assert plugin_sources("mine") == ["entry point mine = no_such_module:Policy of lab"]


def test_a_name_that_is_taken_is_noted(offers: Any) -> None:
    offers(fcfs=f"{__name__}:Offered")
    assert f"not that of entry point fcfs = {__name__}:Offered: the name is taken" in unwrapped()


def test_what_packages_offer_is_there_to_choose_from(offers: Any) -> None:
    offers(mine=f"{__name__}:Offered")
    for choose in (make_policy, inner_policy):
        with pytest.raises(ConfigError, match=r"choose from .*, ltr, mine, mlfq"):
            choose("absent")


@pytest.mark.parametrize("words", [["policies", "--help"], ["--help", "policies"]])
def test_the_page_has_help(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["pagedsim", *words])
    command()
    assert capsys.readouterr().out.startswith("python -m pagedsim policies\n  lists every policy")


def test_the_page_takes_no_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["pagedsim", "policies", "foo"])
    with pytest.raises(UserError, match="policies foo: takes no words"):
        command()
