"""The kernels' interface: Triton on a GPU, plain torch on a CPU, where Triton is not required.

The cache is `[num_blocks, layers, 2, block_size, kv_heads, head_dim]`, so that a block is one
contiguous run over all layers. A layer's part is a strided view of it:

    k_cache, v_cache = kv[:, layer, 0], kv[:, layer, 1]  # [num_blocks, block_size, kv_heads, dim]

Every function takes such views, of any block size. The cache is in the dtype of what is computed,
or in one of `float8.FORMATS`: then keys and values are rounded as they are written, what is beyond
the largest number to that, and attention computes in the dtype of its queries. Query heads are a
multiple of KV heads: query head h reads KV head h // (heads // kv_heads).
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch.nn import functional

from pagedsim.kernels import reference
from pagedsim.kernels.batch import Attention, AttentionBatch, RowNorm, SamplingTensors
from pagedsim.kernels.float8 import FORMATS, raw
from pagedsim.kernels.tiles import FEW


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    batch: AttentionBatch,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    attention: Attention | None = None,
) -> torch.Tensor:
    """One layer of one step: write its keys and values, then attend to all of the context, by
    `attention`, if not by `attend_cached`.

    q is [tokens, heads, dim], k and v [tokens, kv_heads, dim], rows as `AttentionBatch` orders
    them; returns [tokens, heads, dim], zeros for padding. Causal: a query sees the keys up to its
    own position. With `window` it sees the last `window` of them, its own included. With
    `softcap` a score s becomes softcap × tanh(s / softcap).

    Nothing is read back from the device, and but for a batch with `chunks` the launches depend on
    the shapes alone, so that a CUDA graph can hold them.
    """
    _check(q, k_cache, v_cache)
    write_kv(k, v, k_cache, v_cache, batch)
    attention = attention or attend_cached
    return attention(q, k_cache, v_cache, batch, scale=scale, window=window, softcap=softcap)


def attend_cached(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    batch: AttentionBatch,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """As `attend`, where this step's keys and values are in the cache already."""
    shapes = q.shape, k_cache.shape
    batch.once(("fits", shapes), lambda: _check(q, k_cache, v_cache))
    masks: dict[str, Any] = {"scale": scale, "window": window, "softcap": softcap}
    if not on_gpu(q):
        return reference.attention(q, k_cache, v_cache, batch, **masks)
    blank = torch.empty_like if batch.covers(q.shape[0]) else torch.zeros_like
    out = blank(q, memory_format=torch.contiguous_format)
    if n := batch.num_decodes:
        tables, contexts, rows = batch.decodes
        _kernel("decode").paged_decode(
            q[:n], k_cache, v_cache, tables, contexts,
            rows=rows, out=out[:n], once=batch.once, **masks,
        )  # fmt: skip
    if batch.chunked:  # behind decodes, whose places it may write again
        tables, starts, contexts, rows = batch.spans
        _kernel("attention").paged_attention(
            q, k_cache, v_cache, tables, starts, contexts, max_query_len=batch.max_query_len,
            max_context=batch.max_context, rows=rows, out=out, once=batch.once, **masks,
        )  # fmt: skip
    return out


def attend_latent(
    q: torch.Tensor, cache: torch.Tensor, batch: AttentionBatch, *, rank: int, scale: float
) -> torch.Tensor:
    """Attention over compressed keys and values (MLA), which are in the cache already.

    A block of `cache`, [num_blocks, block_size, 1, width], has one vector a token: the latent, its
    first `rank` elements, and a rotated part. All of it is the key of every head, and the latent
    the value. q is [tokens, heads, width], rows as `AttentionBatch` orders them; returns
    [tokens, heads, rank], zeros for padding. What `attend` says of launches holds here, too.
    """
    _check(q, cache, cache)
    if not on_gpu(q):
        # The rotated part is a value, too, and left out of the result.
        return reference.attention(q, cache, cache, batch, scale=scale)[..., :rank]
    latent = _kernel("latent")
    blank = torch.empty if batch.covers(len(q)) else torch.zeros
    out = blank((*q.shape[:2], rank), dtype=q.dtype, device=q.device)
    given: dict[str, Any] = {"rank": rank, "scale": scale}
    if n := batch.num_decodes:
        tables, contexts, rows = batch.decodes
        latent.attend(q[:n], cache, tables, contexts, rows=rows, out=out[:n], **given)
    if batch.chunked:
        tables, starts, contexts, rows = batch.spans
        latent.attend(q, cache, tables, contexts, query_start=starts, rows=rows, out=out, **given)
    return out


