"""Paged attention in plain torch and in Triton's interpreter, against fp64 without paging.

A loop iteration over a tile of keys takes the interpreter about 5 ms, so the cases are small.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedsim.kernels import ops as kernels
from pagedsim.kernels.batch import AttentionBatch
from pagedsim.kernels.float8 import FORMATS
from pagedsim.kernels.tiles import Split, Tiles
from tests.kernels.cases import Case, check, for_a_graph
from tests.kernels.harness import HALF, INTERPRETED, REFERENCE, everywhere

# The package has a function of the same name.
reference_attention = sys.modules["pagedsim.kernels.reference.attention"]

MIXED = Case(((1, 70), (1, 0), (1, 3), (0, 0), (9, 41), (20, 20)), kv_heads=1, tail=2)
DECODES = Case(((1, 70), (1, 0), (1, 1), (1, 17)), kv_heads=1)
SMALL = Tiles(rows=16, keys=16, warps=4, stages=2)
"""Tiles so small that a short context has many."""
WAYS = (SMALL, replace(SMALL, warps=2, by_warp=True)) if INTERPRETED else (SMALL,)
"""Tiles of a decode whose keys all warps fold together, and each its own."""
SPLIT = Split(part=16, most=4)
"""Parts that are small and few."""

PEAKED = {"spread": 20.0}
CHANGES: list[dict[str, Any]] = [
    *({"group": group} for group in (1, 3, 5, 7, 8, 20)),
    {"kv_heads": 3, "group": 2},
    *({"head_dim": dim} for dim in (16, 80, 128)),
    *({"head_dim": dim, **HALF} for dim in (64, 80, 256)),
    *({"block_size": size} for size in (1, 8, 128)),
    {"block_size": 12, **HALF},
    {"window": 1},
    {"window": 17, **HALF},
    {"window": 1000},
    {"softcap": 2.0, **PEAKED},
    {"softcap": 50.0, "window": 20, **HALF},
    PEAKED,
    {"seats": True, "window": 16},
]
PLAIN = Case(((1, 40), (1, 7), (5, 30), (23, 23)))
EIGHT_BITS = [
    replace(PLAIN, cache=cache, **change)
    for cache in FORMATS
    for change in ({}, {"block_size": 12}, {"window": 8, "tail": 3, "softcap": 2.0})
]
"""In the interpreter they depend on the GPU, see `interpreted.py`."""


def attend(case: Case, tiles: Tiles | None = SMALL) -> torch.Tensor:
    """The case by `paged_attention`, in the interpreter in these tiles."""
    i = case.inputs
    args = (i.q, i.k_cache, i.v_cache, i.block_tables, i.query_start, i.context_lens)
    masks: dict[str, Any] = {"scale": case.scale, "window": case.window, "softcap": case.softcap}
    longest = max(length for length, _ in case.sequences)
    if not INTERPRETED and case.device == "cpu":
        return kernels.attend_cached(*args[:3], case.batch, **masks)
    from pagedsim.kernels import attention

    return attention.paged_attention(
        *args, **masks, max_query_len=longest, rows=i.rows,
        tiles=fitting(tiles, case) if INTERPRETED else None,
        out=torch.zeros_like(i.q, dtype=case.written),
    )  # fmt: skip


def decode_some(case: Case, which: slice = slice(None)) -> torch.Tensor:
    """Some sequences of the case, each a decode."""
    i = case.inputs
    q, contexts = i.q[which], i.context_lens[which]
    tables, rows = case.batch.tables(which)
    batch = AttentionBatch(tables, contexts, contexts, contexts, len(q), rows=rows)
    return kernels.attend_cached(
        q, i.k_cache, i.v_cache, batch,
        scale=case.scale, window=case.window, softcap=case.softcap,
    )  # fmt: skip


def decode_all(case: Case, split: Split = SPLIT, tiles: Tiles | None = SMALL) -> torch.Tensor:
    """The case by `paged_decode`, in the interpreter in these parts and tiles."""
    if not INTERPRETED:
        return decode_some(case)
    from pagedsim.kernels import decode

    i = case.inputs
    return decode.paged_decode(
        i.q, i.k_cache, i.v_cache, i.block_tables, i.context_lens, rows=i.rows, scale=case.scale,
        window=case.window, softcap=case.softcap, split=split, tiles=fitting(tiles, case),
        out=torch.zeros_like(i.q, dtype=case.written),
    )  # fmt: skip


def check_decodes(case: Case) -> None:
    """Fail unless every way of `paged_decode` answers the case."""
    for tiles in WAYS:
        check(decode_all(case, tiles=tiles), case)


def fitting(tiles: Tiles | None, case: Case) -> Tiles | None:
    """The tiles, with rows enough for the heads of a group."""
    return tiles and replace(tiles, rows=max(tiles.rows, 32 if case.group > 16 else 0))


@everywhere([replace(MIXED, **change) for change in CHANGES], gpu=())
def test_attention(case: Case) -> None:
    check(attend(case), case)


@everywhere([replace(DECODES, **change) for change in CHANGES], gpu=())
def test_decode(case: Case) -> None:
    check_decodes(case)


@everywhere([MIXED, PLAIN, DECODES, *(replace(MIXED, **change) for change in CHANGES[-3:])])
def test_places_that_a_graph_has(case: Case) -> None:
    """Those of decodes that there are not hold tokens of chunks."""
    i = case.inputs
    masks: dict[str, Any] = {"window": case.window, "softcap": case.softcap}
    batch = for_a_graph(case.batch, len(i.q))
    out = kernels.attend_cached(i.q, i.k_cache, i.v_cache, batch, scale=case.scale, **masks)
    check(out, case)


@REFERENCE
@everywhere(EIGHT_BITS, gpu=())
def test_a_cache_of_8_bits(case: Case) -> None:
    check(attend(case), case)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    contexts = draw(st.lists(st.integers(0, 50), min_size=1, max_size=5))
    return Case(
        tuple((draw(st.integers(0, context or 3)), context) for context in contexts),
        kv_heads=draw(st.integers(1, 3)),
        group=draw(st.integers(1, 4)),
        head_dim=draw(st.sampled_from([8, 16, 20])),
        block_size=draw(st.sampled_from([1, 2, 5, 8, 12, 16, 64])),
        window=draw(st.none() | st.integers(1, 60)),
        softcap=draw(st.none() | st.sampled_from([1.0, 20.0])),
        cache=draw(st.sampled_from(["auto", *FORMATS])),
        tail=draw(st.integers(0, 2)),
        seats=draw(st.booleans()),
        seed=draw(st.integers(0, 9)),
    )


@REFERENCE
@settings(max_examples=settings().max_examples // 5)
@given(cases())
def test_any_batch(case: Case) -> None:
    check(attend(case), case)
    case = replace(case, sequences=tuple((1, context) for _, context in case.sequences), tail=0)
    check(decode_all(case), case)


@REFERENCE
@pytest.mark.parametrize(("most", "window"), [(1, None), (9, 8), (60, None)])
def test_decodes_in_groups_are_the_same(
    most: int, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sequences of equal length, several rows of the cache each; each gets its own result."""
    lengths = (5, 33, 0, 12, 12, 1, 40, 7)
    case = Case(tuple((1, length) for length in lengths), window=window)
    row = 2 * case.inputs.k_cache[0, 0].numel() * case.inputs.q.element_size()
    whole = decode_all(case)
    monkeypatch.setattr(reference_attention, "NEAR", most * row)
    check(decode_all(case), case)
    torch.testing.assert_close(decode_all(case), whole)


@REFERENCE
@pytest.mark.parametrize("wrong", ["heads", "dims", "dtype", "strides"])
def test_what_does_not_fit_is_refused(wrong: str) -> None:
    i = PLAIN.inputs
    q = {
        "heads": i.q[:, :3],
        "dims": i.q[:, :, :32],
        "dtype": i.q.half(),
        "strides": i.q.transpose(1, 2).contiguous().transpose(1, 2),
    }[wrong]
    with pytest.raises(TypeError if wrong == "dtype" else ValueError):
        kernels.attend_cached(q, i.k_cache, i.v_cache, PLAIN.batch, scale=1.0)
