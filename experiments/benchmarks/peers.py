"""Others that attend, over the same keys and values: those that are installed and can.

SDPA, FlexAttention and torch's `varlen_attn` get keys and values without blocks, one run for each
sequence, which is a favour: they need not look anything up. Of 8 bits they can make nothing, and
the first two of contexts that differ neither. FlashInfer and FlashAttention 3 get the same cache as
we do, FlashAttention 2 the same in pages of 256 tokens: it takes no smaller ones.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import warnings
from collections.abc import Callable, Mapping
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from experiments.benchmarks.shapes import Problem
from pagedsim.kernels.float8 import AUTO

PAGE = 256
"""Tokens of a page of FlashAttention 2, at least."""


class Contender(NamedTuple):
    """A way to compute a problem."""

    call: Callable[[], Any]
    rows: Callable[[Any], torch.Tensor]
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


def varlen(problem: Problem) -> Contender | None:
    """torch's own `varlen_attn`, over the sequences one after another."""
    name = "torch.nn.attention.varlen"
    if not _sixteen_on_a_gpu(problem) or importlib.util.find_spec(name) is None:
        return None
    attend: Any = importlib.import_module(name).varlen_attn
    case = problem.case
    runs = problem.runs()
    k, v = (torch.cat([run[at] for run in runs]) for at in (0, 1))
    ends = torch.tensor([0, *accumulate(case.contexts)], dtype=torch.int32, device=k.device)
    masks: dict[str, Any] = {"scale": problem.scale}
    masks["window_size"] = (-1, 0)  # causal, from the end of a context
    if "enable_gqa" in inspect.signature(attend).parameters:
        masks["enable_gqa"] = case.shape.group > 1  # before there was this, it was always so
    places = (problem.batch.query_start, ends, case.queries, max(case.contexts))
    return Contender(lambda: attend(problem.q, k, v, *places, **masks), lambda out: out)


def flash(problem: Problem) -> Contender | None:
    """FlashAttention over a paged cache: version 3, or else 2, whichever is installed."""
    if not _sixteen_on_a_gpu(problem):
        return None
    case = problem.case
    caches, tables, named = (problem.k_cache, problem.v_cache), problem.tables, "page_table"
    if importlib.util.find_spec("flash_attn_interface") is not None:
        library: Any = importlib.import_module("flash_attn_interface")
    elif importlib.util.find_spec("flash_attn") is not None:
        library = importlib.import_module("flash_attn")
        caches, tables = _paged(problem, PAGE)
        named = "block_table"
    else:
        return None
    q = problem.q.unflatten(0, (len(case.contexts), case.queries))
    settings: dict[str, Any] = {named: tables, "cache_seqlens": problem.batch.context_lens}
    settings |= {"softmax_scale": problem.scale, "causal": True}

    def rows(out: Any) -> torch.Tensor:
        found: torch.Tensor = out[0] if isinstance(out, tuple) else out  # with what it also tells
        return found.flatten(0, 1)

    return Contender(lambda: library.flash_attn_with_kvcache(q, *caches, **settings), rows)


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
    "varlen": varlen,
    "flash": flash,
    "flashinfer": flashinfer,
}


def _dense(problem: Problem) -> bool:
    """Whether keys and values can be one tensor of the queries' dtype."""
    return problem.case.cache == AUTO and not problem.case.beside


def _sixteen_on_a_gpu(problem: Problem) -> bool:
    return problem.q.device.type == "cuda" and problem.case.cache == AUTO


def _paged(problem: Problem, size: int) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Keys and values in pages of so many tokens, and who has which."""
    pages: list[list[torch.Tensor]] = [[], []]
    counts = []
    for run in problem.runs():
        counts.append(-(-len(run[0]) // size))
        for found, own in zip(pages, run, strict=True):
            room = own.new_zeros(counts[-1] * size, *own.shape[1:])
            room[: len(own)] = own
            found.append(room.unflatten(0, (counts[-1], size)))
    k, v = (torch.cat(own) for own in pages)
    order = torch.arange(sum(counts), dtype=torch.int32, device=k.device).split(counts)
    return (k, v), torch.nn.utils.rnn.pad_sequence(list(order), batch_first=True)


def _flat(out: torch.Tensor) -> torch.Tensor:
    return out.transpose(1, 2).flatten(0, 1)
