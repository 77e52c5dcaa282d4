"""Writing into the cache, copying within it and attending from it, and batches that say where.

What an 8-bit cache holds of a number is the nearest there is, found by looking at all of them.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from pagedsim.kernels import ops as kernels
from pagedsim.kernels.batch import AttentionBatch
from pagedsim.kernels.float8 import FORMATS, rounded
from tests.kernels.cases import LAYER, Case, check, forget, same
from tests.kernels.harness import INTERPRETED, REFERENCE, devices

CASE = Case(((1, 40), (1, 0), (1, 33), (5, 30), (23, 23)), block_size=12, tail=2)
HEADS, DIM, BLOCK = 4, 128, 4
SIXTEEN = (torch.bfloat16, torch.float16)


EACH = ((1, 70), (1, 0), (1, 33), (9, 41), (20, 20), (0, 5), (1, 4))


@pytest.mark.parametrize(
    ("sequences", "tail", "cache", "window"),
    [
        (EACH, 0, "auto", None),
        (EACH, 3, "fp8_e4m3", 25),
        (((1, 70), (1, 0)), 3, "auto", 25),
        (((20, 20), (2, 8)), 0, "fp8_e5m2", 9),
        ((), 3, "auto", 25),
    ],
    ids=["mixed", "mixed in 8 bits", "decodes", "chunks", "nothing"],
)
def test_a_layer_writes_then_attends(
    sequences: tuple[tuple[int, int], ...], tail: int, cache: str, window: int | None
) -> None:
    case = Case(
        sequences, kv_heads=1, block_size=12, window=window, tail=tail, cache=cache, seats=tail > 0
    )
    i, batch = case.inputs, case.batch
    kv = i.kv.clone()
    forget(kv, i.slots)
    for _ in range(1 if INTERPRETED else 2):  # the second time with what the first layer worked out
        out = kernels.attend(
            i.q, i.new_k, i.new_v, kv[:, LAYER, 0], kv[:, LAYER, 1], batch,
            scale=case.scale, window=window,
        )  # fmt: skip
        check(out, case)
    assert same(kv, i.kv)


@pytest.mark.parametrize("cache", ["auto", *FORMATS])
@pytest.mark.parametrize(
    ("heads", "dim", "size", "dtype"),
    [(1, 64, 1, torch.float16), (2, 80, 16, torch.float32), (3, 96, 12, torch.float16)],
)
def test_write(heads: int, dim: int, size: int, dtype: torch.dtype, cache: str) -> None:
    case = Case(
        ((1, 20), (4, 9)), heads, head_dim=dim, block_size=size, dtype=dtype, cache=cache, tail=2
    )
    i = case.inputs
    new_k = i.new_k.repeat(1, 2, 1)[:, :heads]  # as a fused projection gives it
    kv, expected = torch.zeros(2, *i.kv.shape, dtype=case.held)
    kernels.write_kv(new_k, i.new_v, kv[:, LAYER, 0], kv[:, LAYER, 1], case.batch)
    for token, slot in enumerate(i.slots.tolist()):
        if slot >= 0:
            expected[slot // size, LAYER, 0, slot % size] = rounded(i.new_k[token], case.held)
            expected[slot // size, LAYER, 1, slot % size] = rounded(i.new_v[token], case.held)
    assert same(kv, expected)


@devices([torch.float32, *SIXTEEN])
@pytest.mark.parametrize("cache", FORMATS)
def test_8_bits_hold_the_nearest_number(cache: str, device: str, dtype: torch.dtype) -> None:
    """`write_kv` and `rotate` round to the nearest, ties to even, and saturate."""
    values = _values(FORMATS[cache], dtype)
    k, v = values.view(-1, HEADS, DIM).to(device), -values.view(-1, HEADS, DIM).to(device)
    tokens = len(k)
    slots = torch.arange(tokens, device=device)
    nothing = torch.zeros(0, dtype=torch.int32, device=device)
    batch = AttentionBatch(nothing.view(0, 0), nothing, nothing, slots, 0)
    still, nowhere = torch.ones(tokens, DIM).to(k), torch.zeros(tokens, DIM).to(k)
    kv = torch.zeros(2, -(-tokens // BLOCK), 2, BLOCK, HEADS, DIM, dtype=torch.uint8, device=device)
    kv = kv.view(FORMATS[cache])
    kernels.write_kv(k, v, kv[0, :, 0], kv[0, :, 1], batch)
    qkv = torch.cat((k, k, v), 1).flatten(1)
    finite = qkv.isfinite().all(1)  # what is infinite, times the sine's 0, is no number
    kernels.rotate(qkv, still, nowhere, kv[1, :, 0], kv[1, :, 1], batch)
    for side, given in enumerate((k, v)):
        expected = _nearest(given.cpu(), FORMATS[cache])
        assert not expected.isnan().any()
        written, rotated = (
            one.transpose(0, 1)[side].flatten(0, 1)[:tokens].cpu().double()
            for one in (kv[0], kv[1])
        )
        assert torch.equal(written, expected)
        assert torch.equal(rotated[finite.cpu()], expected[finite.cpu()])


@devices([torch.float32, *SIXTEEN])
@pytest.mark.parametrize("cache", FORMATS)
def test_nan_stays_nan(cache: str, device: str, dtype: torch.dtype) -> None:
    """It is not taken for a large number."""
    k = torch.full((1, HEADS, DIM), torch.nan, dtype=dtype, device=device)
    kv = torch.zeros(1, 2, BLOCK, HEADS, DIM, dtype=torch.uint8, device=device)
    kv = kv.view(FORMATS[cache])
    slots = torch.zeros(1, dtype=torch.int64, device=device)
    batch = AttentionBatch(slots, slots, slots, slots, 1)
    kernels.write_kv(k, k, kv[:, 0], kv[:, 1], batch)
    assert kv[:, :, 0].double().isnan().all()
    assert (kv[:, :, 1:].double() == 0).all()


@devices(
    [torch.float32, torch.float16, *FORMATS.values()],
    gpu=[torch.bfloat16, torch.float32, *FORMATS.values()],
)
def test_copies_read_before_they_write(device: str, dtype: torch.dtype) -> None:
    # A block is more than a program copies, and not a multiple of it.
    cache = torch.randn(6, 3, 2, 12, 3, 80, device=device).to(dtype)
    expected = cache[[1, 1, 5, 1, 4, 5]]
    sources, targets = torch.tensor([[1, 1, 5], [3, 0, 2]], device=device)
    kernels.copy_blocks(cache, sources, targets)
    assert same(cache, expected)
    if not INTERPRETED:
        kernels.copy_blocks(cache, sources[:0], targets[:0])
        assert same(cache, expected)


@REFERENCE
def test_a_batch_from_lists_is_that_of_the_case() -> None:
    case = replace(CASE, sequences=((1, 40), (1, 33), (5, 30), (23, 23), (1, 2)), tail=0)
    i = case.inputs
    lengths = [length for length, _ in case.sequences]
    batch = AttentionBatch.build(
        i.block_tables.tolist(), [c - n for n, c in case.sequences], lengths, block_size=12
    )
    assert torch.equal(batch.slots, i.slots)
    assert torch.equal(batch.query_start, i.query_start)
    assert torch.equal(batch.context_lens, i.context_lens)
    assert batch.block_tables.shape == (5, 4)
    for row, (_, context) in enumerate(case.sequences):
        used = -(-context // 12)
        assert torch.equal(batch.block_tables[row, :used], i.block_tables[row, :used])
    assert (batch.num_decodes, batch.chunks) == (2, ((5, 30), (23, 23), (1, 2)))
    assert (batch.num_tokens, batch.max_query_len) == (31, 23)


def _values(held: torch.dtype, dtype: torch.dtype) -> torch.Tensor:
    """All that it holds, what lies between two of them and beside that, the vast and the tiny."""
    there = torch.arange(256, dtype=torch.uint8).view(held).float()
    there = there[there.isfinite()].sort().values
    middle = (there[1:] + there[:-1]) / 2
    far = torch.tensor(torch.inf)
    torch.manual_seed(0)
    spread = torch.randn(600) * 10 ** torch.linspace(-9, 9, 600)
    edge = torch.finfo(held).max * torch.tensor([1.01, 1.1, 2, 1e3, 1e30, torch.inf])
    beside = torch.nextafter(middle, far), torch.nextafter(middle, -far)
    values = torch.cat((there, middle, *beside, spread, edge, -edge)).to(dtype)
    return torch.nn.functional.pad(values, (0, -len(values) % (HEADS * DIM)))


def _nearest(values: torch.Tensor, held: torch.dtype) -> torch.Tensor:
    """The nearest number for each value; of two the one with the even code."""
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[codes.view(held).double().isfinite()]
    there, most = codes.view(held).double(), torch.finfo(held).max
    apart = (values.double().clamp(-most, most).unsqueeze(-1) - there).abs()
    nearest = apart == apart.amin(-1, keepdim=True)
    return there[torch.where(nearest, codes & 1, 2).argmin(-1)]
