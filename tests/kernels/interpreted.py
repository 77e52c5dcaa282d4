"""The Triton kernels on a CPU, in Triton's interpreter, held against fp64 attention.

Not collected by itself: the interpreter is chosen for a whole process, when kernels are decorated.
`test_interpreter.py` runs this file in a process of its own; by hand:

    TRITON_INTERPRET=1 pytest tests/kernels/interpreted.py

A loop iteration over a tile of keys takes about 5 ms, so the cases are small. bf16 is left out
where products are in it: the interpreter computes them wrongly and says nothing.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from pagedsim.kernels import attention, copy, decode, tuning, write
from pagedsim.kernels import ops as kernels
from pagedsim.kernels.float8 import FORMATS, rounded
from pagedsim.kernels.tiles import Split, Tiles
from tests.kernels.cases import LAYER, Case, check, forget, same
from tests.kernels.interpreter import mend
from tests.kernels.stored import check_no_number, check_stored

mend()

MIXED = Case(((1, 70), (1, 0), (1, 3), (0, 0), (9, 41), (20, 20)), kv_heads=1, tail=2)
DECODES = Case(((1, 70), (1, 0), (1, 1), (1, 17)), kv_heads=1)
SMALL = Tiles(rows=16, keys=16, warps=4, stages=2)
"""Tiles so small that a short context has many."""
SPLIT = Split(part=16, most=4)
"""Parts that are small and few."""

HALF = {"dtype": torch.float16}
PEAKED = {"spread": 20.0}
SHAPES: list[dict[str, Any]] = [
    *({"group": group} for group in (1, 3, 4, 5, 6, 7, 8)),
    {"group": 20},
    {"kv_heads": 3, "group": 2},
    *({"head_dim": dim} for dim in (16, 64, 80, 96, 128)),
    *({"head_dim": dim, **HALF} for dim in (64, 80, 128, 256)),
    *({"block_size": size} for size in (1, 8, 12, 32, 128)),
    {"block_size": 12, **HALF},
]
MASKS: list[dict[str, Any]] = [
    {"window": 1},
    {"window": 16},
    {"window": 17, **HALF},
    {"window": 1000},
    {"softcap": 2.0, **PEAKED},
    {"softcap": 50.0, "window": 20, **HALF},
    PEAKED,
    {"seats": True},
]
CACHES: list[dict[str, Any]] = [
    {"cache": cache, **change}
    for cache in FORMATS
    for change in (
        {},
        HALF,
        {"group": 7, "head_dim": 80, "block_size": 12, **HALF},
        {"head_dim": 16, "window": 17},
        {"head_dim": 256, **HALF},
        {"softcap": 50.0, "window": 20, **HALF},
    )
]
EITHER = pytest.mark.parametrize("capability", [(8, 0), (9, 0)], ids=["sm_80", "sm_90"])


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "on_gpu", lambda tensor: True)


def attend(case: Case, tiles: Tiles | None = SMALL) -> torch.Tensor:
    i = case.inputs
    return attention.paged_attention(
        i.q,
        i.k_cache,
        i.v_cache,
        i.block_tables,
        i.query_start,
        i.context_lens,
        scale=case.scale,
        window=case.window,
        softcap=case.softcap,
        max_query_len=max(length for length, _ in case.sequences),
        rows=i.rows,
        out=torch.zeros_like(i.q, dtype=case.written),
        tiles=tiles and replace(tiles, rows=max(tiles.rows, 32 if case.group > 16 else 0)),
    )


def decode_all(case: Case, split: Split = SPLIT, tiles: Tiles | None = None) -> torch.Tensor:
    i = case.inputs
    return decode.paged_decode(
        i.q,
        i.k_cache,
        i.v_cache,
        i.block_tables,
        i.context_lens,
        scale=case.scale,
        window=case.window,
        softcap=case.softcap,
        rows=i.rows,
        out=torch.zeros_like(i.q, dtype=case.written),
        split=split,
        tiles=tiles and replace(tiles, rows=max(tiles.rows, 32 if case.group > 16 else 0)),
    )


@pytest.mark.parametrize("change", [*SHAPES, *MASKS], ids=str)
def test_attention(change: dict[str, Any]) -> None:
    case = replace(MIXED, **change)
    check(attend(case), case)


@pytest.mark.parametrize("length", [1, 3, 40])
def test_attention_in_its_own_tiles(length: int) -> None:
    case = replace(MIXED, sequences=((length, 150), (1, 2)), head_dim=32)
    check(attend(case, None), case)


@pytest.mark.parametrize("rows", [16, 32, 64])
def test_every_token_has_its_tile(rows: int) -> None:
    """Lengths about the size of a tile; with three heads a group a tile has a row to spare."""
    queries = rows // 3
    lengths = (queries, queries + 1, 0, 1, 2 * queries, queries - 1, 2 * queries + 1, 0)
    case = Case(tuple((n, n) for n in lengths), kv_heads=1, group=3, head_dim=16, tail=rows)
    check(attend(case, replace(SMALL, rows=rows, keys=64)), case)


@pytest.mark.parametrize("change", [*SHAPES, *MASKS], ids=str)
def test_decode(change: dict[str, Any]) -> None:
    case = replace(DECODES, **change)
    check(decode_all(case, tiles=SMALL), case)


@EITHER
@pytest.mark.parametrize("change", CACHES, ids=str)
def test_a_cache_of_8_bits(
    change: dict[str, Any], capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "capability", lambda device: capability)
    case = replace(MIXED, **change)
    check(attend(case), case)
    case = replace(DECODES, **change)
    check(decode_all(case, tiles=SMALL), case)


@EITHER
@pytest.mark.parametrize(
    ("cache", "reach"),
    [*itertools.product(FORMATS, (1e-6, 6e4)), ("fp8_e4m3", 1e-30), ("fp8_e5m2", 1e30)],
)
def test_queries_of_any_size_meet_8_bits(
    cache: str, reach: float, capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of bf16 reach further than fp16, which products are in; seen before it is rounded."""
    monkeypatch.setattr(tuning, "capability", lambda device: capability)
    change: dict[str, Any] = {"cache": cache, "reach": reach, "dtype": torch.bfloat16, "wide": True}
    case = replace(MIXED, **change)
    check(attend(case), case)
    case = replace(DECODES, spread=20.0, **change)
    check(decode_all(case, tiles=SMALL), case)


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


