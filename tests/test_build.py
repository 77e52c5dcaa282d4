"""Names become objects, one description becomes a server, and both refuse what cannot be."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from pagedsim.build import (
    AUTOSCALERS,
    BATCHINGS,
    EVICTIONS,
    MEMORIES,
    POLICIES,
    PREEMPTIONS,
    ROUTERS,
    make_memory,
    make_policy,
    make_preemption,
)
from pagedsim.core import ConfigError
from pagedsim.policies.ordering import Priority
from pagedsim.policies.preemption import Cheapest
from pagedsim.server import ServerSpec
from pagedsim.spec.objects import locate

ROOT = Path(__file__).parents[1]
CONF = ROOT / "conf"

# -- names become objects, and a name that does not exist is answered with those that do -----------


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (lambda: make_policy("priority", displaces=True), "displaces|policy=priority|displace"),
        (lambda: make_policy(Priority(), displace=True), "displace"),
        (lambda: make_policy("no.such.Thing"), "policy=no.such.Thing|cannot be imported"),
        (lambda: make_policy("pagedsim.core.PagedMemory"), "pagedsim.core.PagedMemory|Policy"),
        (lambda: make_memory(16), "memory=16|Memory"),  # type: ignore[arg-type]
        (lambda: make_memory("paged"), "blocks|memory=paged"),
        (lambda: make_preemption("cheapest"), "prices|preemption=cheapest"),
    ],
)
def test_what_cannot_be_made_is_named(make: Callable[[], object], names: str) -> None:
    with pytest.raises(ConfigError) as error:
        make()
    assert all(name in str(error.value) for name in names.split("|"))


# -- one description of a server: what is made of it, and what it refuses --------------------------


class Free:
    """Prices of nothing."""

    def recompute_seconds(self, tokens: int) -> float:
        return 0.0

    def swap_seconds(self, blocks: int) -> float:
        return 0.0


@pytest.mark.parametrize(
    "preemption", ["cheapest", Cheapest, "pagedsim.policies.preemption.Cheapest"]
)
def test_prices_reach_the_preemption_that_weighs_them(preemption: Any) -> None:
    spec, prices = ServerSpec(preemption=preemption, blocks=4, cpu_blocks=4), Free()
    assert spec.weighs_prices
    known = spec.priced(prices)
    assert not known.weighs_prices
    assert known.may_swap
    found = known.scheduler().preemption
    assert isinstance(found, Cheapest)
    assert found.prices is prices
    other = ServerSpec(preemption="swap", blocks=4)
    assert other.priced(prices) is other


def test_a_preemption_that_weighs_prices_needs_them() -> None:
    with pytest.raises(ConfigError, match=r"^preemption: needs its prices first$"):
        ServerSpec(preemption=Cheapest, blocks=4, cpu_blocks=4).scheduler()


def test_sizes_go_to_a_file_and_back() -> None:
    spec = ServerSpec(max_seqs=3, blocks=9, cpu_blocks=0, kv_cache_dtype="fp8", policy="priority")
    assert ServerSpec(policy="priority").of_sizes({**spec.sizes(), "device": "CPU"}) == spec


def test_a_step_of_unified_has_a_token_for_every_sequence() -> None:
    assert ServerSpec(batching="unified", max_seqs=8, max_batched_tokens=8).step_tokens(4) == 8
    assert ServerSpec(batching="unified", max_seqs=3000, blocks=4).step_tokens(4) == 3000


# -- every name has an option, and stands in the docs ----------------------------------------------

OPTIONS = {
    "policy": POLICIES,
    "preemption": PREEMPTIONS,
    "batching": BATCHINGS,
    "memory": MEMORIES,
    "router": ROUTERS,
}


@pytest.mark.parametrize("group", OPTIONS)
def test_every_name_is_an_option_of_its_class(group: str) -> None:
    classes = {
        path.stem: locate(OmegaConf.load(path)._target_) for path in CONF.glob(f"{group}/*.yaml")
    }
    assert classes == OPTIONS[group]


def test_every_name_stands_in_the_docs() -> None:
    pages = "".join(path.read_text(encoding="utf-8") for path in ROOT.glob("docs/*.md"))
    names = [*PREEMPTIONS, *BATCHINGS, *MEMORIES, *EVICTIONS, *ROUTERS, *AUTOSCALERS]
    assert [name for name in names if not re.search(rf"[`=]{name}[`. ]", pages)] == []


@pytest.mark.parametrize(
    "path", [*CONF.glob("*/*.yaml")], ids=lambda path: f"{path.parent.name}={path.stem}"
)
def test_an_option_begins_with_what_it_is(path: Path) -> None:
    text = path.read_text(encoding="utf-8").removeprefix("# @package _global_\n")
    assert re.match(r"# \w", text)
