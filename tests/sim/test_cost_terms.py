"""The table of cost terms: an entry that is added to it is in every answer."""

import numpy as np
import pytest

from pagedsim.sim.cost import Roofline
from pagedsim.sim.cost.base import Bound
from pagedsim.sim.cost.split import Totals
from pagedsim.sim.cost.terms import ByTerms, CostTerm
from pagedsim.sim.stack import Stack
from tests.sim.shapes import plan, replica

WHERE = replica("llama-3.1-8b", "h100")
STEP = plan(100, (50, 20), decodes=30, context=9000)


class Table(ByTerms):
    """A table, where swaps take no time."""

    def swap_seconds(self, blocks: int) -> float:
        return 0.0


def test_a_term_of_its_own_kernel_adds_to_every_answer() -> None:
    base = Roofline(WHERE)
    term = CostTerm("norms", "norms", "bandwidth", Totals(token=1e-6, sequence=1e-5, step=1e-4))
    more = Table(WHERE, (*base.terms, term))
    added = 150 * 1e-6 + 32 * 1e-5 + 1e-4
    assert more.step_seconds(STEP) - base.step_seconds(STEP) == pytest.approx(added)
    decodes = more.decode_seconds(30, 9000) - base.decode_seconds(30, 9000)
    assert decodes == pytest.approx(30 * 1e-6 + 30 * 1e-5 + 1e-4)
    again = more.recompute_seconds(777) - base.recompute_seconds(777)
    assert again == pytest.approx(777e-6 + 1e-5 + 1e-4)
    told = {term.name: term.seconds for term in more.explain(STEP).terms}
    assert told["norms"] == pytest.approx(added)
    assert more.explain(STEP).seconds == pytest.approx(more.step_seconds(STEP))
    # A step that computes nothing does not pay for it.
    assert more.step_seconds(plan()) == base.step_seconds(plan())


@pytest.mark.parametrize("decodes", [1, 30, 2000])
def test_terms_of_one_resource_add_up_and_the_longest_resource_counts(decodes: int) -> None:
    base = Roofline(WHERE)
    term = CostTerm("products", "activations", "bandwidth", Totals(token=2e-6))
    more = Table(WHERE, (*base.terms, term))
    step = plan(decodes=decodes, context=1000 * decodes)
    compute, weights = (entry.of(Totals(decodes, decodes, step=1)) for entry in base.terms[:2])
    found = more.decode_seconds(decodes, 1000 * decodes) - base.decode_seconds(
        decodes, 1000 * decodes
    )
    reading = weights + decodes * 2e-6
    assert found == pytest.approx(max(compute, reading) - max(compute, weights), abs=1e-15)
    names = {term.name for term in more.explain(step).terms}
    products = {"matrix products"} if compute > reading else {"weights", "activations"}
    assert names & {"matrix products", "weights", "activations"} == products
    assert more.explain(step).seconds == pytest.approx(more.step_seconds(step), rel=1e-12)


def test_a_term_of_the_host_is_hidden_like_the_others() -> None:
    base = Roofline(WHERE)
    term = CostTerm("tokenizer", "tokenizer", "host", Totals(sequence=1e-3))
    more = Table(WHERE, (*base.terms, term))
    step = plan(decodes=30, context=9000)
    step.ahead = True
    stack = Stack()
    step_host = 1e-3 * stack.host_step_ms
    host = 30 * (1e-3 + 1e-6 * stack.host_request_us) + step_host
    gpu = sum(t.seconds for t in more.explain(step).terms if t.bound != "host")
    assert host > gpu
    assert more.step_seconds(step) == pytest.approx(host)
    assert more.explain(step).seconds == pytest.approx(host)
    assert more.step_seconds(plan()) == base.step_seconds(plan()) == step_host


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("total", Totals._fields)
@pytest.mark.parametrize("bound", ["host", "compute"])
def test_a_term_may_grow_with_any_total(bound: Bound, total: str, ahead: bool) -> None:
    """All answers for a step hold for its decodes and for async scheduling as well."""
    where = replica("mixtral-8x7b", "h100", tensor_parallel=2)
    base = Roofline(where)
    term = CostTerm("new", "new", bound, Totals(**{total: 1.0}))
    more = Table(where, (*base.terms, term), unchosen=0.75)
    for step in (plan(100, (50, 20), decodes=30, context=900), plan(decodes=3, context=90)):
        step.ahead = ahead
        assert more.explain(step).seconds == pytest.approx(more.step_seconds(step), rel=1e-12)


def test_what_decodes_read_can_overlap_nothing_that_grows_otherwise() -> None:
    """The fast path of decodes tells it from all else, which does not change with every step."""
    term = CostTerm("decodes", "sampling", "compute", Totals(sequence=1e-6))
    with pytest.raises(ValueError, match="can overlap nothing else"):
        Table(WHERE, (*Roofline(WHERE).terms, term))


@pytest.mark.parametrize("stack", [Stack(), Stack(launch_us=200.0, layer_us=0.0)])
@pytest.mark.parametrize("of", [("llama-3.1-8b", "h100"), ("mixtral-8x7b", "a100-80gb")])
def test_many_steps_at_once_take_as_long_as_each(of: tuple[str, str], stack: Stack) -> None:
    cost = Roofline(replica(*of, tensor_parallel=2), stack=stack)
    steps = [
        plan(100, (50, 20), decodes=30, context=9000),
        plan(8192),
        plan(decodes=1, context=1),
        plan(decodes=256, context=500_000),
    ]
    rows = [
        (
            *(one.prefill_tokens + one.decode_count, len(one.chunks) + one.decode_count),
            *(one.prefill_pairs, one.prefill_context - one.prefill_tokens, one.decode_context, 1),
        )
        for one in steps
    ]
    found = cost.seconds_of(np.array(rows, dtype=float)).tolist()
    assert found == pytest.approx([cost.step_seconds(one) for one in steps], rel=1e-12)
