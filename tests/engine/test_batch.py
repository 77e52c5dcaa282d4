"""A plan as flat inputs."""

from __future__ import annotations

import pickle
import random
from typing import Any

import numpy as np
import pytest
import torch

from pagedsim.build import make_memory, make_scheduler
from pagedsim.core import Continuation, Request, SamplingParams, Scheduler, StepPlan
from pagedsim.engine.batch import Batch
from pagedsim.engine.inputs import ALIGNMENT, Inputs, Places
from pagedsim.engine.rows import Computing, Rows
from pagedsim.engine.step_inputs import StepInputs, inputs_of, samplers_of
from pagedsim.engine.step_inputs import flat as flat_of


def server(**settings: Any) -> Scheduler:
    given = {"batching": "unified", "max_seqs": 8, "max_batched_tokens": 8, "max_model_len": 32}
    return make_scheduler(memory=make_memory(blocks=16, block_size=4), **{**given, **settings})


def flat(plan: StepPlan) -> Batch:
    return Batch.of(*flat_of(plan, Rows(seqs=8, blocks=8, block_size=4)))


def test_decodes_come_first_then_chunks() -> None:
    scheduler = server()
    scheduler.add(Request("a", [10, 11, 12]), now=0)
    plan = scheduler.plan(0)
    scheduler.commit(plan, 0, {"a": 50})
    scheduler.add(Request("b", range(20, 32)), now=0)  # longer than what the step has left
    plan = scheduler.plan(0)
    batch = flat(plan)
    assert batch.input_ids.tolist() == [50, *range(20, 27)]
    assert batch.positions.tolist() == [3, *range(7)]
    assert batch.logits_at.tolist() == [0]  # b's prompt is not at its end
    assert [(r.id, rows) for r, rows in samplers_of(plan)] == [("a", 1)]
    assert batch.attention.num_decodes == 1
    assert batch.attention.chunks == ((7, 7),)
    a, b = (scheduler.requests[name].tables[0] for name in "ab")
    assert batch.attention.slots.tolist() == [
        a[0] * 4 + 3,
        *(b[i // 4] * 4 + i % 4 for i in range(7)),
    ]
    scheduler.commit(plan, 0, {"a": 51})
    plan = scheduler.plan(0)
    batch = flat(plan)
    assert batch.input_ids.tolist() == [51, *range(27, 32)]
    assert batch.logits_at.tolist() == [0, 5]
    assert [(r.id, rows) for r, rows in samplers_of(plan)] == [("a", 1), ("b", 1)]


def test_a_group_has_one_row_for_its_first_token_and_then_one_a_sequence() -> None:
    scheduler = server()
    scheduler.add(Request("g", [1, 2, 3, 4, 5], SamplingParams(n=2)), now=0)
    plan = scheduler.plan(0)
    assert samplers_of(plan) == [(scheduler.requests["g"], 1)]
    scheduler.commit(plan, 0, {"g": Continuation((7, 8))})
    plan = scheduler.plan(0)
    batch = flat(plan)
    assert batch.input_ids.tolist() == [7, 8]
    assert samplers_of(plan) == [(scheduler.requests["g"], 2)]
    one, other = scheduler.requests["g"].tables
    assert batch.attention.slots.tolist() == [one[1] * 4 + 1, other[1] * 4 + 1]
    assert one[0] == other[0] and one[1] != other[1]


def test_what_was_generated_is_computed_again_after_a_preemption() -> None:
    scheduler = server(batching="prefill_first", max_batched_tokens=32)
    scheduler.add(Request("a", [10, 11, 12]), now=0)
    for token in (50, 51):
        scheduler.commit(scheduler.plan(0), 0, {"a": token})
    plan = scheduler.plan(0)
    scheduler.queues.preempt(plan, scheduler.requests["a"])  # as a batching would, short of memory
    plan.decodes, plan.decode_count = (), 0
    scheduler.commit(plan, 0, {})
    batch = flat(scheduler.plan(0))
    assert batch.input_ids.tolist() == [10, 11, 12, 50, 51]
    assert batch.logits_at.tolist() == [4]


def test_work_is_the_same_where_it_was_sent() -> None:
    scheduler = server()
    scheduler.add(Request("a", [10, 11, 12]), now=0)
    rows = Rows(seqs=8, blocks=8, block_size=4)
    for step in range(3):
        if step == 1:
            scheduler.add(Request("b", range(20, 23)), now=0)
        plan = scheduler.plan(0)
        plan.swap_out, plan.copies, plan.swap_in = [(1, 2)], {3: 4}, [(5, 6)]  # as if it had any
        inputs = inputs_of(plan, rows)
        there: StepInputs = pickle.loads(pickle.dumps(inputs))
        assert (there.swap_out, there.copies, there.swap_in) == ([(1, 2)], {3: 4}, [(5, 6)])
        assert (there.mixed is None) is (step == 2)
        assert there.computing is not None and inputs.computing is not None
        np.testing.assert_equal(there.computing._asdict(), inputs.computing._asdict())
        assert (there.mixed or ())[2:] == (inputs.mixed or ())[2:]
        scheduler.commit(plan, 0, {request.id: 50 for request in sampling(plan)})


def test_inputs_come_over_whole_and_aligned() -> None:
    inputs = Inputs(torch.device("cpu"), room=64)
    rng = torch.Generator().manual_seed(4)
    for count in (3, 0, 70, 5):  # grows on the way, and has room left afterwards
        sent = [
            torch.randint(1 << 40, (count,), generator=rng),
            torch.randint(99, (count, 7), generator=rng, dtype=torch.int32),
            torch.randint(99, (1,), generator=rng, dtype=torch.int32),
            torch.randint(1 << 40, (2 * count,), generator=rng),
        ]
        placed = inputs.place(sent)
        assert all(torch.equal(one, other) for one, other in zip(placed, sent, strict=True))
        assert [one.dtype for one in placed] == [one.dtype for one in sent]
        assert all(one.data_ptr() % ALIGNMENT == 0 for one in placed)


def test_a_batch_is_the_same_on_its_device() -> None:
    scheduler = server()
    scheduler.add(Request("a", [10, 11, 12]), now=0)
    scheduler.add(Request("b", range(20, 28)), now=0)
    here = flat(scheduler.plan(0))
    there = here.on(Inputs(torch.device("cpu")))
    for name in ("input_ids", "positions", "logits_at"):
        assert torch.equal(getattr(there, name), getattr(here, name))
    for name in ("block_tables", "query_start", "context_lens", "slots"):
        assert torch.equal(getattr(there.attention, name), getattr(here.attention, name))
    assert there.attention.chunks == here.attention.chunks
    assert there.attention.num_decodes == here.attention.num_decodes


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("swaps", [False, True])
def test_rows_are_those_of_the_block_tables(seed: int, swaps: bool) -> None:
    """Whoever comes, forks, reorders, is preempted and comes back, row by row."""
    rng = random.Random(seed)
    size, seqs, longest = rng.choice([1, 2, 3]), 8, 24
    scheduler = make_scheduler(
        memory=make_memory(
            rng.choice(["paged", "prefix"]), blocks=48 // size, block_size=size, cpu_blocks=60
        ),
        batching=rng.choice(["prefill_first", "unified"]), max_seqs=seqs, max_model_len=longest,
        max_batched_tokens=longest, preemption="swap" if swaps else "recompute",
    )  # fmt: skip
    rows = Rows(seqs, -(-longest // size), size)
    preempted = looked = 0
    for number in range(300):
        if rng.random() < 0.4:
            params = SamplingParams(n=rng.randint(1, 3), max_tokens=rng.randint(1, 12))
            scheduler.add(Request(number, [rng.randrange(9) for _ in range(9)], params), now=0)
        plan = scheduler.plan(0)
        preempted += len(plan.preempted)
        if plan.decodes and rng.random() < 0.9:
            looked += 1
            check(rows.decoding(plan.decodes), plan, size)
        scheduler.commit(plan, 0, {request.id: answer(request, rng) for request in sampling(plan)})
    assert preempted and looked > 50


def check(found: Computing, plan: StepPlan, size: int) -> None:
    tables = [table for request in plan.decodes for table in request.tables]
    lengths = [request.num_tokens for request in plan.decodes for _ in request.tables]
    last = [output[-1] for request in plan.decodes for output in request.outputs]
    assert found.ids.tolist() == last
    assert found.contexts.tolist() == lengths
    for i, (table, length) in enumerate(zip(tables, lengths, strict=True)):
        blocks = -(-length // size)
        assert found.tables[i, :blocks].tolist() == table[:blocks]
        assert found.positions[i] == length - 1
        assert found.slots[i] == table[blocks - 1] * size + (length - 1) % size
    assert found.tables.shape[1] == -(-max(lengths) // size)


def sampling(plan: StepPlan) -> list[Request]:
    return [*plan.decodes, *(chunk.request for chunk in plan.chunks if chunk.samples)]


def answer(request: Request, rng: random.Random) -> int | Continuation:
    """Tokens of a group, of which some sequences may end or go on from another."""
    if request.width == 1:
        return rng.randrange(9)
    count, parents = request.width, None
    if request.outputs and rng.random() < 0.5:
        count = rng.randint(1, request.width)
        parents = tuple(rng.choices(range(request.width), k=count))
    return Continuation(tuple(rng.randrange(9) for _ in range(count)), parents)


def test_places_hold_a_batch_and_padding_behind_it() -> None:
    places = Places(torch.device("cpu"), seqs=4, blocks=3)
    ids, positions, slots, contexts = (np.arange(4) + k for k in (1, 5, 9, 13))
    whole = Computing(ids, positions, slots, contexts, np.full((4, 2), 7, np.int32))
    wide = np.full((1, 3), 8, np.int32)
    part = Computing(ids[:1], positions[:1], slots[:1], contexts[:1], wide)
    for put, wanted in [
        (None, ([-1] * 4, [0] * 4)),
        (whole, ([9, 10, 11, 12], [13, 14, 15, 16])),
        (part, ([9, -1, -1, -1], [13, 0, 0, 0])),
    ]:
        if put is not None:
            places.put(put)
        ids_there, positions_there, batch, rows = places.batch(4)
        assert (batch.slots.tolist(), batch.context_lens.tolist()) == wanted
        assert rows.tolist() == [0, 1, 2, 3] and batch.query_start.tolist() == [0, 1, 2, 3, 4]
        if put is not None:
            count, width = put.tables.shape
            assert ids_there[:count].tolist() == put.ids.tolist()
            assert positions_there[:count].tolist() == put.positions.tolist()
            assert batch.block_tables[:count, :width].tolist() == put.tables.tolist()
            assert places.batch(count, width)[2].block_tables.tolist() == put.tables.tolist()
    for one in (ids_there, positions_there, batch.slots, batch.context_lens, batch.block_tables):
        assert one.data_ptr() % ALIGNMENT == 0