@pytest.mark.parametrize("split", [Split(16, 16), Split(48, 4), Split(32, 1), Split(256, 2)])
def test_decode_cuts_the_context(split: Split) -> None:
    """At and beside the lengths at which there is one part more, or parts grow."""
    for context in (split.part, split.part + 1, 256, 300):
        case = Case(((1, context), (1, 20)), kv_heads=1, head_dim=16)
        check(decode_all(case, split, SMALL), case)
    windowed = replace(case, window=100)
    check(decode_all(windowed, split, SMALL), windowed)


def test_decode_in_its_own_tiles() -> None:
    case = replace(DECODES, sequences=((1, 700), (1, 65)), head_dim=32)
    check(decode_all(case, Split()), case)


def test_a_sequence_does_not_feel_its_neighbours() -> None:
    many = decode_all(DECODES, tiles=SMALL)
    i = DECODES.inputs
    for n in range(len(DECODES.sequences)):
        alone = decode.paged_decode(
            i.q[n : n + 1],
            i.k_cache,
            i.v_cache,
            i.block_tables[n : n + 1],
            i.context_lens[n : n + 1],
            scale=DECODES.scale,
            split=SPLIT,
            tiles=SMALL,
        )
        assert torch.equal(alone, many[n : n + 1])


@pytest.mark.parametrize("cache", ["auto", *FORMATS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("heads", "dim", "size"), [(1, 64, 1), (2, 80, 16), (3, 96, 12)])
def test_write(heads: int, dim: int, size: int, dtype: torch.dtype, cache: str) -> None:
    case = Case(
        ((1, 20), (4, 9)), heads, head_dim=dim, block_size=size, dtype=dtype, cache=cache, tail=2
    )
    i = case.inputs
    new_k = i.new_k.repeat(1, 2, 1)[:, :heads]  # as a fused projection gives it
    kv, expected = torch.zeros(2, *i.kv.shape, dtype=case.held)
    write.write_kv(new_k, i.new_v, kv[:, LAYER, 0], kv[:, LAYER, 1], i.slots)
    for token, slot in enumerate(i.slots.tolist()):
        if slot >= 0:
            expected[slot // size, LAYER, 0, slot % size] = rounded(i.new_k[token], case.held)
            expected[slot // size, LAYER, 1, slot % size] = rounded(i.new_v[token], case.held)
    assert same(kv, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("cache", FORMATS)
def test_what_8_bits_cannot_hold(cache: str, dtype: torch.dtype, as_on_a_gpu: None) -> None:
    check_stored(cache, dtype)
    check_no_number(cache, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, *FORMATS.values()])
def test_copy(dtype: torch.dtype) -> None:
    cache = torch.randn(6, 3, 2, 12, 3, 80).to(dtype)  # more than a program copies, not a multiple
    expected = cache[[1, 1, 5, 1, 4, 5]]
    copy.copy_blocks(cache, torch.tensor([1, 1, 5]), torch.tensor([3, 0, 2]))
    assert same(cache, expected)


@pytest.mark.parametrize(
    "sequences",
    [
        ((1, 70), (1, 0), (1, 33), (9, 41), (20, 20), (0, 5), (1, 4)),
        ((1, 70), (1, 0)),
        ((20, 20), (2, 8)),
        (),
    ],
    ids=["mixed", "decodes", "chunks", "nothing"],
)
@pytest.mark.parametrize(("tail", "cache"), [(0, "auto"), (3, "auto"), (3, "fp8_e4m3")])
def test_a_step_as_on_a_gpu(
    sequences: tuple[tuple[int, int], ...], tail: int, cache: str, as_on_a_gpu: None
) -> None:
    case = Case(
        sequences, kv_heads=1, block_size=12, window=25, tail=tail, cache=cache, seats=tail > 0
    )
    i = case.inputs
    kv = i.kv.clone()
    forget(kv, i.slots)
    out = kernels.attend(
        i.q, i.new_k, i.new_v, kv[:, LAYER, 0], kv[:, LAYER, 1], case.batch,
        scale=case.scale, window=case.window,
    )  # fmt: skip
    check(out, case)
    assert same(kv, i.kv)


CROSS = [
    Case(
        ((1, 50), (1, 0), (6, 37)),
        kv_heads=1,
        group=group,
        head_dim=dim,
        block_size=size,
        dtype=dtype,
        cache=cache,
    )
    for group in range(1, 9)
    for dim in (64, 80, 96, 128)
    for size in (1, 8, 16, 32, 128)
    for dtype in (torch.float32, torch.float16)
    for cache in ("auto", "fp8_e4m3")
]


@pytest.mark.slow
@pytest.mark.parametrize("case", CROSS, ids=str)
def test_the_cross_product(case: Case) -> None:
    check(attend(case), case)
    case = replace(case, sequences=((1, 50), (1, 0)), window=30 if case.group % 2 else None)
    check(decode_all(case, tiles=SMALL), case)
