"""Blocks on the CPU: the most at once, and a bound that the GPU's pool sets."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedsim.build import BATCHINGS
from pagedsim.core import ConfigError, PagedMemory, PrefixMemory, Request, StepPlan
from tests.core.cases import Case, cases
from tests.core.drive import Server
from tests.core.run import Run

FEWER = settings(max_examples=settings().max_examples // 3)


@pytest.mark.parametrize("kind", [PagedMemory, PrefixMemory])
@pytest.mark.parametrize(("bound", "peak", "recomputed"), [(False, 13, 0), (True, 7, 6)])
def test_what_is_swapped_can_outgrow_the_gpu(
    kind: type[PagedMemory], bound: bool, peak: int, recomputed: int
) -> None:
    """Four prompts of 3 tokens fill 12 blocks of 1. The one that stays grows into what the swapped
    leave, and so d leaves with 3 blocks, c with 4 and b with 6: 13, where the GPU has 12."""
    server = Server(memory=kind(12, 1, cpu_blocks=24, swap_bound=bound), preemption="swap")
    a, b, c, d = (server.add(name, 3, 9) for name in "abcd")
    while not b.preemptions:
        server.step()
    assert [r.swapped_blocks for r in (a, d, c)] == [0, 3, 4]
    assert (b.swapped_blocks, b.recomputed_tokens) == (6 - recomputed, recomputed)
    assert server.memory.cpu_peak == peak
    while any(r.alive for r in (a, b, c, d)):
        server.step()
    assert [r.generated for r in (a, b, c, d)] == [9] * 4


def test_a_memory_without_a_cpu_pool_has_no_peak() -> None:
    assert PagedMemory(4).cpu_peak is None
    assert PagedMemory(4, cpu_blocks=4).cpu_peak == 0
    assert PagedMemory(4, cpu_blocks=9).cpu_total == 9
    assert PagedMemory(4, cpu_blocks=9, swap_bound=True).cpu_total == 4
    assert PagedMemory(4, cpu_blocks=3, swap_bound=True).cpu_total == 3


def test_a_bound_is_true_or_false() -> None:
    with pytest.raises(ConfigError, match=r"swap_bound='no': must be true or false"):
        PrefixMemory(4, swap_bound="no")


class Watched(Run):
    """Looks at the CPU pool after every plan."""

    most = 0

    def _audit_plan(self, plan: StepPlan, waiting: set[Request]) -> None:
        super()._audit_plan(plan, waiting)
        memory = self.scheduler.memory
        self.most = max(self.most, memory.cpu_total - memory.cpu_free)
        held = {block for request in self.scheduler.swapped for block in _blocks(request)}
        assert len(held) <= memory.total


def _blocks(request: Request) -> list[int]:
    return [block for table in request.cpu_tables for block in table]


@pytest.mark.parametrize("batching", BATCHINGS)
@pytest.mark.parametrize("memory", ["paged", "prefix"])
@FEWER
@given(data=st.data())
def test_the_cpu_never_holds_more_than_the_gpu_could(
    batching: str, memory: str, data: st.DataObject
) -> None:
    """Where there is room on the CPU for three times as much, and all requests are swapped."""
    case: Case = data.draw(cases(batching, memory))
    blocks = case.server.blocks
    more = replace(case.server, preemption="swap", cpu_blocks=3 * blocks, swap_bound=True)
    run = Watched(replace(case, server=more))
    run.go()
    assert run.scheduler.memory.cpu_peak == run.most
