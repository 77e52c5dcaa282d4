"""A plan as flat inputs."""

from __future__ import annotations

from typing import Any

import torch

from pagedsim.build import make_memory, make_scheduler
from pagedsim.core import Continuation, Request, SamplingParams, Scheduler, StepPlan
from pagedsim.engine.batch import Batch, flat_batch
from pagedsim.engine.inputs import ALIGNMENT, Inputs
from pagedsim.engine.rows import Rows


def server(**settings: Any) -> Scheduler:
    given = {"batching": "unified", "max_seqs": 8, "max_batched_tokens": 8, "max_model_len": 32}
    return make_scheduler(memory=make_memory(blocks=16, block_size=4), **{**given, **settings})


def flat(plan: StepPlan) -> Batch:
    return flat_batch(plan, Rows(seqs=8, blocks=8, block_size=4))


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
    assert [(r.id, rows) for r, rows in batch.samplers] == [("a", 1)]
    assert batch.attention.num_decodes == 1
    assert batch.attention.chunks == ((7, 7),)
    a, b = (scheduler.requests[name].tables[0] for name in "ab")
    assert batch.attention.slots.tolist() == [
        a[0] * 4 + 3,
        *(b[i // 4] * 4 + i % 4 for i in range(7)),
    ]
    scheduler.commit(plan, 0, {"a": 51})
    batch = flat(scheduler.plan(0))
    assert batch.input_ids.tolist() == [51, *range(27, 32)]
    assert batch.logits_at.tolist() == [0, 5]
    assert [(r.id, rows) for r, rows in batch.samplers] == [("a", 1), ("b", 1)]


def test_a_group_has_one_row_for_its_first_token_and_then_one_a_sequence() -> None:
    scheduler = server()
    scheduler.add(Request("g", [1, 2, 3, 4, 5], SamplingParams(n=2)), now=0)
    plan = scheduler.plan(0)
    assert flat(plan).samplers == [(scheduler.requests["g"], 1)]
    scheduler.commit(plan, 0, {"g": Continuation((7, 8))})
    plan = scheduler.plan(0)
    batch = flat(plan)
    assert batch.input_ids.tolist() == [7, 8]
    assert batch.samplers == [(scheduler.requests["g"], 2)]
    one, other = scheduler.requests["g"].tables
    assert batch.attention.slots.tolist() == [one[1] * 4 + 1, other[1] * 4 + 1]
    assert one[0] == other[0] and one[1] != other[1]


def test_what_was_generated_is_computed_again_after_a_preemption() -> None:
    scheduler = server(batching="prefill_first", max_batched_tokens=32)
    scheduler.add(Request("a", [10, 11, 12]), now=0)
    for token in (50, 51):
        scheduler.commit(scheduler.plan(0), 0, {"a": token})
    plan = scheduler.plan(0)
    scheduler.preempt(plan, scheduler.requests["a"])  # as a batching would, short of memory
    plan.decodes, plan.decode_count = (), 0
    scheduler.commit(plan, 0, {})
    batch = flat(scheduler.plan(0))
    assert batch.input_ids.tolist() == [10, 11, 12, 50, 51]
    assert batch.logits_at.tolist() == [4]


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
    assert there.samplers is here.samplers
