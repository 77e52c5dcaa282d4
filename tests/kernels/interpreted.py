"""What Triton's interpreter shows of attention: tiles, parts, 8 bits on each GPU, batches.

Not collected by itself: the interpreter is chosen for a whole process, when kernels are decorated.
`test_interpreter.py` runs this file in a process of its own; by hand:

    TRITON_INTERPRET=1 pytest tests/kernels/interpreted.py
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from triton.runtime.interpreter import InterpretedFunction

from pagedsim.kernels import attention, decode, ops, tuning
from pagedsim.kernels.batch import AttentionBatch
from pagedsim.kernels.float8 import FORMATS
from pagedsim.kernels.parts import Parts, listed
from pagedsim.kernels.tiles import Split
from pagedsim.kernels.tuning import Cut, Entry, Heads
from tests.kernels.cases import Case, check, for_a_graph
from tests.kernels.harness import HALF
from tests.kernels.test_attention import (
    DECODES,
    MIXED,
    SMALL,
    attend,
    cases,
    check_decodes,
    decode_all,
    decode_some,
)

CACHES: list[dict[str, Any]] = [
    {"cache": cache, **change}
    for cache in FORMATS
    for change in (
        {"group": 7, "head_dim": 80, "block_size": 12, **HALF},
        {"softcap": 50.0, "window": 17},
    )
]
EITHER = pytest.mark.parametrize("capability", [(8, 0), (9, 0)], ids=["sm_80", "sm_90"])


@pytest.mark.parametrize("length", [3, 40])
def test_attention_in_its_own_tiles(length: int) -> None:
    case = replace(MIXED, sequences=((length, 150), (1, 2)), head_dim=32)
    check(attend(case, None), case)


@pytest.mark.parametrize("rows", [16, 64])
def test_every_token_has_its_tile(rows: int) -> None:
    """Lengths about the size of a tile; with three heads a group a tile has a row to spare."""
    queries = rows // 3
    lengths = (queries, queries + 1, 0, 1, 2 * queries, queries - 1, 2 * queries + 1, 0)
    case = Case(tuple((n, n) for n in lengths), kv_heads=1, group=3, head_dim=16, tail=rows)
    check(attend(case, replace(SMALL, rows=rows, keys=64)), case)


@EITHER
@pytest.mark.parametrize("change", CACHES, ids=str)
def test_a_cache_of_8_bits(
    change: dict[str, Any], capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "capability", lambda device: capability)
    case = replace(MIXED, **change)
    check(attend(case), case)
    case = replace(DECODES, **change)
    check_decodes(case)


@EITHER
@pytest.mark.parametrize(
    ("cache", "reach"),
    [("fp8_e4m3", 6e4), ("fp8_e5m2", 1e-6), ("fp8_e4m3", 1e-30), ("fp8_e5m2", 1e30)],
)
def test_queries_of_any_size_meet_8_bits(
    cache: str, reach: float, capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of bf16 reach further than fp16, which products are in; seen before it is rounded."""
    monkeypatch.setattr(tuning, "capability", lambda device: capability)
    change: dict[str, Any] = {"cache": cache, "reach": reach, "dtype": torch.bfloat16, "wide": True}
    case = replace(MIXED, sequences=((1, 40), (1, 0), (9, 41)), **change)
    check(attend(case), case)
    case = replace(DECODES, spread=20.0, **change)
    check_decodes(case)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_small_weights_count_in_8_bits(dtype: torch.dtype) -> None:
    """16 keys with 2⁻²³·³ of another's weight are all that is seen where that one's value is 0."""
    kv = torch.ones(1, 2, 32, 1, 16)
    kv[0, 0, 1:] = -1
    kv[0, 1, 0] = 0
    k, v = kv.to(torch.float8_e4m3fn).unbind(1)
    q, ints = torch.ones(1, 1, 16, dtype=dtype), torch.tensor([0, 17], dtype=torch.int32)
    scale = 23.3 * math.log(2) / 32  # scores are ±16 times it
    out = torch.empty(1, 1, 16)
    decode.paged_decode(q, k, v, ints[:1, None], ints[1:], scale=scale, out=out)
    small = 16 * 2**-23.3
    assert torch.allclose(out, torch.tensor(small / (1 + small)), rtol=2**-10, atol=0)


