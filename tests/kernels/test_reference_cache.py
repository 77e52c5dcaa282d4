"""Writing into the cache and copying within it, in plain torch; and the batch that says where."""

from __future__ import annotations

import doctest
from dataclasses import replace

import pytest
import torch

import kernels
from kernels import AttentionBatch
from tests.kernels.cases import LAYER, Case, check

CASE = Case(((1, 40), (1, 0), (1, 33), (5, 30), (23, 23)), block_size=12, tail=2)


@pytest.mark.parametrize("window", [None, 9])
def test_a_layer_writes_then_attends(window: int | None) -> None:
    case = replace(CASE, window=window)
    i = case.inputs
    whole, batch = i.kv.clone(), case.batch
    blank = i.kv.clone().flatten(0, 3)
    kv = whole.clone()
    live = i.slots[i.slots >= 0]
    for cache in (kv[:, LAYER, 0], kv[:, LAYER, 1]):
        cache[live // 12, live % 12] = torch.nan
    assert not torch.equal(kv.nan_to_num(), whole.nan_to_num())
    for _ in range(2):  # the second time with what the first layer worked out
        out = kernels.attend(
            i.q, i.new_k, i.new_v, kv[:, LAYER, 0], kv[:, LAYER, 1], batch,
            scale=case.scale, window=window,
        )  # fmt: skip
        check(out, case)
    assert torch.equal(kv.nan_to_num(), whole.nan_to_num())
    assert torch.equal(kv.isnan().flatten(0, 3), blank.isnan())


def test_write_leaves_all_else_alone() -> None:
    i = CASE.inputs
    kv = torch.zeros_like(i.kv)
    kernels.write_kv(i.new_k, i.new_v, kv[:, LAYER, 0], kv[:, LAYER, 1], i.slots)
    for token, slot in enumerate(i.slots.tolist()):
        if slot >= 0:
            assert torch.equal(kv[slot // 12, LAYER, 0, slot % 12], i.new_k[token])
            assert torch.equal(kv[slot // 12, LAYER, 1, slot % 12], i.new_v[token])
            kv[slot // 12, LAYER, :, slot % 12] = 0
    assert not kv.any()


def test_copies_read_before_they_write() -> None:
    cache = torch.arange(6 * 4).view(6, 2, 2)
    before = cache.clone()
    kernels.copy_blocks(cache, torch.tensor([1, 1, 5]), torch.tensor([3, 0, 2]))
    assert torch.equal(cache, before[[1, 1, 5, 1, 4, 5]])
    kernels.copy_blocks(cache, torch.tensor([], dtype=torch.int64), torch.tensor([]).long())
    assert torch.equal(cache, before[[1, 1, 5, 1, 4, 5]])


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
    assert doctest.testmod(kernels.batch) == (0, 2)
