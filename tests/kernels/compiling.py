"""Compile the kernels for a GPU that is not there, and say what they take of it.

A program of its own (`test_compile.py` runs it): `experiments/benchmarks/fake_gpu.py` says how.

    python -m tests.kernels.compiling < cases.json     # a list of cases, see Call
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from functools import partial
from typing import Any, TypedDict

import torch

from pagedsim.experiments.benchmarks.fake_gpu import compiled_kernels, usage, use_target
from pagedsim.kernels import (
    attention,
    compress,
    decode,
    draw,
    elementwise,
    grouped,
    latent,
    product,
    rotary,
    route,
)
from pagedsim.kernels import cache as kv_cache
from pagedsim.kernels.batch import AttentionBatch, RowNorm, SamplingTensors
from pagedsim.kernels.float8 import FORMATS
from pagedsim.kernels.tiles import PROGRAMS, Split, decode_tiles, prefill_tiles
from tests.kernels.test_products import WEIGHTS


class Call(TypedDict, total=False):
    """What to compile, and for what."""

    kernel: str
    capability: int
    """Of the GPU, such as 90 for 9.0."""
    dtype: str
    cache: str
    """The format of an 8-bit cache, if it is not in the dtype."""
    head_dim: int
    group: int
    block_size: int
    queries: int
    context: int | None
    """The longest of chunks, where the host knows it; up to 1,024 none is cut."""
    heads: int
    """That share a latent."""
    rank: int
    rope: int
    """Elements of a latent, and of what is rotated beside it."""
    chunks: bool
    """Chunks, where decodes are the other case."""
    experts: int
    """Of a mixture of which a token chooses 8, or 2 if there are no more than 8."""
    inner: int
    """Dims of an expert between its products."""
    size: int
    """Elements of a token, for what does not know of heads; tokens of a vocabulary."""
    filtered: bool
    """With top-k, top-p and min-p."""
    summed: bool
    """With a residual."""
    normed: bool
    """With a norm of queries and keys."""
    window: int | None
    softcap: float | None
    outputs: int
    around: str
    """Of a product: what stands around it, of normed, bias, gated and added."""
    weights: str
    """The format of a product's weights, if they are not in the dtype."""
    tiles: dict[str, Any]
    """What to change in the tile sizes that the kernel chooses."""
    split: dict[str, int]
    """What to change in how a decode's context is cut."""


