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
from pagedsim.kernels.float8 import FORMATS, rounded
from pagedsim.kernels.tiles import Split, Tiles
from tests.kernels.cases import LAYER, Case, check
from tests.kernels.harness import HALF, INTERPRETED, REFERENCE, everywhere, half_a_step

# The package has a function of the same name.
reference_attention = sys.modules["pagedsim.kernels.reference.attention"]

MIXED = Case(((1, 70), (1, 0), (1, 3), (0, 0), (9, 41), (20, 20)), kv_heads=1, tail=2)
DECODES = Case(((1, 70), (1, 0), (1, 1), (1, 17)), kv_heads=1)
SMALL = Tiles(rows=16, keys=16, warps=4, stages=2)
"""Tiles so small that a short context has many."""
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
    if not INTERPRETED:
        return kernels.paged_attention(*args, max_query_len=longest, rows=i.rows, **masks)
    from pagedsim.kernels import attention

    return attention.paged_attention(
        *args, **masks, max_query_len=longest, rows=i.rows, tiles=fitting(tiles, case),
        out=torch.zeros_like(i.q, dtype=case.written),
    )  # fmt: skip


def decode_all(case: Case, split: Split = SPLIT, tiles: Tiles | None = SMALL) -> torch.Tensor:
    """The case by `paged_decode`, in the interpreter in these parts and tiles."""
    i = case.inputs
    args = (i.q, i.k_cache, i.v_cache, i.block_tables, i.context_lens)
    masks: dict[str, Any] = {"scale": case.scale, "window": case.window, "softcap": case.softcap}
    if not INTERPRETED:
        return kernels.paged_decode(*args, rows=i.rows, **masks)
    from pagedsim.kernels import decode

    return decode.paged_decode(
        *args, **masks, rows=i.rows, split=split, tiles=fitting(tiles, case),
        out=torch.zeros_like(i.q, dtype=case.written),
    )  # fmt: skip


def fitting(tiles: Tiles | None, case: Case) -> Tiles | None:
    """The tiles, with rows enough for the heads of a group."""
    return tiles and replace(tiles, rows=max(tiles.rows, 32 if case.group > 16 else 0))


@everywhere([replace(MIXED, **change) for change in CHANGES], gpu=())
def test_attention(case: Case) -> None:
    check(attend(case), case)


@everywhere([replace(DECODES, **change) for change in CHANGES], gpu=())
def test_decode(case: Case) -> None:
    check(decode_all(case), case)


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
@settings(max_examples=settings().max_examples // 4)
@given(cases())
def test_any_batch(case: Case) -> None:
    check(attend(case), case)


@REFERENCE
@settings(max_examples=settings().max_examples // 6)
@given(cases())
def test_any_decodes(case: Case) -> None:
    case = replace(case, sequences=tuple((1, context) for _, context in case.sequences), tail=0)
    check(decode_all(case), case)


@REFERENCE
@pytest.mark.parametrize("cache", FORMATS)
@pytest.mark.parametrize("spread", [0.1, 1.0])
def test_how_far_off_8_bits_are(cache: str, spread: float) -> None:
    """Against the same attention over keys and values that were not rounded.

    Each is off by half a step at most. So is then each score, by d or less, the sum over half a
    step of its key times its query. A softmax's weight is off by a factor of up to e^±2d, and the
    result by what the weights and the values are off.
    """
    case = replace(PLAIN, spread=spread)
    i, held = case.inputs, FORMATS[cache]
    exact = attend(case)
    kv = torch.zeros(i.kv.shape, dtype=held)
    kv[...] = rounded(i.kv.nan_to_num(), held)
    k, v = i.kv.nan_to_num().unbind(2)
    apart = torch.zeros_like(exact)
    for row, (sequence, position) in enumerate(tokens_of(case)):
        table = i.block_tables[sequence].long()
        seen = torch.arange(position + 1)
        where = table[seen // case.block_size], LAYER, seen % case.block_size
        keys, values = (one[where].repeat_interleave(case.group, 1) for one in (k, v))
        off = (half_a_step(keys, held) * i.q[row].abs()).sum(-1).max(0).values * case.scale
        weight = ((keys * i.q[row]).sum(-1) * case.scale).softmax(0).unsqueeze(-1)
        moved = half_a_step(values, held)
        least = weight * (torch.expm1(2 * off)[:, None] * (values.abs() + moved) + moved)
        apart[row] = least.sum(0)
    found = kernels.paged_attention(
        i.q,
        kv[:, LAYER, 0],
        kv[:, LAYER, 1],
        i.block_tables,
        i.query_start,
        i.context_lens,
        scale=case.scale,
        max_query_len=23,
    )
    difference = (found - exact).abs()
    assert (difference <= apart + 1e-5).all()
    assert difference.max() > 1e-3, "nothing was rounded"


def tokens_of(case: Case) -> list[tuple[int, int]]:
    """(sequence, position) of each row."""
    return [
        (number, context - length + n)
        for number, (length, context) in enumerate(case.sequences)
        for n in range(length)
    ]


@REFERENCE
@pytest.mark.parametrize("most", [1, 9, 60])
@pytest.mark.parametrize("window", [None, 8])
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
def test_no_tokens_at_all() -> None:
    i = PLAIN.inputs
    out = kernels.paged_attention(
        i.q[:0],
        i.k_cache,
        i.v_cache,
        i.block_tables[:0],
        i.query_start[:1],
        i.context_lens[:0],
        scale=1.0,
        max_query_len=1,
    )
    assert out.shape == (0, 4, 64)


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
        kernels.paged_decode(q, i.k_cache, i.v_cache, i.block_tables, i.context_lens, scale=1.0)
