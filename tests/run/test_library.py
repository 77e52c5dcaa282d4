"""The list of policies: all of them, and those of others."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import EntryPoint, EntryPoints
from typing import Any, get_args

import pytest

from pagedsim import build
from pagedsim.__main__ import command
from pagedsim.build import (
    POLICIES,
    inner_policy,
    make_autoscaler,
    make_memory,
    make_policy,
    plugins,
    policies,
)
from pagedsim.core import ConfigError, PagedMemory, Policy
from pagedsim.core.policy import Need
from pagedsim.policies.autoscaling import Autoscaler, ScalingView
from pagedsim.policies.victims import VICTIMS
from pagedsim.run.help import NEEDS, policies_page
from pagedsim.user_error import UserError


class Offered(Policy):
    """A plugin."""


class Blocks(PagedMemory):
    """A memory with a setting of its own."""

    def __init__(self, blocks: int, block_size: int = 16, cpu_blocks: int = 0, odd: int = 0):
        super().__init__(blocks, block_size, cpu_blocks)
        self.odd = odd


class Both(Autoscaler):
    """As many as that."""

    def __init__(self, count: int = 2) -> None:
        self.count = count

    def desired(self, view: ScalingView) -> int:
        return self.count


OTHERS = [
    EntryPoint("blocks", f"{__name__}:Blocks", "pagedsim.memories"),
    EntryPoint("paged", f"{__name__}:Blocks", "pagedsim.memories"),
    EntryPoint("both", f"{__name__}:Both", "pagedsim.autoscalers"),
    EntryPoint("whole", "pagedsim.core:Unified", "pagedsim.batchings"),
    EntryPoint("first", "pagedsim.policies.routing.simple:Uniform", "pagedsim.routers"),
    EntryPoint("flat", "pagedsim.sim.cost:Roofline", "pagedsim.costs"),
]
"""Plugins of other kinds."""


@pytest.fixture
def offers(monkeypatch: pytest.MonkeyPatch) -> Any:
    def offer(**paths: str) -> None:
        offered = [EntryPoint(name, path, "pagedsim.policies") for name, path in paths.items()]
        points = EntryPoints([*offered, *OTHERS])
        monkeypatch.setattr(build, "_installed", lambda: points)
        plugins.cache_clear()

    yield offer
    monkeypatch.undo()
    plugins.cache_clear()


def test_every_policy_and_every_victim_is_on_the_page_once() -> None:
    page = policies_page()
    starts = [line.split()[0] for line in page.splitlines() if line and line[0] != " "]
    assert [name for name in starts if name in POLICIES] == list(POLICIES)
    assert all(f"\n  {victim} " in page for victim in VICTIMS)
    assert max(map(len, page.splitlines())) <= 96
    assert NEEDS.keys() == set(get_args(Need))


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


def test_plugins_of_every_kind_are_options(offers: Any, call: Callable[..., Any]) -> None:
    offers()
    words = ("workload.requests=10", "seeds=1", "tracking=none", "report=false", "fleet.replicas=3")
    code, _, errors = call(
        *("experiment=single", *words, "memory=blocks", "memory.block_size=8", "+memory.odd=3"),
        *("batching=whole", "router=first", "cost=flat", "fleet.autoscale.rule=both"),
    )
    assert (code, errors) == (0, "")
    assert type(make_memory("blocks", blocks=9, odd=1)).__name__ == "Blocks"
    assert type(make_memory("paged", blocks=9)) is PagedMemory
    with pytest.raises(ConfigError, match="choose from both, freeness, kv, queue"):
        make_autoscaler("bot")


def test_the_page_takes_no_words() -> None:
    with pytest.raises(UserError, match="policies foo: takes no words"):
        command(["policies", "foo"])
