"""Plans as flat inputs: tokens, positions, slots and block tables of each sequence."""

from __future__ import annotations

import pickle
import random
from itertools import accumulate, takewhile
from typing import Any

import numpy as np
import pytest
import torch

from pagedsim.build import make_memory, make_scheduler
from pagedsim.core import Continuation, Request, SamplingParams, Scheduler, StepPlan
from pagedsim.engine import inputs as inputs_module
from pagedsim.engine.inputs import ALIGNMENT, Batch, DecodeInputs, PackedCopies
from pagedsim.engine.step_inputs import (
    BatchColumns,
    StepInputs,
    TableChanges,
    TableRows,
    samplers_of,
)

CPU = torch.device("cpu")


def server(**settings: Any) -> Scheduler:
    given = {"batching": "unified", "max_seqs": 8, "max_batched_tokens": 8, "max_model_len": 32}
    return make_scheduler(memory=make_memory(blocks=16, block_size=4), **{**given, **settings})


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("swaps", [False, True])
def test_rows_are_those_of_the_block_tables(seed: int, swaps: bool) -> None:
    """Requests arrive, fork, reorder, are preempted and come back; now and then all rows are
    forgotten."""
    rng = random.Random(seed)
    size, seqs, longest = rng.choice([1, 2, 3]), 8, 24
    scheduler = make_scheduler(
        memory=make_memory(
            rng.choice(["paged", "prefix"]), blocks=48 // size, block_size=size, cpu_blocks=60
        ),
        batching=rng.choice(["prefill_first", "unified"]), max_seqs=seqs, max_model_len=longest,
        max_batched_tokens=longest, preemption="swap" if swaps else "recompute",
    )  # fmt: skip
    width = -(-longest // size)
    rows, store = TableRows(seqs, width, size), np.full((seqs, width), -1)
    preempted = decoded = changed = 0
    for number in range(400):
        if rng.random() < 0.4:
            params = SamplingParams(n=rng.randint(1, 3), max_tokens=rng.randint(1, 12))
            scheduler.add(Request(number, [rng.randrange(9) for _ in range(9)], params), now=0)
        if rng.random() < 0.02:
            rows.forget()
            store[:] = -1
        plan = scheduler.plan(0)
        preempted += len(plan.preempted)
        decoded += bool(plan.decodes)
        inputs = StepInputs.build(plan, rows)
        changed += set_in(store, inputs.changes)
        if inputs.computing is not None:
            check(inputs, store, plan, size)
        scheduler.commit(plan, 0, {request.id: answer(request, rng) for request in sampling(plan)})
    assert preempted and decoded > 100 and changed


def set_in(store: np.ndarray, changes: TableChanges) -> int:
    assert len(set(changes.places.tolist())) == len(changes.places)
    store.reshape(-1)[changes.places] = changes.blocks
    return len(changes.places)


def check(inputs: StepInputs, store: np.ndarray, plan: StepPlan, size: int) -> None:
    """Against the plan, sequence by sequence."""
    wanted = [
        (table, request.num_tokens - 1, request.num_tokens, output[-1:])
        for request in plan.decodes
        for table, output in zip(request.tables, request.outputs, strict=True)
    ]
    for chunk in plan.chunks:
        request = chunk.request
        text = [*(request.prompt or ()), *(request.outputs or [[]])[chunk.sequence]]
        table = request.tables[chunk.sequence]
        wanted.append((table, chunk.start, chunk.context, text[chunk.start : chunk.context]))
    found, begin = inputs.computing, 0
    assert found is not None and len(set(found.rows.tolist())) == len(found.rows)
    assert found.contexts.tolist() == [end for _, _, end, _ in wanted]
    for row, (table, start, end, text) in zip(found.rows, wanted, strict=True):
        blocks = -(-end // size)
        assert store[row, :blocks].tolist() == table[:blocks]
        here = slice(begin, begin := begin + end - start)
        assert found.ids[here].tolist() == text
        assert found.positions[here].tolist() == list(range(start, end))
        slots = [table[at // size] * size + at % size for at in range(start, end)]
        assert found.slots[here].tolist() == slots
    assert begin == len(found.ids) == len(found.slots)
    assert inputs.written(size) == {slot // size for slot in found.slots.tolist()}
    assert samplers_of(plan) == [
        *((request, request.num_seqs) for request in plan.decodes),
        *((chunk.request, 1) for chunk in plan.chunks if chunk.samples),
    ]
    check_mixed(inputs, plan, [end - start for _, start, end, _ in wanted])


def sampling(plan: StepPlan) -> list[Request]:
    return [*plan.decodes, *(chunk.request for chunk in plan.chunks if chunk.samples)]


def answer(request: Request, rng: random.Random) -> int | Continuation:
    """Tokens of a group, of which some sequences may end or go on from another."""
    if request.num_seqs == 1:
        return rng.randrange(9)
    count, parents = request.num_seqs, None
    if request.outputs and rng.random() < 0.5:
        count = rng.randint(1, request.num_seqs)
        parents = tuple(rng.choices(range(request.num_seqs), k=count))
    return Continuation(tuple(rng.randrange(9) for _ in range(count)), parents)


def check_mixed(inputs: StepInputs, plan: StepPlan, lengths: list[int]) -> None:
    """Decodes come first, then chunks; those of one token at the front go with the decodes."""
    assert (inputs.mixed is None) is (not plan.chunks)
    if inputs.mixed is None:
        return
    assert inputs.computing is not None
    starts, contexts = [0, *accumulate(lengths)], inputs.computing.contexts.tolist()
    samples = [*[True] * (len(lengths) - len(plan.chunks)), *(one.samples for one in plan.chunks)]
    ends = [end - 1 for end, wanted in zip(starts[1:], samples, strict=True) if wanted]
    single = len(list(takewhile(lambda length: length == 1, lengths)))
    chunks = tuple(zip(lengths[single:], contexts[single:], strict=True))
    assert (inputs.mixed.starts.tolist(), inputs.mixed.sampling.tolist()) == (starts, ends)
    assert (inputs.mixed.decodes, inputs.mixed.chunks) == (single, chunks)


def test_only_what_is_new_is_sent() -> None:
    """A table is sent once, then a block when the last is full; other sequences are not visited."""
    scheduler = server(max_batched_tokens=32)
    rows = TableRows(rows=8, blocks=8, block_size=4)
    scheduler.add(Request("a", range(10, 19)), now=0)
    counts = []
    for step in range(12):
        if step == 3:
            scheduler.add(Request("b", range(3)), now=0)
        plan = scheduler.plan(0)
        counts.append(StepInputs.build(plan, rows).changes.places.tolist())
        scheduler.commit(plan, 0, {request.id: 50 for request in sampling(plan)})
    a, b = 0, 8  # where their rows begin
    assert counts == [
        [a, a + 1, a + 2], [], [], [b],
        [a + 3], [b + 1], [], [],
        [a + 4], [b + 2], [], [],
    ]  # fmt: skip


def test_a_block_that_becomes_another_is_sent_again() -> None:
    """Where a plan copies blocks a table may change in place, without forks or arrivals."""
    scheduler = server()
    scheduler.add(Request("a", range(10, 15)), now=0)
    rows = TableRows(rows=8, blocks=8, block_size=4)
    for step in range(3):
        plan = scheduler.plan(0)
        if step == 2:
            table = scheduler.requests["a"]._tables[0]
            plan._copies, table[1] = {11: table[1]}, 11
        inputs = StepInputs.build(plan, rows)
        scheduler.commit(plan, 0, {"a": 50})
    assert inputs.changes.places.tolist() == [1] and inputs.changes.blocks.tolist() == [11]
    assert inputs.computing is not None and inputs.computing.slots.tolist() == [11 * 4 + 2]


def test_inputs_are_the_same_in_another_process_and_on_a_device() -> None:
    scheduler = server()
    scheduler.add(Request("a", [10, 11, 12]), now=0)
    rows = TableRows(rows=8, blocks=8, block_size=4)
    for step in range(3):
        if step == 1:
            scheduler.add(Request("b", range(20, 23)), now=0)
        plan = scheduler.plan(0)
        plan._swap_out, plan._copies, plan._swap_in = ((1, 2),), {3: 4}, ((5, 6),)
        inputs = StepInputs.build(plan, rows)
        there: StepInputs = pickle.loads(pickle.dumps(inputs))
        assert (there.swap_out, there.copies, there.swap_in) == (((1, 2),), {3: 4}, ((5, 6),))
        assert (there.mixed is None) is (step == 2)
        assert there.computing is not None and inputs.computing is not None
        np.testing.assert_equal(there.computing._asdict(), inputs.computing._asdict())
        np.testing.assert_equal(there.changes._asdict(), inputs.changes._asdict())
        assert (there.mixed or ())[2:] == (inputs.mixed or ())[2:]
        if inputs.mixed is not None:
            given = inputs.computing, inputs.mixed, inputs.changes
            one, other = (
                Batch.of(*given, torch.zeros(8, 8, dtype=torch.int32), way)
                for way in (None, PackedCopies(CPU))
            )
            assert torch.equal(one.attention.slots, torch.from_numpy(inputs.computing.slots))
            for name in ("input_ids", "positions", "logits_at"):
                assert torch.equal(getattr(one, name), getattr(other, name))
            for name in ("block_tables", "rows", "query_start", "context_lens", "slots"):
                assert torch.equal(getattr(one.attention, name), getattr(other.attention, name))
            assert one.attention.chunks == other.attention.chunks == inputs.mixed.chunks
            assert one.attention.num_decodes == other.attention.num_decodes
        scheduler.commit(plan, 0, {request.id: 50 for request in sampling(plan)})


def test_inputs_come_over_whole_and_aligned() -> None:
    inputs = PackedCopies(torch.device("cpu"), room=64)
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


@pytest.mark.parametrize("room", [512, 0])
def test_places_hold_a_batch_and_padding_behind_it(
    room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when more changes at once than there is room for."""
    monkeypatch.setattr(inputs_module, "ROOM", room)
    places = DecodeInputs(CPU, seqs=4, blocks=3)
    ids, positions, slots, contexts = (np.arange(4) + k for k in (1, 5, 9, 13))
    whole = BatchColumns(ids, positions, slots, contexts, np.array([2, 0, 3, 1], np.int32))
    part = BatchColumns(ids[:1], positions[:1], slots[:1], contexts[:1], np.array([3], np.int32))
    many = TableChanges(np.array([0, 11, 4, 6, 7]), np.array([5, 6, 7, 8, 9], np.int32))
    one = TableChanges(np.array([11]), np.array([4], np.int32))
    nothing = TableChanges(np.array([], np.int64), np.array([], np.int32))
    tables = [5, 0, 0, 0, 7, 0, 8, 9, 0, 0, 0, 6]
    for put, changes, wanted in [
        (None, nothing, ([-1] * 4, [0] * 4, [0] * 12)),
        (whole, many, ([9, 10, 11, 12], [13, 14, 15, 16], tables)),
        (part, one, ([9, -1, -1, -1], [13, 0, 0, 0], [*tables[:-1], 4])),
        (whole, nothing, ([9, 10, 11, 12], [13, 14, 15, 16], [*tables[:-1], 4])),
    ]:
        if put is not None:
            places.put(put, changes)
        ids_there, positions_there, batch, wants = places.batch(4)
        found = batch.slots.tolist(), batch.context_lens.tolist()
        assert (*found, batch.block_tables[:4].flatten().tolist()) == wanted
        assert wants.tolist() == [0, 1, 2, 3] and batch.query_start.tolist() == [0, 1, 2, 3, 4]
        assert batch.rows is not None
        if put is not None:
            count = len(put.ids)
            assert ids_there[:count].tolist() == put.ids.tolist()
            assert positions_there[:count].tolist() == put.positions.tolist()
            assert batch.rows[:count].tolist() == put.rows.tolist()
    assert batch.rows is not None
    columns = ids_there, positions_there, batch.slots, batch.context_lens, batch.rows
    for column in (*columns, batch.block_tables):
        assert column.data_ptr() % ALIGNMENT == 0
