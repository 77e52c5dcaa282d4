"""Paged attention in plain torch: decodes of like length at once, chunks one by one.

Keys and values are gathered row by row, and only rows that a query may see: past the end of a
context the last row is gathered again, so that what an unused slot holds never matters. Row numbers
and masks are worked out once a step; per layer there are two gathers and one attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention

from pagedsim.kernels.batch import AttentionBatch
from pagedsim.kernels.reference.cache import rows_apart, rows_between, rows_of

NEAR = 2**20
"""Bytes of keys and values that are gathered at once: what a core keeps near by."""


class Layer(NamedTuple):
    """How a layer's keys lie in the cache, and how its queries attend to them."""

    between: int
    """Rows from one block to the next."""
    block_size: int
    dtype: torch.dtype
    """Of the queries."""
    window: int | None
    scale: float
    softcap: float | None


class Sight(NamedTuple):
    """What some queries see."""

    rows: torch.Tensor
    """Cache rows to gather, flat; of the keys, and behind them, where they are gathered at once, of
    the values."""
    bias: torch.Tensor | None
    """0 where a query sees a key, -inf where not; None for plain causal attention of a chunk, and
    where decodes see all keys."""
    blind: torch.Tensor | None = None
    """Which queries see nothing at all (padding); None for none."""


class Decodes(NamedTuple):
    """The decodes of a step, from the shortest context to the longest, in groups."""

    order: torch.Tensor
    back: torch.Tensor
    """For each decode its index in `order`."""
    sizes: list[int]
    sights: list[Sight]


def attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    batch: AttentionBatch,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """See `ops.attend`; the keys and values of this step are in the cache already."""
    tokens, block_size = q.shape[0], k_cache.shape[1]
    layer = Layer(rows_between(k_cache), block_size, q.dtype, window, scale, softcap)
    decodes, chunks = batch.once("sequences", partial(_sequences, batch))
    parts = []
    if decodes:
        apart = rows_apart(k_cache, v_cache)
        width = k_cache.shape[2] * k_cache.shape[3] * q.element_size()
        most = max(NEAR // (2 * width), 1)
        seen = batch.once(
            (layer, apart, most), lambda: _decodes(batch, decodes, layer, apart, most)
        )
        outputs = []
        if len(seen.sizes) == 1:
            groups: Sequence[torch.Tensor] = (q if decodes == tokens else q[:decodes],)
        else:
            groups = q.index_select(0, seen.order).split(seen.sizes)
        for group, sight in zip(groups, seen.sights, strict=True):
            if apart is None:
                caches = rows_of(k_cache), rows_of(v_cache)
                both = torch.cat([rows.index_select(0, sight.rows) for rows in caches])
            else:
                both = rows_of(k_cache, apart).index_select(0, sight.rows)
            outputs.append(_decode(group, both, k_cache.shape[2], sight, layer))
        if len(outputs) > 1:
            outputs = [torch.cat(outputs).index_select(0, seen.back)]
        parts += outputs
    begin = decodes
    for i, (length, context) in enumerate(chunks):
        queries = q[begin : begin + length]
        begin += length
        if length and context:
            see = partial(_see_chunk, batch, batch.num_decodes + i, length, context, layer)
            sight = batch.once((i, layer), see)
            parts.append(_prefill(queries, k_cache, v_cache, sight, layer))
        else:
            parts.append(torch.zeros_like(queries))
    if begin < tokens or not parts:
        parts.append(torch.zeros_like(q[begin:]))
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def _sequences(batch: AttentionBatch) -> tuple[int, Sequence[tuple[int, int]]]:
    """How many decodes there are, and (tokens, context length) of each place for a chunk."""
    if not batch.longest:
        return batch.num_decodes, batch.chunks
    starts = batch.query_start[batch.num_decodes :]
    contexts = batch.context_lens[batch.num_decodes :]
    return int(starts[0]), list(zip(starts.diff().tolist(), contexts.tolist(), strict=True))


def _decodes(
    batch: AttentionBatch, count: int, layer: Layer, apart: int | None, most: int
) -> Decodes:
    """Groups that gather `most` rows each, or are one sequence."""
    seen = batch.context_lens[:count].long()
    if layer.window is not None:
        seen = seen.clamp(max=layer.window)
    order = seen.argsort(stable=True)
    sizes = [0]
    for length in seen[order].tolist():
        if sizes[-1] and (sizes[-1] + 1) * length > most:
            sizes.append(0)
        sizes[-1] += 1
    if len(sizes) == 1:
        order = torch.arange(len(order))
    sights = [_see_decodes(batch, group, layer, apart) for group in order.split(sizes)]
    return Decodes(order, order.argsort(), sizes, sights)


def _see_decodes(
    batch: AttentionBatch, group: torch.Tensor, layer: Layer, apart: int | None
) -> Sight:
    between, block_size, dtype, window, *_ = layer
    contexts = batch.context_lens[group, None].long()
    first = torch.zeros_like(contexts) if window is None else (contexts - window).clamp_(min=0)
    seen = (contexts - first).clamp_(min=1)
    column = torch.arange(int(seen.max()))
    position = first + torch.minimum(column, seen - 1)
    places = group if batch.rows is None else batch.rows[group].long()
    blocks = batch.block_tables[places[:, None], position // block_size]
    rows = blocks.long() * between + position % block_size
    bias, blind = None, None
    if bool((seen != seen[0]).any()):
        bias = torch.zeros(rows.shape, dtype=dtype).masked_fill_(column >= seen, -torch.inf)
        bias = bias[:, None, None]
    if bool((contexts == 0).any()):
        blind = (contexts == 0).view(-1, 1, 1)
        rows.masked_fill_(contexts == 0, 0)  # its block table may hold anything
    rows = rows.flatten()
    both = rows if apart is None else torch.cat((rows, rows + apart))
    return Sight(both, bias, blind)


def _decode(
    q: torch.Tensor, both: torch.Tensor, kv_heads: int, sight: Sight, layer: Layer
) -> torch.Tensor:
    """The group of query heads that share a KV head takes the place of the query tokens."""
    n, heads, head_dim = q.shape
    k, v = _as(q, both).view(2, n, -1, kv_heads, head_dim).transpose(2, 3).unbind()
    out = _softmax(q.unflatten(1, (kv_heads, -1)), k, v, sight.bias, layer, causal=False)
    out = out.reshape(n, heads, head_dim)
    return out if sight.blind is None else out.masked_fill_(sight.blind, 0)


def _see_chunk(
    batch: AttentionBatch, sequence: int, length: int, context: int, layer: Layer
) -> Sight:
    between, block_size, dtype, window, *_ = layer
    start = context - length
    first = 0 if window is None else max(0, start + 1 - window)
    key = torch.arange(first, context)
    table = batch.block_tables[sequence if batch.rows is None else batch.rows[sequence]]
    rows = table[key // block_size].long() * between + key % block_size
    if start == first == 0 and (window is None or window >= context):
        return Sight(rows, None)
    query = torch.arange(start, context)[:, None]
    hidden = key > query
    if window is not None:
        hidden |= key <= query - window
    return Sight(rows, torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, -torch.inf))


def _prefill(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, sight: Sight, layer: Layer
) -> torch.Tensor:
    """KV heads take the place of the batch and the query heads of a group that of the heads."""
    kv_heads, head_dim = k_cache.shape[2:]
    queries = q.unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3)
    k, v = (
        _as(q, rows_of(cache).index_select(0, sight.rows))
        .view(-1, kv_heads, 1, head_dim).permute(1, 2, 0, 3).expand(-1, queries.shape[1], -1, -1)
        for cache in (k_cache, v_cache)
    )  # fmt: skip
    out = _softmax(queries, k, v, sight.bias, layer, causal=sight.bias is None)
    return out.permute(2, 0, 1, 3).reshape(q.shape)


def _as(q: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Rows of the cache in the dtype of the queries."""
    return rows if rows.dtype == q.dtype else rows.to(q.dtype)


def _softmax(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None, layer: Layer,
    causal: bool,
) -> torch.Tensor:  # fmt: skip
    scale, softcap = layer.scale, layer.softcap
    if softcap is None:
        return scaled_dot_product_attention(q, k, v, attn_mask=bias, is_causal=causal, scale=scale)
    scores = torch.matmul(q.float(), k.float().transpose(-1, -2)) * (scale / softcap)
    scores = scores.tanh_().mul_(softcap)
    if causal:
        bias = torch.full(scores.shape[-2:], -torch.inf).triu_(1)
    if bias is not None:
        scores += bias
    return torch.matmul(torch.softmax(scores, -1), v.float()).to(q.dtype)