def call(case: Call) -> None:
    """Call the case's kernel as the engine does."""
    capability = divmod(case["capability"], 10)
    dtype = getattr(torch, case["dtype"])
    dim, group, size = case.get("head_dim", 128), case.get("group", 4), case.get("block_size", 16)
    heads, tokens = 8, case.get("queries", 512)
    q = torch.zeros(tokens, heads * group, dim, dtype=dtype)
    k = torch.zeros(tokens, heads, dim, dtype=dtype)
    kv = torch.zeros(2, 4, 2, size, heads, dim, dtype=FORMATS.get(case.get("cache", ""), dtype))
    k_cache, v_cache = kv[:, 1, 0], kv[:, 1, 1]
    ints = torch.zeros(64, dtype=torch.int32)
    tables = torch.zeros(8, 2048 // size, dtype=torch.int32)
    slots = torch.zeros(tokens, dtype=torch.int64)
    batch = AttentionBatch(tables, ints, ints, slots, tokens)
    masks: dict[str, Any] = {"window": case.get("window"), "softcap": case.get("softcap")}
    item, eight = q.element_size(), k_cache.dtype.itemsize == 1
    match case["kernel"]:
        case "attention":
            tiles = prefill_tiles(dim, group, item, capability, tokens, eight)
            attention.paged_attention(
                q, k_cache, v_cache, tables, ints[:9], ints[:8], scale=0.1,
                max_query_len=tokens, max_context=case.get("context"), rows=ints[:8],
                tiles=replace(tiles, **case.get("tiles", {})), **masks,
            )  # fmt: skip
        case "decode":
            tiles = decode_tiles(dim, group, item, capability, eight)
            decode.paged_decode(
                q[:8], k_cache, v_cache, tables, ints[:8], scale=0.1,
                rows=ints[:8], tiles=replace(tiles, **case.get("tiles", {})),
                split=Split(**case.get("split", {})), **masks,
            )  # fmt: skip
        case "write":
            kv_cache.write_kv(k, k, k_cache, v_cache, batch)
        case "norm":
            x = torch.zeros(tokens, case["size"], dtype=dtype)
            elementwise.rms_norm(x, x[0], 1e-6, torch.zeros_like(x) if case["summed"] else None)
        case "rotary":
            qkv = torch.zeros(tokens, heads * (group + 2) * dim, dtype=dtype)
            turn = torch.zeros(tokens, dim, dtype=dtype)
            weight = turn[: heads * (group + 1)] if case.get("normed") else None
            rotary.rotate(qkv, turn, turn, k_cache, v_cache, batch, weight=weight, eps=1e-6)
        case "gate":
            elementwise.silu_mul(torch.zeros(tokens, 2 * case["size"], dtype=dtype))
        case "grouped":
            x, count = torch.zeros(tokens, case["size"], dtype=dtype), case["experts"]
            up = torch.zeros(1, 2 * case["inner"], case["size"], dtype=dtype).expand(count, -1, -1)
            chosen = torch.zeros(tokens, 8 if count > 8 else 2, dtype=torch.int64)
            down = up[:, : case["inner"]].transpose(1, 2)
            shared = x if case.get("summed") else None
            grouped.experts(x, up, down, chosen, chosen.to(dtype), shared)
            scores = torch.zeros(tokens, count, dtype=dtype)
            biased: dict[str, Any] = (
                {"bias": scores[0].float(), "groups": 8, "kept": 4} if shared is x else {}
            )
            route.route(scores, chosen.shape[1], sums_to_one=True, dtype=dtype, **biased)
        case "product":
            run_product(case, dtype)
        case "latent":
            rank, width = case["rank"], case["rank"] + case["rope"]
            wide = torch.zeros(tokens, case["heads"], width, dtype=dtype)
            cache = torch.zeros(2, 4, 1, size, 1, width, dtype=dtype)[:, 1, 0]
            rooms = tables.repeat(1, 32)  # as many as make every part
            latent.attend(
                wide if case["chunks"] else wide[:8], cache, rooms, ints[:8], rank=rank,
                scale=0.1, query_start=ints[:9] if case["chunks"] else None, rows=ints[:8],
                out=wide[..., :rank].clone(),
            )  # fmt: skip
            compress.compress(
                wide[..., rank:], wide[:, 0], wide[:, 0, rank:], wide[:, 0, rank:], cache, batch,
                weight=wide[0, 0, :rank], eps=1e-6, interleaved=True, out=wide[..., rank:],
            )  # fmt: skip
        case "pick":
            pick(case["size"], case["filtered"])
        case "copy":
            kv_cache.copy_blocks(kv, slots[:2], slots[:2])
        case other:
            raise ValueError(other)


def run_product(case: Call, dtype: torch.dtype) -> None:
    tokens, outputs = case["queries"], case["outputs"]
    around = case.get("around", "")
    x = torch.zeros(tokens, case["size"], dtype=dtype)
    weights = WEIGHTS.get(case.get("weights", ""), dtype)
    weight = torch.zeros(outputs * (2 if "gated" in around else 1), case["size"], dtype=weights)
    scale = None if weights is dtype else torch.zeros(len(weight))
    done = torch.zeros(PROGRAMS, dtype=torch.int32) if around else None
    if "added" in around:
        residual = torch.zeros(tokens, outputs, dtype=dtype)
        product.add_product(residual, x, weight, None, scale, done=done)
    else:
        front = RowNorm(x[0], torch.zeros(tokens, 64), 1e-6) if "normed" in around else None
        bias = weight[:, 0].to(dtype) if "bias" in around else None
        product.product(x, weight, bias, scale, norm=front, gated="gated" in around, done=done)


def pick(vocab: int, filtered: bool) -> None:
    floats, words = torch.zeros(8), torch.zeros(8, 2, dtype=torch.int32)
    asked = SamplingTensors(floats, words[:, 0].clone(), floats.double(), floats, *[filtered] * 3)
    draw.pick(torch.zeros(8, vocab), asked, words)


def main() -> None:
    found = []
    for case in json.load(sys.stdin):
        use_target(case["capability"])
        found.append([usage(kernel)._asdict() for kernel in compiled_kernels(partial(call, case))])
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
