"""Writing into the cache and copying within it, in plain torch; and the batch that says where."""

from __future__ import annotations

import doctest
from dataclasses import replace

import pytest
import torch

from pagedsim.kernels import batch
from pagedsim.kernels import ops as kernels
from pagedsim.kernels.batch import AttentionBatch
from pagedsim.kernels.float8 import FORMATS, rounded
from tests.kernels.cases import LAYER, Case, check, forget, same
from tests.kernels.stored import check_no_number, check_stored

CASE = Case(((1, 40), (1, 0), (1, 33), (5, 30), (23, 23)), block_size=12, tail=2)


CACHES = pytest.mark.parametrize("cache", ["auto", *FORMATS])


@CACHES
@pytest.mark.parametrize("window", [None, 9])
def test_a_layer_writes_then_attends(window: int | None, cache: str) -> None:
    case = replace(CASE, window=window, cache=cache)
    i, batch = case.inputs, case.batch
    kv = i.kv.clone()
    forget(kv, i.slots)
    assert not same(kv, i.kv)
    for _ in range(2):  # the second time with what the first layer worked out
        out = kernels.attend(
            i.q, i.new_k, i.new_v, kv[:, LAYER, 0], kv[:, LAYER, 1], batch,
            scale=case.scale, window=window,
        )  # fmt: skip
        check(out, case)
    assert same(kv, i.kv)


@CACHES
def test_write_leaves_all_else_alone(cache: str) -> None:
    case = replace(CASE, cache=cache)
    i = case.inputs
    kv = torch.zeros_like(i.kv)
    kernels.write_kv(i.new_k, i.new_v, kv[:, LAYER, 0], kv[:, LAYER, 1], i.slots)
    for token, slot in enumerate(i.slots.tolist()):
        if slot >= 0:
            for side, new in enumerate((i.new_k, i.new_v)):
                held = kv[slot // 12, LAYER, side, slot % 12]
                assert same(held, rounded(new[token], case.held))
            kv[slot // 12, LAYER, :, slot % 12] = 0
    assert not kv.float().any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("cache", FORMATS)
def test_what_8_bits_cannot_hold(cache: str, dtype: torch.dtype) -> None:
    check_stored(cache, dtype)
    check_no_number(cache, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, *FORMATS.values()])
def test_copies_read_before_they_write(dtype: torch.dtype) -> None:
    cache = torch.arange(6.0).repeat_interleave(4).view(6, 2, 2).to(dtype)
    before = cache.clone()
    kernels.copy_blocks(cache, torch.tensor([1, 1, 5]), torch.tensor([3, 0, 2]))
    assert same(cache, before[[1, 1, 5, 1, 4, 5]])
    kernels.copy_blocks(cache, torch.tensor([], dtype=torch.int64), torch.tensor([]).long())
    assert same(cache, before[[1, 1, 5, 1, 4, 5]])


def test_a_view_of_one_layer_is_no_cache_to_copy_in() -> None:
    kv = torch.zeros(4, 2, 2, 8, 1, 16)
    with pytest.raises(ValueError, match="contiguous run"):
        kernels.copy_blocks(kv[:, :, 0], torch.tensor([1]), torch.tensor([2]))


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


def test_an_empty_batch() -> None:
    batch = AttentionBatch.build([], [], [], block_size=16)
    assert (batch.num_decodes, batch.num_tokens, batch.max_query_len) == (0, 0, 1)


def test_the_example() -> None:
    assert doctest.testmod(batch) == (0, 2)