@EITHER
@pytest.mark.parametrize("cache", FORMATS)
def test_all_that_8_bits_hold(
    cache: str, capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are the values of the only token, which attention returns as they are."""
    monkeypatch.setattr(tuning, "capability", lambda device: capability)
    codes = torch.arange(256, dtype=torch.uint8)
    codes[~codes.view(FORMATS[cache]).float().isfinite()] = 0
    numbers, one = codes.view(FORMATS[cache]).view(1, 1, 1, 256), torch.ones(1, dtype=torch.int32)
    for dtype in (torch.float32, torch.float16):
        q = torch.zeros(1, 1, 256, dtype=dtype)
        out = decode.paged_decode(q, numbers, numbers, one[:, None] - 1, one, scale=1.0)
        assert torch.equal(out, numbers[0].to(dtype))


@pytest.mark.parametrize("split", [Split(16, 16), Split(48, 4), Split(32, 1)])
def test_decode_cuts_the_context(split: Split) -> None:
    """At and beside the lengths at which there is one part more, or parts grow."""
    for context in (split.part, split.part + 1, 200):
        case = Case(((1, context), (1, 20)), kv_heads=1, head_dim=16)
        check(decode_all(case, split), case)
    windowed = replace(case, window=100)
    check(decode_all(windowed, split), windowed)


def test_decode_in_its_own_tiles() -> None:
    case = replace(DECODES, sequences=((1, 700), (1, 65)), head_dim=32)
    check(decode_all(case, Split()), case)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(40))
def test_the_cross_product(number: int) -> None:
    """Each group with each block size; dtypes, dims and caches in turn."""
    crossed = [
        (*both, (torch.float32, torch.float16)[sum(both) % 2])
        for both in itertools.product(range(1, 9), (1, 8, 16, 32, 128))
    ]
    group, size, dtype = crossed[number]
    dim, cache = (64, 80, 96, 128)[number // 2 % 4], ("auto", "fp8_e4m3")[number // 3 % 2]
    sequences = ((1, 50), (1, 0), (6, 37))
    case = Case(sequences, 1, group, dim, size, dtype, cache)
    check(attend(case), case)
    case = replace(case, sequences=((1, 50), (1, 0)), window=30 if case.group % 2 else None)
    check_decodes(case)


# Results that do not depend on the rest of the batch

BATCH = Case(((1, 150), (1, 0), (1, 1), (1, 33), (1, 16)), kv_heads=1, head_dim=32)
SPLITS = [Split(16, 16), Split(16, 4), Split(48, 1), Split(32, 2), Split(128, 8)]


@pytest.fixture(params=SPLITS[1:3], ids=str)
def tuned(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Entry]:
    """A table with an entry for the "GPU" that tensors on a CPU are on."""
    heads = Heads(1, BATCH.group, BATCH.head_dim, 4)
    entry = Entry("", (9, 0), "decode", heads, SMALL, request.param)
    monkeypatch.setattr(tuning, "_table", lambda: {entry.key: entry})
    tuning.decode.cache_clear()
    yield entry
    tuning.decode.cache_clear()


@pytest.mark.parametrize("window", [None, 40])
def test_a_sequence_alone_and_in_a_batch(tuned: Entry, window: int | None) -> None:
    case = replace(BATCH, window=window)
    together = decode_some(case)
    check(together, case)
    for n in range(len(case.sequences)):
        assert torch.equal(decode_some(case, slice(n, n + 1)), together[n : n + 1])


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


CHUNKS = Case(((5, 150), (3, 3), (0, 0), (1, 1), (8, 70), (1, 0), (2, 130)), tail=2)


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"window": 60, "seats": True},
        {"softcap": 2.0, "spread": 20.0, "group": 3, "block_size": 12},
        {"cache": "fp8_e4m3", "window": 17, "head_dim": 80, **HALF},
    ],
    ids=str,
)
@pytest.mark.parametrize("split", [Split(16, 4), Split(64, 2)])
def test_a_short_chunk_cuts_its_context(change: dict[str, Any], split: Split) -> None:
    """Into parts that all contexts share; where there is one, the result is that of no cut."""
    case = replace(CHUNKS, **change)
    i, tiles = case.inputs, replace(SMALL, rows=32)
    masks: dict[str, Any] = {"scale": case.scale, "window": case.window, "softcap": case.softcap}

    def chunks(which: slice, split: Split) -> torch.Tensor:
        tables, rows = case.batch.tables(which)
        begins = i.query_start[which.start or 0 : (which.stop or len(CHUNKS.sequences)) + 1]
        return attention.paged_attention(
            i.q, i.k_cache, i.v_cache, tables, begins, i.context_lens[which], **masks,
            max_query_len=8, max_context=150, rows=rows, tiles=tiles, split=split,
        )  # fmt: skip

    together, whole = chunks(slice(None), split), chunks(slice(None), Split(1024, 16))
    check(together, case)
    for n, (length, context) in enumerate(case.sequences):
        mine = slice(int(i.query_start[n]), int(i.query_start[n]) + length)
        assert context > split.part or torch.equal(whole[mine], together[mine])


@pytest.mark.slow
@settings(max_examples=settings().max_examples // 6)
@given(cases())
def test_any_batch_is_cut(case: Case) -> None:
    """Also in the places that a graph has."""
    masks: dict[str, Any] = {"scale": case.scale, "window": case.window, "softcap": case.softcap}
    i = case.inputs
    with patch.object(attention, "chunk_split", lambda kv_heads: Split(16, 4)):
        for batch in (case.batch, for_a_graph(case.batch, len(i.q))):
            check(ops.attend_cached(i.q, i.k_cache, i.v_cache, batch, **masks), case)


@pytest.mark.parametrize("window", [None, 30])
def test_a_cut_batch_has_all_keys_of_each_tile_once(window: int | None) -> None:
    """In no more parts than there are tiles and some to spare, whatever the contexts."""
    tiles, split, group = replace(SMALL, rows=32), Split(32, 4), 3  # of 10 queries
    for lengths, contexts in (
        ((5, 20, 0, 31, 10), (150, 20, 0, 400, 0)),
        ((1,), (999,)),
        ((10, 1, 7), (10, 33, 7)),
    ):
        begins = torch.tensor([4, *itertools.accumulate(lengths, initial=4)][1:], dtype=torch.int32)
        ends = torch.tensor(contexts, dtype=torch.int32)
        most = sum(lengths) // 10 + len(lengths)
        items, sums, _ = attention._shared(
            torch.zeros(4 + sum(lengths), group, 16), 1, begins, ends, None, most,
            Cut(tiles, split), window,
        )  # fmt: skip
        keys: dict[tuple[int, int], list[tuple[int, int]]] = {}
        places, cut = list[int](), set[tuple[int, ...]]()
        for number, row, low, high, first, place, parts, _ in items[
            1 : 1 + int(items[0, 0])
        ].tolist():
            assert number == row
            keys.setdefault((number, first), []).append((low, high))
            if parts > 1:
                places.append(place)
                cut.add((number, first, place - len(keys[number, first]) + 1, parts))
        merged = items[1 + most + split.most :][: int(items[0, 1])].tolist()
        assert {(n, first, place, parts) for n, _, _, _, first, place, parts, _ in merged} == cut
        assert len(merged) == len(cut) and int(items[0, 0]) <= most + split.most
        assert places == list(range(len(places))) and len(places) <= len(sums)
        for number, (length, context) in enumerate(zip(lengths, contexts, strict=True)):
            for first in range(0, length, 10):
                begin = context - length + first
                hidden = 0 if window is None else max(begin + 1 - window, 0) // 16 * 16
                end = context - length + min(first + 10, length)
                lows, highs = zip(*keys.pop((number, first)), strict=True)
                assert lows[0] == hidden and highs[-1] == end and lows[1:] == highs[:-1]
                assert all(low % 16 == 0 for low in lows)
        assert not keys


def test_a_graph_reads_the_contexts_of_its_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its launches are those of shorter contexts, and of a step outside of a graph."""
    case = replace(CHUNKS, sequences=((1, 90), (1, 3), *CHUNKS.sequences[::2]), group=1, seats=True)
    i, run = case.inputs, InterpretedFunction.run
    launched: list[Callable[[], None]] = []
    names: list[str] = []

    def record(kernel: Any, *args: Any, **named: Any) -> None:
        names.append(kernel.__name__)
        launched.append(partial(run, kernel, *args, **named))
        launched[-1]()

    def step(batch: AttentionBatch) -> torch.Tensor:
        names.clear()
        launched.clear()
        return ops.attend_cached(i.q, i.k_cache, i.v_cache, batch, scale=case.scale)

    monkeypatch.setattr(InterpretedFunction, "run", record)
    monkeypatch.setattr(attention, "chunk_split", lambda kv_heads: Split(16, 16))
    step(case.batch)
    assert names == ["_cut", "_decode", "_share", "_attention", "_merge"]
    batch = for_a_graph(case.batch, len(i.q))
    batch.context_lens.clamp_(max=24)
    out = step(batch).fill_(torch.nan)
    assert names == ["_cut", "_decode", "_share", "_attention", "_merge"]
    replay = list(launched)
    fresh = for_a_graph(case.batch, len(i.q))
    batch.context_lens.copy_(fresh.context_lens)
    for launch in replay:
        launch()
    check(out, case)
    assert torch.equal(out, step(fresh))


CONTEXTS = st.lists(st.integers(0, 200), min_size=1, max_size=6)


def cut_up(contexts: list[int], split: Split, window: int | None) -> Parts:
    q = torch.zeros(len(contexts), 2, 16)
    lengths = torch.tensor(contexts, dtype=torch.int32)
    return listed(q, 1, lengths, None, max(contexts), Cut(SMALL, split), window)


@settings(max_examples=settings().max_examples // 3)
@given(CONTEXTS, st.sampled_from(SPLITS), st.none() | st.integers(1, 90))
def test_every_part_is_listed_once(contexts: list[int], split: Split, window: int | None) -> None:
    """As `Split` says it, which is also what fits in the room that there is."""
    found, expected = cut_up(contexts, split, window), list[list[int]]()
    for number, context in enumerate(contexts):
        hidden = 0 if window is None else max(context - window, 0) // SMALL.keys * SMALL.keys
        parts = split.parts(context - hidden)
        assert parts <= split.most and parts * split.size(context - hidden) >= context - hidden
        size, first = split.size(context - hidden), len(expected)
        begins = [hidden + part * size for part in range(parts)]
        expected += [
            [number, number, begin, min(begin + size, context), context, first, parts]
            for begin in begins
        ]
    assert found.items[0, 0] == len(expected)
    assert found.items[1 : 1 + len(expected), :7].tolist() == expected
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
    (parts,) = (kept for kept in batch._memo.values() if isinstance(kept, Parts))
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
    parts = listed(i.q, 1, i.context_lens, None, 64, Cut(SMALL, split), None)
    parts.sums.fill_(torch.nan)

    def once(key: Any, make: Any) -> Any:
        return parts if key[0] == "parts" else make()

    out = decode.paged_decode(
        i.q, i.k_cache, i.v_cache, i.block_tables, i.context_lens, scale=case.scale,
        tiles=SMALL, split=split, once=once,
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
