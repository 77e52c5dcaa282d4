"""Results that do not depend on the rest of the batch, in Triton's interpreter.

See `interpreted.py` for how this file is run.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedsim.kernels import attention, decode, tuning
from pagedsim.kernels import ops as kernels
from pagedsim.kernels.parts import Parts, listed
from pagedsim.kernels.tiles import Split, Tiles
from pagedsim.kernels.tuning import Cut, Entry, Heads
from tests.kernels.cases import Case, check

SMALL = Tiles(rows=16, keys=16, warps=4, stages=2)
BATCH = Case(((1, 150), (1, 0), (1, 1), (1, 33), (1, 16)), kv_heads=1, head_dim=32)
SPLITS = [Split(16, 16), Split(16, 4), Split(48, 1), Split(32, 2), Split(128, 8)]


@pytest.fixture(params=SPLITS, ids=str)
def tuned(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Entry]:
    """A table with an entry for the "GPU" that tensors on a CPU are on."""
    heads = Heads(1, BATCH.group, BATCH.head_dim, 4)
    entry = Entry("", (9, 0), "decode", heads, SMALL, request.param)
    monkeypatch.setattr(tuning, "_table", lambda: {entry.key: entry})
    monkeypatch.setattr(kernels, "on_gpu", lambda tensor: True)
    tuning.decode.cache_clear()
    yield entry
    tuning.decode.cache_clear()


def attend(case: Case, which: slice = slice(None)) -> torch.Tensor:
    i = case.inputs
    return kernels.paged_decode(
        i.q[which], i.k_cache, i.v_cache, i.block_tables[which], i.context_lens[which],
        scale=case.scale, window=case.window,
    )  # fmt: skip


@pytest.mark.parametrize("window", [None, 40])
def test_a_sequence_alone_and_in_a_batch(tuned: Entry, window: int | None) -> None:
    case = replace(BATCH, window=window)
    together = attend(case)
    check(together, case)
    for n in range(len(case.sequences)):
        assert torch.equal(attend(case, slice(n, n + 1)), together[n : n + 1])


def test_a_chunk_alone_and_in_a_batch() -> None:
    """In launches for the same longest chunk, which is what its tiles depend on."""
    case = Case(((20, 90), (7, 7), (33, 50), (1, 40)), kv_heads=1, head_dim=32)
    i = case.inputs
    rest: dict[str, Any] = {"scale": case.scale, "max_query_len": 33}
    args = (i.k_cache, i.v_cache)
    together = attention.paged_attention(
        i.q, *args, i.block_tables, i.query_start, i.context_lens, **rest
    )
    check(together, case)
    for n in range(len(case.sequences)):
        begin, end = i.query_start[n : n + 2].tolist()
        alone = attention.paged_attention(
            i.q[begin:end], *args, i.block_tables[n : n + 1],
            i.query_start[n : n + 2] - begin, i.context_lens[n : n + 1], **rest,
        )  # fmt: skip
        assert torch.equal(alone, together[begin:end])


CONTEXTS = st.lists(st.integers(0, 200), min_size=1, max_size=6)


def cut_up(contexts: list[int], split: Split, window: int | None) -> Parts:
    q = torch.zeros(len(contexts), 2, 16)
    lengths = torch.tensor(contexts, dtype=torch.int32)
    return listed(q, 1, lengths, max(contexts), Cut(SMALL, split), window)


@given(CONTEXTS, st.sampled_from(SPLITS), st.none() | st.integers(1, 90))
def test_every_part_is_listed_once(contexts: list[int], split: Split, window: int | None) -> None:
    """As `Split` says it, which is also what fits in the room that there is."""
    found, expected = cut_up(contexts, split, window), []
    for number, context in enumerate(contexts):
        hidden = 0 if window is None else max(context - window, 0) // SMALL.keys * SMALL.keys
        parts = split.parts(context - hidden)
        assert parts <= split.most and parts * split.size(context - hidden) >= context - hidden
        expected += [number * split.most + part for part in range(parts)]
    assert found.items[: 1 + len(expected)].tolist() == [len(expected), *expected]
    assert len(expected) <= len(found.items) - 1 == len(found.sums) == len(found.marks)


@pytest.mark.slow
@settings(max_examples=8)
@given(CONTEXTS, st.sampled_from(SPLITS), st.sampled_from([None, 40]), st.integers(0, 9))
def test_any_sequence_alone_and_in_any_batch(
    contexts: list[int], split: Split, window: int | None, seed: int
) -> None:
    """Bit for bit, and the second layer of a step finds everything as the first did."""
    sequences = tuple((1, context) for context in contexts)
    case = Case(sequences, kv_heads=2, head_dim=16, window=window, seed=seed, seats=seed > 4)
    i, batch = case.inputs, case.batch
    rest: dict[str, Any] = {"scale": case.scale, "window": window, "tiles": SMALL, "split": split}
    args = (i.k_cache, i.v_cache)

    def layer() -> torch.Tensor:
        return decode.paged_decode(
            i.q, *args, i.block_tables, i.context_lens, rows=i.rows, once=batch.once, **rest
        )

    together = layer()
    check(together, case)
    assert torch.equal(layer(), together)
    (parts,) = batch._memo.values()
    assert not parts.done.any()
    for n in range(len(contexts)):
        tables, rows = batch.tables(slice(n, n + 1))
        alone = decode.paged_decode(
            i.q[n : n + 1], *args, tables, i.context_lens[n : n + 1], rows=rows, **rest
        )
        assert torch.equal(alone, together[n : n + 1])


def test_one_part_leaves_nothing_to_merge() -> None:
    case = Case(((1, 40), (1, 0), (1, 41), (1, 7)), kv_heads=1, head_dim=16)
    i, split = case.inputs, Split(48, 4)
    parts = listed(i.q, 1, i.context_lens, 64, Cut(SMALL, split), None)
    parts.sums.fill_(torch.nan)
    out = decode.paged_decode(
        i.q, i.k_cache, i.v_cache, i.block_tables, i.context_lens, scale=case.scale,
        tiles=SMALL, split=split, once=lambda key, make: parts,
    )  # fmt: skip
    check(out, case)
    assert parts.sums.isnan().all()


def test_parts_that_are_no_whole_tiles_are_refused() -> None:
    i = BATCH.inputs
    with pytest.raises(ValueError, match=r"^parts of 24 keys: must be a multiple of a tile's, 16"):
        decode.paged_decode(
            i.q, i.k_cache, i.v_cache, i.block_tables, i.context_lens, scale=1.0,
            tiles=SMALL, split=Split(24),
        )  # fmt: skip
