"""Others that attend, over the same keys and values: those that are installed and can.

SDPA and FlexAttention get keys and values without blocks, one run a sequence, which is a favour:
they need not look anything up; of 8 bits they can make nothing, nor of contexts that differ.
FlashInfer gets the same cache as we do.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable, Mapping
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from experiments.benchmarks.shapes import Problem
from pagedsim.kernels.float8 import AUTO


class Contender(NamedTuple):
    """A way to compute a problem."""

    call: Callable[[], torch.Tensor]
    rows: Callable[[torch.Tensor], torch.Tensor]
    """From what a call returns to [tokens, heads, dim]."""


def sdpa(problem: Problem) -> Contender | None:
    """torch's `scaled_dot_product_attention`; it has no causal mask for a chunk."""
    if problem.case.kind == "chunk" or not _dense(problem):
        return None
    q, (k, v) = problem.dense_queries, problem.dense
    causal = problem.case.queries > 1
    return Contender(
        lambda: torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=causal, scale=problem.scale, enable_gqa=True
        ),
        _flat,
    )


def flex(problem: Problem) -> Contender | None:
    """torch's FlexAttention, compiled for each shape by itself; on a CPU as it is."""
    if not _dense(problem):
        return None
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    case, device = problem.case, problem.q.device
    q, (k, v) = problem.dense_queries, problem.dense
    before = case.context - case.queries

    def seen(batch: object, head: object, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return query + before >= key

    mask = None
    if case.queries > 1:
        mask = create_block_mask(seen, None, None, case.queries, case.context, device=device)
    attend: Any = flex_attention
    if device.type == "cuda":
        torch.compiler.reset()  # after some shapes of one function it would compile no more
        attend = torch.compile(flex_attention, dynamic=False)
    else:
        warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
    return Contender(
        lambda: attend(q, k, v, block_mask=mask, scale=problem.scale, enable_gqa=True), _flat
    )


def flashinfer(problem: Problem) -> Contender | None:
    """FlashInfer's paged wrappers; planning is not counted, as it is done once for all layers."""
    if problem.q.device.type != "cuda" or importlib.util.find_spec("flashinfer") is None:
        return None
    library: Any = importlib.import_module("flashinfer")

    case, shape, device = problem.case, problem.case.shape, problem.q.device
    ints: Any = {"dtype": torch.int32, "device": device}
    room = torch.empty(256 * 2**20, dtype=torch.uint8, device=device)
    ends = [0, *accumulate(map(len, problem.blocks))]
    last = [(context - 1) % case.block_size + 1 for context in case.contexts]
    starts = torch.arange(len(last) + 1, **ints)
    pages = (torch.tensor(ends, **ints), torch.cat(problem.blocks), torch.tensor(last, **ints))
    heads = (shape.heads, shape.kv_heads, shape.head_dim, case.block_size)
    kind: Any = {
        "q_data_type": problem.q.dtype,
        "kv_data_type": problem.k_cache.dtype,
        "sm_scale": problem.scale,
    }
    if case.queries == 1:
        wrapper = library.BatchDecodeWithPagedKVCacheWrapper(
            room, "NHD", use_tensor_cores=shape.group > 1
        )
        wrapper.plan(*pages, *heads, **kind)
    else:
        wrapper = library.BatchPrefillWithPagedKVCacheWrapper(room, "NHD")
        wrapper.plan(starts * case.queries, *pages, *heads, causal=True, **kind)
    caches = (problem.k_cache, problem.v_cache)
    return Contender(lambda: wrapper.run(problem.q, caches), lambda out: out)


PEERS: Mapping[str, Callable[[Problem], Contender | None]] = {
    "sdpa": sdpa,
    "flex": flex,
    "flashinfer": flashinfer,
}


def _dense(problem: Problem) -> bool:
    """Whether keys and values can be one tensor of the queries' dtype."""
    return problem.case.cache == AUTO and not problem.case.beside


def _flat(out: torch.Tensor) -> torch.Tensor:
    return out.transpose(1, 2).flatten(0, 1)