def compress(
    q: torch.Tensor,
    compressed: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    cache: torch.Tensor,
    batch: AttentionBatch,
    *,
    weight: torch.Tensor,
    eps: float,
    interleaved: bool,
    out: torch.Tensor,
) -> None:
    """Put what MLA keeps of a step's tokens into the cache, and rotated queries into `out`.

    `compressed` is [tokens, rank + dim]: the latent, which is normed with `weight` [rank] as in
    `rms_norm`, and the key's part that is rotated; `cache` is as in `attend_latent`. `q` and `out`,
    [tokens, heads, dim], are the queries' parts that are rotated, and do not overlap. `cos` and
    `sin` are as in `rotate`. The pairs that are rotated are neighbours, if `interleaved`, or stand
    in the two halves; rotated they stand in the halves.
    """
    if on_gpu(q):
        _kernel("compress").compress(
            q, compressed, cos, sin, cache, batch,
            weight=weight, eps=eps, interleaved=interleaved, out=out,
        )  # fmt: skip
        return
    latent, key = compressed.tensor_split([len(weight)], -1)
    heads = torch.cat((q, key.unsqueeze(1)), 1)
    if interleaved:
        heads = torch.cat((heads[..., ::2], heads[..., 1::2]), -1)
    swapped = heads.roll(heads.shape[-1] // 2, -1)
    rotated = torch.addcmul(heads * cos[:, None], swapped, sin[:, None])
    out.copy_(rotated[:, :-1])
    latent = functional.rms_norm(latent, weight.shape, weight, eps)
    reference.write(torch.cat((latent, rotated[:, -1]), -1).unsqueeze(1), cache, batch)


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """x / √(mean of x² + eps) × weight, token by token; x is [tokens, size].

    With a `residual` of the same shape, x is added to it in place, and the sum is what is normed.
    """
    if on_gpu(x):
        return _kernel("elementwise").rms_norm(x, weight, eps, residual)
    if residual is not None:
        x = residual.add_(x)
    tokens, size = x.shape
    if tokens == 1 and x.dtype == torch.float32:  # torch's own is ten operations on a CPU
        token = x[0]
        factor = (token.dot(token).item() / size + eps) ** -0.5
        return (x * weight).mul_(factor)
    return functional.rms_norm(x, weight.shape, weight, eps)


def rotate(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    batch: AttentionBatch,
    *,
    weight: torch.Tensor | None = None,
    eps: float = 0.0,
) -> torch.Tensor:
    """Rotary embedding: keys, rotated, and values go into the cache; returns the queries, rotated.

    `qkv` is [tokens, (heads + 2 × kv_heads) × dim], query heads, then keys, then values; it is used
    up. `cos` and `sin` are [tokens, dim], and a head x becomes x × cos + (x with its halves
    swapped) × sin: the first half of `sin` has its sign turned. With a `weight` of
    [heads + kv_heads, dim] each query and key is normed before, as in `rms_norm`.
    """
    shapes = qkv.shape, k_cache.shape
    batch.once(("qkv", shapes), lambda: _check_qkv(qkv, k_cache, v_cache))
    if on_gpu(qkv):
        return _kernel("rotary").rotate(
            qkv, cos, sin, k_cache, v_cache, batch, weight=weight, eps=eps
        )
    kv_heads, head_dim = k_cache.shape[2:]
    heads = qkv.view(qkv.shape[0], qkv.shape[1] // head_dim, head_dim)
    turning = heads[:, :-kv_heads]
    if weight is not None:
        turning.copy_(functional.rms_norm(turning, (head_dim,), None, eps) * weight)
    swapped = turning.roll(head_dim // 2, -1)
    turning.mul_(cos[:, None]).addcmul_(swapped, sin[:, None])
    q, both = heads.split_with_sizes((heads.shape[1] - 2 * kv_heads, 2 * kv_heads), 1)
    if apart := reference.rows_apart(k_cache, v_cache):
        reference.write(both, k_cache, batch, apart)
    else:
        k, v = both.chunk(2, 1)
        write_kv(k, v, k_cache, v_cache, batch)
    return q


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """[tokens, 2 × size] to [tokens, size]: SiLU of the first half times the second."""
    if on_gpu(gate_up):
        return _kernel("elementwise").silu_mul(gate_up)
    gate, up = gate_up.chunk(2, -1)
    return functional.silu(gate).mul_(up)


def experts(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    shared: torch.Tensor | None = None,
) -> torch.Tensor:
    """What a mixture of experts makes of x, [tokens, size]: the sum of those that a token chose.

    `gate_up` is [experts, 2 × inner, size], `down` [experts, size, inner], and an expert is down ×
    `silu_mul` of gate_up × x. `chosen` (integers) and `weights` are [tokens, experts a token]: no
    token chooses one twice. `shared`, like x, is added to the sum, whose order is that of `chosen`.

    Nothing is read back from a GPU, and the launches depend on the shapes alone.
    """
    if chosen.shape != weights.shape or len(chosen) != len(x):
        raise ValueError(f"{tuple(chosen.shape)} and {tuple(weights.shape)} for {len(x)} tokens")
    if not (gate_up.is_contiguous() and down.is_contiguous() and x.stride(1) == 1):
        raise ValueError("the experts and the elements of a token must be contiguous")
    if on_gpu(x):
        return _kernel("grouped").experts(x, gate_up, down, chosen, weights, shared)
    # Tokens are sorted by expert, and put back before they are summed.
    order = chosen.flatten().argsort(stable=True)
    counts = chosen.flatten().bincount(minlength=len(gate_up)).tolist()
    rows = x[order // chosen.shape[1]]
    parts = [
        functional.linear(silu_mul(functional.linear(part, gate_up[expert])), down[expert])
        for expert, part in enumerate(rows.split(counts))
        if len(part)
    ]
    weighted = x.new_empty(order.shape[0], down.shape[1], dtype=torch.float32)
    if parts:
        weighted[order] = torch.cat(parts) * weights.flatten()[order, None].float()
    summed = weighted.view(*chosen.shape, x.shape[1]).sum(1)
    return (summed if shared is None else summed + shared).to(x.dtype)


def product(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    *,
    norm: RowNorm | None = None,
    gated: bool = False,
    done: torch.Tensor | None = None,
) -> torch.Tensor:
    """x @ weightᵀ × scale + bias, in one kernel with what stands around it.

    x is [tokens, in], `weight` [out, in] in its dtype, or in int8 or float8_e4m3fn with a `scale`
    of [out] in float32; `bias` is [out]. With a `norm` x is normed first. `gated` gives SiLU of the
    first half of the outputs times the second. With `done`, `PROGRAMS` zeros (int32) for the calls
    of one stream, several programs may share the inputs of an output; they leave zeros behind.
    """
    _check_product(x, weight)
    if on_gpu(x):
        return _kernel("product").product(x, weight, bias, scale, norm=norm, gated=gated, done=done)
    if norm is not None:  # which works its squares out by itself
        x = rms_norm(x, norm.weight, norm.eps)
    if scale is None:
        y = functional.linear(x, weight, bias)
    else:
        y = functional.linear(x, weight.to(x.dtype)).float() * scale
        y = (y if bias is None else y + bias).to(x.dtype)
    return silu_mul(y) if gated else y


def add_product(
    residual: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    *,
    done: torch.Tensor | None = None,
) -> torch.Tensor:
    """Add x @ weightᵀ × scale + bias, as in `product`, to `residual` in place.

    Returns the squares of each of its tokens, in so many sums, as a `RowNorm` takes them.
    """
    _check_product(x, weight)
    if on_gpu(x):
        return _kernel("product").add_product(residual, x, weight, bias, scale, done=done)
    residual += product(x, weight, bias, scale)
    return residual.float().square().sum(1, keepdim=True)


def few(x: torch.Tensor) -> bool:
    """Whether `product` and `add_product` are faster for so many tokens, [tokens, in], than a
    product by itself and what stands around it by itself; see `tiles.FEW`."""
    return on_gpu(x) and len(x) <= FEW


def route(
    logits: torch.Tensor,
    top_k: int,
    *,
    sums_to_one: bool,
    bias: torch.Tensor | None = None,
    groups: int = 1,
    kept: int = 1,
    scale: float = 1.0,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The `top_k` experts that every token passes, and their weights in `dtype`, best first.

    `logits` is [tokens, experts]. Their softmax is the score, and the weight; with a `bias` of
    [experts] the sigmoid is the weight, and the bias is added for the score. Of `groups` groups of
    experts, side by side, only those `kept` count whose two best have the highest sums. If it
    `sums_to_one`, a token's weights do, before they are multiplied by `scale`. Both results are
    [tokens, each]; of equal scores either may come first.
    """
    if on_gpu(logits):
        return _kernel("route").route(
            logits, top_k, sums_to_one=sums_to_one, bias=bias, groups=groups, kept=kept,
            scale=scale, dtype=dtype,
        )  # fmt: skip
    if bias is None:
        weights, chosen = logits.softmax(-1, dtype=torch.float32).topk(top_k)
    else:
        weights = logits.float().sigmoid()
        scores = weights + bias
        if kept < groups:
            grouped = scores.unflatten(1, (groups, -1))
            best = grouped.topk(2).values.sum(-1).topk(kept).indices
            left_out = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter_(1, best, False)
            scores = grouped.masked_fill(left_out.unsqueeze(-1), -torch.inf).flatten(1)
        chosen = scores.topk(top_k).indices
        weights = weights.gather(1, chosen)
    if sums_to_one:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return chosen, (weights * scale).to(dtype)


def write_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    batch: AttentionBatch,
) -> None:
    """Write k and v, [tokens, kv_heads, dim], where the slots of `batch` say.

    No two slots of a call are the same, but for -1, which writes nothing.
    """
    if on_gpu(k):
        _kernel("cache").write_kv(k, v, k_cache, v_cache, batch)
    else:
        reference.write(k, k_cache, batch)
        reference.write(v, v_cache, batch)


def copy_blocks(cache: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor) -> None:
    """Copy block sources[i] onto block targets[i], over all layers: `cache` is the whole of it.

    The copies of a call have no order: no block may be a target twice, or a target and a source.
    `sources` and `targets` are int64 and on the cache's device.
    """
    if not cache[0].is_contiguous():
        raise ValueError("a block must be one contiguous run; give the whole cache, not a view")
    if on_gpu(cache):
        _kernel("cache").copy_blocks(cache, sources, targets)
    else:
        raw(cache).index_copy_(0, targets, raw(cache).index_select(0, sources))


def pick(logits: torch.Tensor, asked: SamplingTensors, words: torch.Tensor) -> torch.Tensor:
    """A token for each row of `logits` [rows, vocab] in float32, which stay as they are.

    A greedy row gets the first of its largest logits. Any other has its logits divided by its
    temperature; what its filters rule out becomes -inf; each token gets its noise, that of the
    row's `words` [rows, 2] (int32) and the token; the first maximum is picked. All of it is in
    float32, and in operations that are rounded alike everywhere: the tokens are the same on every
    device, independent of the batch.

    Nothing is read back from a GPU, and the launches depend on the shapes and on which filters
    some row asks for.
    """
    return (_kernel("draw") if on_gpu(logits) else reference).pick(logits, asked, words)


def on_gpu(tensor: torch.Tensor) -> bool:
    """Whether Triton computes; tests patch this to use the interpreter."""
    return tensor.is_cuda


@cache
def _kernel(module: str) -> ModuleType:
    """A module of kernels, which needs Triton."""
    return import_module(f"pagedsim.kernels.{module}")


def _check(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> None:
    """Validate inputs that the kernels would misread silently."""
    kv_heads, head_dim = k_cache.shape[2:]
    if q.shape[1] % kv_heads or q.shape[2] != head_dim or k_cache.shape != v_cache.shape:
        raise ValueError(
            f"q {tuple(q.shape)} does not fit caches "
            f"{tuple(k_cache.shape)} and {tuple(v_cache.shape)}"
        )
    if k_cache.stride() != v_cache.stride():
        raise ValueError("keys and values must stand in the same order")
    if k_cache.dtype != v_cache.dtype or k_cache.dtype not in (q.dtype, *FORMATS.values()):
        raise TypeError(f"q is {q.dtype}, the caches are {k_cache.dtype} and {v_cache.dtype}")
    if not q.stride(2) == k_cache.stride(3) == v_cache.stride(3) == 1:
        raise ValueError("the elements of a head must be contiguous")


def _check_qkv(qkv: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> None:
    """`_check`, for queries, keys and values in one tensor."""
    kv_heads, head_dim = k_cache.shape[2:]
    heads, rest = divmod(qkv.shape[1], head_dim)
    if rest or head_dim % 2 or heads <= 2 * kv_heads:
        raise ValueError(f"qkv {tuple(qkv.shape)} does not fit a cache {tuple(k_cache.shape)}")
    if qkv.stride(1) != 1:
        raise ValueError("the elements of a token must be contiguous")
    _check(qkv.unflatten(1, (heads, head_dim))[:, : heads - 2 * kv_heads], k_cache, v_cache)


def _check_product(x: torch.Tensor, weight: torch.Tensor) -> None:
    if x.shape[1] != weight.shape[1]:
        raise ValueError(f"x {tuple(x.shape)} does not fit weights {tuple(weight.shape)}")
    if x.stride(1) != 1 or not weight.is_contiguous():
        raise ValueError("the elements of a token, and all weights, must be contiguous")
