"""Stand-ins for FlashInfer and FlashAttention: their signatures, as far as they are called, and
attention in plain torch, computed from nothing but the arguments, which are checked first."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

from pagedsim.kernels import reference
from pagedsim.kernels.batch import Attention, AttentionBatch
from pagedsim.kernels.others import FlashAttention, FlashInfer


def seen(
    q: torch.Tensor,
    cache: tuple[torch.Tensor, torch.Tensor],
    tables: torch.Tensor,
    starts: torch.Tensor,
    contexts: torch.Tensor,
    *,
    scale: float,
    left: int,
    softcap: float,
) -> torch.Tensor:
    """Attention of some sequences; NaN where no sequence is."""
    for column in (tables, starts, contexts):
        assert column.dtype == torch.int32
    assert len(tables) == len(contexts) == len(starts) - 1
    lengths = starts.diff().tolist()
    decodes = len(lengths) if set(lengths) <= {1} else 0
    chunks = tuple(zip(lengths, contexts.tolist(), strict=True))[decodes:]
    begin, end = int(starts[0]), int(starts[-1])
    batch = AttentionBatch(tables, starts - begin, contexts, contexts.long(), decodes, chunks)
    out = torch.full_like(q, torch.nan, memory_format=torch.contiguous_format)
    out[begin:end] = reference.attention(
        q[begin:end], *cache, batch, scale=scale, softcap=softcap or None,
        window=None if left < 0 else left + 1,
    )  # fmt: skip
    return out


class Wrapper:
    """What both wrappers of FlashInfer do, between `plan` and `run`."""

    def __init__(
        self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD", **options: bool
    ) -> None:
        assert float_workspace_buffer.dtype == torch.uint8 and not float_workspace_buffer.any()
        assert kv_layout == "NHD" and options.keys() <= {"use_tensor_cores"}

    def planned(
        self, starts: torch.Tensor, indptr: torch.Tensor, indices: torch.Tensor,
        last_page_len: torch.Tensor, num_qo_heads: int, num_kv_heads: int, head_dim: int,
        page_size: int, *, sm_scale: float, window_left: int, logits_soft_cap: float,
        q_data_type: torch.dtype, kv_data_type: torch.dtype,
    ) -> None:  # fmt: skip
        """`starts` are those of queries."""
        counts = indptr.diff()
        assert (counts > 0).eq((last_page_len >= 1) & (last_page_len <= page_size)).all()
        assert len(indices) == indptr[-1] and num_qo_heads % num_kv_heads == 0
        self._shapes = (num_qo_heads, head_dim), (page_size, num_kv_heads, head_dim)
        self._dtypes = q_data_type, kv_data_type
        tables = torch.nn.utils.rnn.pad_sequence(
            list(indices.split(counts.tolist())), batch_first=True, padding_value=2**30
        )
        contexts = (counts - 1).clamp(min=0) * page_size + last_page_len
        self._sequences = tables, starts, contexts
        self._masks: Any = {"scale": sm_scale, "left": window_left, "softcap": logits_soft_cap}

    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: tuple[torch.Tensor, torch.Tensor],
        *,
        out: torch.Tensor,
    ) -> torch.Tensor:
        assert self._shapes == (q.shape[1:], paged_kv_cache[0].shape[1:])
        assert self._dtypes == (q.dtype, paged_kv_cache[1].dtype)
        return out.copy_(seen(q, paged_kv_cache, *self._sequences, **self._masks))


class Decode(Wrapper):
    def plan(self, indptr: torch.Tensor, *rest: Any, **named: Any) -> None:
        self.planned(torch.arange(len(indptr), dtype=torch.int32), indptr, *rest, **named)


class Prefill(Wrapper):
    def plan(self, qo_indptr: torch.Tensor, *rest: Any, causal: bool, **named: Any) -> None:
        assert causal
        self.planned(qo_indptr, *rest, **named)


def with_kvcache(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, *, cache_seqlens: torch.Tensor,
    block_table: torch.Tensor, softmax_scale: float, causal: bool, window_size: tuple[int, int],
    softcap: float,
) -> torch.Tensor:  # fmt: skip
    """FlashAttention 2's `flash_attn_with_kvcache`."""
    assert causal and window_size[1] == min(window_size[0], 0) and q.shape[1] == 1
    starts = torch.arange(len(q) + 1, dtype=torch.int32)
    masks: Any = {"scale": softmax_scale, "left": window_size[0], "softcap": softcap}
    cache = k_cache, v_cache
    return seen(q.squeeze(1), cache, block_table, starts, cache_seqlens, **masks).unsqueeze(1)


def varlen(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor, max_seqlen_q: int, max_seqlen_k: int, *, block_table: torch.Tensor,
    softmax_scale: float, causal: bool, window_size: tuple[int, int], softcap: float,
) -> torch.Tensor:  # fmt: skip
    """FlashAttention 2's `flash_attn_varlen_func`."""
    assert causal and window_size[1] == min(window_size[0], 0) and cu_seqlens_k[0] == 0
    contexts = cu_seqlens_k.diff()
    assert cu_seqlens_q.diff().max() <= max_seqlen_q and contexts.max() <= max_seqlen_k
    masks: Any = {"scale": softmax_scale, "left": window_size[0], "softcap": softcap}
    return seen(q, (k, v), block_table, cu_seqlens_q, contexts, **masks)


def third_with_kvcache(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, *, page_table: torch.Tensor,
    cache_seqlens: torch.Tensor, cu_seqlens_q: torch.Tensor | None = None,
    max_seqlen_q: int | None = None, **masks: Any,
) -> torch.Tensor:  # fmt: skip
    """FlashAttention 3's `flash_attn_with_kvcache`."""
    if cu_seqlens_q is None:
        paged: Any = {"cache_seqlens": cache_seqlens, "block_table": page_table}
        return with_kvcache(q, k_cache, v_cache, **paged, **masks)
    assert max_seqlen_q is not None
    ends = torch.nn.functional.pad(cache_seqlens.cumsum(0, dtype=torch.int32), (1, 0))
    most = max_seqlen_q, int(cache_seqlens.max())
    return varlen(q, k_cache, v_cache, cu_seqlens_q, ends, *most, block_table=page_table, **masks)


PACKAGES: dict[str, tuple[str, dict[str, Any], Callable[[], Attention]]] = {
    "flashinfer": (
        "flashinfer",
        {
            "BatchDecodeWithPagedKVCacheWrapper": Decode,
            "BatchPrefillWithPagedKVCacheWrapper": Prefill,
        },
        lambda: FlashInfer(torch.device("cpu")),
    ),
    "fa2": (
        "flash_attn",
        {"flash_attn_with_kvcache": with_kvcache, "flash_attn_varlen_func": varlen},
        lambda: FlashAttention(third=False),
    ),
    "fa3": (
        "flash_attn_interface",
        {"flash_attn_with_kvcache": third_with_kvcache},
        lambda: FlashAttention(third=True),
    ),
}


def installed(name: str, patch: pytest.MonkeyPatch) -> Attention:
    """An attention over its package's stand-in."""
    module, members, make = PACKAGES[name]
    stand_in = ModuleType(module)
    vars(stand_in).update(members)
    patch.setitem(sys.modules, module, stand_in)
    patch.setattr(FlashInfer, "WORKSPACE", 16)
    return make()
