"""Mixtures of experts, and attention over compressed keys and values, against a device copy.

    python -m experiments.benchmarks.experts
    python -m experiments.benchmarks.experts --device cpu --quick    (the same way, without a GPU)

A layer's experts (`kernels/grouped.py`, behind the router's choice) of Mixtral 8x7B and of
DeepSeek-V3, for a few tokens and for many, which choose at random; and a layer's attention over
latents (`kernels/latent.py`) with DeepSeek-V3's heads, for decodes and for a chunk. The limit is
what the bytes take that must be read, each once, at the speed of a device copy, timed in the same
rounds: the experts that some token chose, and the contexts' latents. Many tokens are bound by FLOP,
so their rate stands beside it. Before anything is timed it is held against fp64; what is wrong is
not timed. Results go to experiments/results/<GPU>/experts.json.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from experiments.benchmarks.device import Copy, device_of, facts, medians, options, table
from experiments.benchmarks.results import before, folder, keep, told
from experiments.benchmarks.shapes import shape_of
from pagedsim.kernels import ops
from pagedsim.kernels.batch import AttentionBatch
from pagedsim.sim.model import MLA

MODELS = ("mixtral-8x7b", "deepseek-v3")
TOKENS = (1, 8, 64, 1024)
LATENTS = ((1, 1, 4096), (64, 1, 4096), (1, 1, 65536), (1, 2048, 4096))
"""Sequences, query tokens of each, and their contexts."""
BLOCK = 16


class Work(NamedTuple):
    """Something to time."""

    call: Callable[[], torch.Tensor]
    exact: Callable[[], torch.Tensor]
    """In fp64."""
    moved: int
    """Bytes that must be read."""
    flop: int


class Layer:
    """The experts of a layer."""

    def __init__(self, model: str, tiny: bool, kind: Mapping[str, Any]) -> None:
        torch.manual_seed(0)
        shape = shape_of(model)
        assert shape.moe is not None
        self._each, self._kind = shape.moe.experts_per_token, kind
        count, hidden, inner = shape.moe.experts, shape.hidden, shape.moe.intermediate
        if tiny:
            count, hidden, inner = 2 * self._each, 64, 48
        self._up = torch.randn(count, 2 * inner, hidden, **kind).mul_(hidden**-0.5)
        self._down = torch.randn(count, hidden, inner, **kind).mul_(inner**-0.5)

    @classmethod
    def work_of(cls, model: str, tokens: int, tiny: bool, kind: Mapping[str, Any]) -> Work:
        """So many tokens through those of a model."""
        return cls(model, tiny, kind).work(tokens)

    def work(self, tokens: int) -> Work:
        """So many tokens through it."""
        count, hidden, inner = self._down.shape
        x = torch.randn(tokens, hidden, **self._kind)
        logits = torch.randn(tokens, count, **self._kind)
        route = partial(ops.route, logits, self._each, sums_to_one=True, dtype=torch.float32)
        chosen, weights = route()
        each = (self._up[0].nbytes + self._down[0].nbytes) * len(chosen.unique())
        return Work(
            lambda: ops.experts(x, self._up, self._down, *route()),
            lambda: self._exact(x, chosen.long(), weights),
            each,
            6 * tokens * self._each * hidden * inner,
        )

    def _exact(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """One expert at a time, since all of them in fp64 may be more than there is room for."""
        out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
        for expert in chosen.unique().tolist():
            token, place = (chosen == expert).nonzero(as_tuple=True)
            gate, up = (x[token].double() @ self._up[expert].double().T).chunk(2, 1)
            seen = (functional.silu(gate) * up) @ self._down[expert].double().T
            out[token] += seen * weights[token, place, None].double()
        return out


def latent(
    mla: MLA, heads: int, sequences: int, queries: int, context: int, kind: Mapping[str, Any]
) -> Work:
    """Attention of sequences that are all alike."""
    torch.manual_seed(0)
    blocks, rank, width = -(-context // BLOCK), mla.kv_lora_rank, mla.kv_lora_rank + mla.rope_dim
    cache = torch.randn(sequences * blocks, 1, BLOCK, 1, width, **kind)
    q = torch.randn(sequences * queries, heads, width, **kind)
    batch = AttentionBatch.build(
        torch.randperm(sequences * blocks).view(sequences, blocks).tolist(),
        [context - queries] * sequences,
        [queries] * sequences,
        block_size=BLOCK,
        device=q.device,
    )
    scale = (mla.nope_dim + mla.rope_dim) ** -0.5

    def exact() -> torch.Tensor:
        found = []
        positions = torch.arange(context - queries, context, device=q.device)[:, None, None]
        for table_of, mine in zip(batch.block_tables, q.split(queries), strict=True):
            keys = cache[table_of.long(), 0, :, 0].flatten(0, 1)[:context].double()
            hidden = torch.arange(context, device=q.device) > positions
            for some, ahead in zip(mine.split(64), hidden.split(64), strict=True):
                scores = (some.double() @ keys.T * scale).masked_fill(ahead, -torch.inf)
                found.append(scores.softmax(-1) @ keys[:, :rank])
        return torch.cat(found)

    pairs = sequences * queries * (2 * context - queries + 1) // 2
    return Work(
        lambda: ops.attend_latent(q, cache[:, 0], batch, rank=rank, scale=scale),
        exact,
        sequences * context * width * cache.element_size(),
        2 * pairs * heads * (rank + width),
    )


def main(words: Sequence[str] | None = None) -> None:
    """Measure all of them; print a table, and keep the results."""
    words = sys.argv[1:] if words is None else words
    asked = options(__doc__).parse_args(words)
    device = device_of(asked)
    torch.set_num_threads(1)
    place = folder(device, asked)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    result: dict[str, Any] = {
        **facts(device, "experiments.benchmarks.experts", words),
        "dtype": str(dtype).removeprefix("torch."),
        "rounds": asked.rounds,
        "quick": asked.quick,
    }
    known = before(place, "experts", result, "cases") if asked.resume else []
    result["cases"] = [one for one in known if "seconds" in one]
    there = {one["case"] for one in result["cases"]}
    copy = Copy(device, asked.quick)
    for name, make in works(asked.quick, {"dtype": dtype, "device": device}).items():
        if name not in there:
            result["cases"].append({"case": name, **measured(make(), copy, device, asked.rounds)})
            keep(place, "experts", result)
    print(written(result))
    told(place, "experts")
    if wrong := [one["case"] for one in result["cases"] if "seconds" not in one]:
        sys.exit(f"wrong: {'; '.join(wrong)}")


def works(tiny: bool, kind: Mapping[str, Any]) -> dict[str, Callable[[], Work]]:
    """What there is to time, by name; each is made when its turn comes."""
    found: dict[str, Callable[[], Work]] = {}
    for model in MODELS:
        for tokens in TOKENS[: 2 if tiny else None]:
            found[f"experts, {model}, {tokens} tokens"] = partial(
                Layer.work_of, model, tokens, tiny, kind
            )
    shape = shape_of("deepseek-v3")
    assert shape.mla is not None
    for sequences, queries, context in LATENTS:
        heads = 4 if tiny else shape.heads
        if tiny:
            sequences, queries, context = min(sequences, 2), min(queries, 4), context // 64
        name = f"latents, {sequences} × {queries} of {context:,}"
        found[name] = partial(latent, shape.mla, heads, sequences, queries, context, kind)
    return found


def measured(work: Work, copy: Copy, device: torch.device, rounds: int) -> dict[str, Any]:
    """Is it right, and how long does it take?"""
    out, exact = work.call(), work.exact()
    error = float((out.double() - exact).norm() / exact.norm())
    # A few independent roundings, and sums in fp32.
    allowed = 2 * torch.finfo(out.dtype).eps + 16 * torch.finfo(torch.float32).eps
    found: dict[str, Any] = {
        "error": error, "error_allowed": allowed, "bytes": work.moved, "flop": work.flop,
    }  # fmt: skip
    if not error <= allowed:
        return found
    seconds = medians({"ours": work.call, "copy": copy}, device, rounds)
    limit = work.moved / copy.moved * seconds["copy"]
    return {
        **found,
        "seconds": seconds["ours"],
        "limit_seconds": limit,
        "of_limit": limit / seconds["ours"],
        "tflop_s": work.flop / seconds["ours"] / 1e12,
    }


def written(result: Mapping[str, Any]) -> str:
    """As Markdown."""
    rows = [
        [
            one["case"],
            f"{one['seconds'] * 1e6:,.1f}",
            f"{one['bytes'] / one['seconds'] / 1e9:,.0f}",
            f"{one['tflop_s']:,.3g}",
            f"{one['of_limit']:.0%}",
        ]
        for one in result["cases"]
        if "seconds" in one
    ]
    head = ["case", "µs", "GB/s", "TFLOP/s", "of a copy's speed"]
    about = f"{result['device']}, {result['dtype']}, torch {result['torch']}, {result['date']}"
    return f"{about}\n\n{table(head, rows)}"


if __name__ == "__main__":
    main()
