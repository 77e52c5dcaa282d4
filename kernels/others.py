"""Attention by kernels of other packages, over the engine's cache: FlashInfer, FlashAttention 2, 3.

An `Attention` takes what `ops.attend_cached`, ours, takes, and returns the same. So each can be
raced in the same engine. The cache is theirs as it is: NHD pages of one layer, with strides.
Compressed keys and values (MLA) are ours alone.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import partial
from importlib import import_module
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch.nn.functional import pad

from pagedsim.kernels.batch import AttentionBatch
from pagedsim.kernels.float8 import is_float8


class _Wrapper(NamedTuple):
    """One of FlashInfer's, and when the copies of its last plan were done."""

    library: Any
    planned: torch.cuda.Event | None


class FlashInfer:
    """FlashInfer's kernels, which its `auto` chooses for the GPU.

    The host plans each step, once for all layers with the same masks, from lengths that a graph
    would not see change. So there is no padding: a context is not 0.
    """

    HEAD_DIMS = (64, 128, 256)
    WORKSPACE = 384 << 20
    """Bytes of partial results; what FlashInfer advises, 128 MiB, is too little for many heads."""

    def __init__(self, device: torch.device) -> None:
        self._library = import_module("flashinfer")
        self._workspace = torch.zeros(self.WORKSPACE, dtype=torch.uint8, device=device)
        self._wrappers: dict[Hashable, _Wrapper] = {}

    def __call__(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        batch: AttentionBatch,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> torch.Tensor:
        """As `ops.attend_cached`."""
        blank = torch.empty_like if batch.covers(len(q)) else torch.zeros_like
        out = blank(q, memory_format=torch.contiguous_format)
        plan: dict[str, Any] = {
            "sm_scale": scale,
            "window_left": -1 if window is None else window - 1,
            "logits_soft_cap": softcap or 0.0,
            "q_data_type": q.dtype,
            "kv_data_type": k_cache.dtype,
        }
        ends = 0, batch.num_decodes, batch.num_tokens
        for chunks, rows in enumerate((slice(*ends[:2]), slice(*ends[1:]))):
            if rows.start < rows.stop:
                key = (bool(chunks), q.shape[1:], k_cache.shape[1:], *plan.values())
                wrapper = batch.once(key, partial(self._planned, key, q, k_cache, batch, plan))
                wrapper.run(q[rows], (k_cache, v_cache), out=out[rows])
        return out

    def _planned(
        self,
        key: tuple[Any, ...],
        q: torch.Tensor,
        k_cache: torch.Tensor,
        batch: AttentionBatch,
        plan: dict[str, Any],
    ) -> Any:
        """The wrapper of this kind, planned for the decodes or for the chunks of a step."""
        (heads, dim), (block_size, kv_heads, _) = q.shape[1:], k_cache.shape[1:]
        chunks = key[0]
        if key not in self._wrappers:
            self._wrappers[key] = self._wrapper(chunks, heads // kv_heads, k_cache)
        wrapper, planned = self._wrappers[key]
        if planned is not None:  # its buffer on the host may be written again
            planned.synchronize()
        sizes = heads, kv_heads, dim, block_size
        if chunks:
            starts = [0, *accumulate(length for length, _ in batch.chunks)]
            contexts: Sequence[int] = [context for _, context in batch.chunks]
            paged = _pages(batch, slice(batch.num_decodes, None), contexts, block_size)
            wrapper.plan(_ints(starts), *paged, *sizes, causal=True, **plan)
        else:
            paged = _pages(
                batch, slice(0, batch.num_decodes), batch.known_decode_contexts, block_size
            )
            wrapper.plan(*paged, *sizes, **plan)
        if planned is not None:
            planned.record()
        return wrapper

    def _wrapper(self, chunks: bool, group: int, k_cache: torch.Tensor) -> _Wrapper:
        if chunks:
            wrapper = self._library.BatchPrefillWithPagedKVCacheWrapper(self._workspace, "NHD")
        else:
            # Its other kernel has some sizes of groups alone, and is slower for large ones.
            tensor_cores = group > 2 or is_float8(k_cache.dtype)
            wrapper = self._library.BatchDecodeWithPagedKVCacheWrapper(
                self._workspace, "NHD", use_tensor_cores=tensor_cores
            )
        return _Wrapper(wrapper, torch.cuda.Event() if k_cache.is_cuda else None)


def _pages(
    batch: AttentionBatch, part: slice, contexts: Sequence[int], block_size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of some sequences, one after another: where each one's blocks begin, on the host, the blocks,
    where the tables are, and the tokens in each one's last block, on the host."""
    lengths = _ints(contexts)
    counts = (lengths + block_size - 1) // block_size
    begins = pad(counts.cumsum(0, dtype=torch.int32), (1, 0))
    last = lengths - (counts - 1).clamp(min=0) * block_size
    tables, rows = batch.tables(part)
    total, device = int(begins[-1]), tables.device
    first, counts = begins[:-1].to(device, non_blocking=True), counts.to(device, non_blocking=True)
    sequence = torch.repeat_interleave(counts, output_size=total)
    block = torch.arange(total, device=device) - first[sequence]
    row = sequence if rows is None else rows[sequence].long()
    return begins, tables[row, block], last


def _ints(numbers: Sequence[int]) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


class FlashAttention:
    """FlashAttention's kernels, of its second or third version; a CUDA graph can hold them."""

    PAGE = 256
    """A block's size is a multiple of it in the second version."""

    def __init__(self, third: bool) -> None:
        self._library = import_module("flash_attn_interface" if third else "flash_attn")
        self._third = third

    def __call__(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        batch: AttentionBatch,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> torch.Tensor:
        """As `ops.attend_cached`."""
        masks: dict[str, Any] = {
            "softmax_scale": scale,
            "causal": True,
            "window_size": (-1, -1) if window is None else (window - 1, 0),
            "softcap": softcap or 0.0,
        }
        n, table = batch.num_decodes, "page_table" if self._third else "block_table"
        attend, decoded = self._library.flash_attn_with_kvcache, q[:0]
        if n:
            contexts = batch.decodes[1]
            tables = batch.once("decodes' tables", lambda: _own(*batch.decodes[::2]))
            queries = q[:n].unsqueeze(1)
            paged: dict[str, Any] = {"cache_seqlens": contexts, table: tables}
            decoded = attend(queries, k_cache, v_cache, **paged, **masks).squeeze(1)
        if not batch.chunked:
            return decoded if n == len(q) else pad(decoded, (0, 0, 0, 0, 0, len(q) - n))
        # What stands before the first chunk's tokens is not written.
        _, starts, contexts, _ = batch.spans
        tables = batch.once("chunks' tables", lambda: _own(*batch.spans[::3]))
        longest, paged = batch.max_query_len, {table: tables, "cu_seqlens_q": starts}
        if self._third:
            paged |= {"cache_seqlens": contexts, "max_seqlen_q": longest}
            out = attend(q, k_cache, v_cache, **paged, **masks)
        else:
            ends = batch.once(
                "chunks' ends", lambda: pad(contexts.cumsum(0, dtype=torch.int32), (1, 0))
            )
            most = tables.shape[1] * k_cache.shape[1]
            paged |= {"cu_seqlens_k": ends, "max_seqlen_q": longest, "max_seqlen_k": most}
            out = self._library.flash_attn_varlen_func(q, k_cache, v_cache, **paged, **masks)
        if batch.longest:  # places of decodes that there are not hold tokens of chunks
            taken = (batch.decodes[1] > 0)[:, None, None]
            decoded = torch.where(taken, decoded, out[:n])
        out[:n] = decoded
        if not batch.covers(len(q)):
            out[batch.num_tokens :] = 0
        return out


def _own(tables: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
    """A table for each sequence, in their order."""
    return tables if rows is None else tables.index_select(0, rows)
