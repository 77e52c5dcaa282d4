"""The products of a layer, its experts and its latent attention on a GPU, against a device copy.

    python -m pagedsim.experiments.benchmarks.products
    python -m pagedsim.experiments.benchmarks.products experts
    python -m pagedsim.experiments.benchmarks.products --device cpu --quick  (without a GPU)

The first times the products of a decode step in a layer of Llama-3.1-8B, with norms, gate and
residual sums: `kernels/product.py`, four launches, beside torch's products, norms and gate, as the
engine computes it for many tokens (more than `tiles.FEW`). Both run as CUDA graphs, where there are
any. Weights are in bf16 and in 8 bits; torch's are always in bf16.

`experts` times a layer's experts (`kernels/grouped.py`, behind the router) of Mixtral 8x7B and
DeepSeek-V3, for tokens that choose at random, and a layer's attention over latents
(`kernels/latent.py`) with DeepSeek-V3's heads, for decodes and for a chunk. Their bytes are those
of the chosen experts or of the latents.

Limits are those of kernels.py, timed in the same rounds. Outputs are first compared with fp64; a
wrong one is not timed. Results go to products.json and experts.json in experiments/results/<GPU>.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from pagedsim.engine.graphs import recorder_of
from pagedsim.engine.models.quantization import rounded
from pagedsim.experiments.benchmarks.device import Results, dtype_of, parse_device
from pagedsim.experiments.benchmarks.harness import main_of
from pagedsim.experiments.benchmarks.shapes import BASE, TINY, shape_of
from pagedsim.experiments.benchmarks.timing import Bench, Rival, Work, limits_table, norm_error
from pagedsim.kernels import ops
from pagedsim.kernels.batch import AttentionBatch, RowNorm
from pagedsim.kernels.tiles import FEW
from pagedsim.sim.model import MLA, ModelShape


def measure(
    name: str,
    words: Sequence[str],
    cases: Callable[[bool, Mapping[str, Any]], Mapping[str, Callable[[], Work]]],
    **more: Any,
) -> None:
    """Measure the cases, which make their tensors when they are called; print a table, and keep
    the results."""
    asked = parse_device(__doc__, words[name == "experts" :])
    torch.set_num_threads(1)
    dtype = dtype_of(asked.device)
    results = Results(name, "products", words, asked, dtype, **more)
    bench = Bench(asked, dtype)
    made = cases(asked.quick, {"dtype": dtype, "device": asked.device})
    results.sweep(made, lambda make: bench.line(make()))
    results.close(limits_table(results.heading(), results.timed()))


def allowed(dtype: torch.dtype) -> float:
    """The error of a few independent roundings, and of sums in fp32."""
    return 2 * torch.finfo(dtype).eps + 16 * torch.finfo(torch.float32).eps


# -- products --------------------------------------------------------------------------------------

TOKENS = (1, 8, 32, 64)
"""Up to twice `FEW`, to check that bound."""
WEIGHTS = {"auto": None, "int8": "int8", "fp8_e4m3": "fp8"}
"""How they are quantised."""
EPS = 1e-5


def products(words: Sequence[str]) -> None:
    """Measure a layer by weights and tokens; print a table, and keep the results."""
    measure("products", words, layers, few=FEW)


def layers(tiny: bool, kind: Mapping[str, Any]) -> dict[str, Callable[[], Work]]:
    """The products of a layer by weights and tokens."""
    shape = TINY if tiny else shape_of(BASE)
    return {
        f"{weights}, {tokens}": partial(layer_work, shape, tokens, weights, kind)
        for weights, tokens in product(WEIGHTS, TOKENS)
    }


def layer_work(shape: ModelShape, tokens: int, weights: str, kind: Mapping[str, Any]) -> Work:
    """The products of a layer beside torch's in 16 bits."""
    layer = Layer(shape, tokens, weights, kind["dtype"], kind["device"])
    wanted, values = layer.exact(), [one.values for one in layer.weights.values()]

    return Work(
        layer.ours,
        lambda out: norm_error(out, wanted),
        allowed(kind["dtype"]),
        sum(one.nbytes for one in values),
        2 * tokens * sum(one.numel() for one in values),
        {"torch in 16 bits": lambda: Rival(captured(layer.theirs(), kind["device"]))},
        timed=lambda: captured(layer.ours, kind["device"]),
    )


def captured(call: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """A replay of the call's CUDA graph, or the call where there are no graphs."""
    recorder = recorder_of(device)

    def work() -> None:
        call()

    return work if recorder is None else recorder.record(work)


class Weight(NamedTuple):
    """A matrix, [out, in], and for 8 bits each output's scale."""

    values: torch.Tensor
    scale: torch.Tensor | None

    def plain(self, dtype: torch.dtype) -> torch.Tensor:
        if self.scale is None:
            return self.values.to(dtype)
        return (self.values.to(torch.float32) * self.scale[:, None]).to(dtype)


class Layer:
    """The weights of a layer and its input, computed by our kernels, by torch and in fp64."""

    def __init__(
        self, shape: ModelShape, tokens: int, weights: str, dtype: torch.dtype, device: torch.device
    ) -> None:
        torch.manual_seed(0)
        hidden, inner, heads = shape.hidden, shape.intermediate, shape.heads * shape.head_dim
        qkv = heads + 2 * shape.kv_heads * shape.head_dim
        self._kind: Any = {"dtype": dtype, "device": device}
        self.heads = heads
        self.weights = {
            "qkv": self._weight(qkv, hidden, weights),
            "out": self._weight(hidden, heads, weights),
            "gate_up": self._weight(2 * inner, hidden, weights),
            "down": self._weight(hidden, inner, weights),
        }
        self.norms = [self._random(hidden) for _ in range(2)]
        self.tokens = self._random(tokens, hidden)
        self.residual = self.tokens.clone()
        squares = self.tokens.float().square().sum(1, keepdim=True)
        self.known = RowNorm(self.norms[0], squares, EPS)  # from the previous layer

    def ours(self) -> torch.Tensor:
        qkv, out, gate_up, down = (
            (weight.values, None, weight.scale) for weight in self.weights.values()
        )
        seen = ops.product(self.residual, *qkv, norm=self.known)
        squares = ops.add_product(self.residual, seen[:, : self.heads].contiguous(), *out)
        norm = RowNorm(self.norms[1], squares, EPS)
        x = ops.product(self.residual, *gate_up, norm=norm, gated=True)
        ops.add_product(self.residual, x, *down)
        return self.residual

    def theirs(self) -> Callable[[], torch.Tensor]:
        """A call for the output by torch, without the last sum, which the next layer's norm
        includes."""
        qkv, out, gate_up, down = (one.plain(self.residual.dtype) for one in self.weights.values())

        def call() -> torch.Tensor:
            seen = functional.linear(ops.rms_norm(self.residual, self.norms[0], EPS), qkv)
            x = functional.linear(seen[:, : self.heads].contiguous(), out)
            x = functional.linear(ops.rms_norm(x, self.norms[1], EPS, self.residual), gate_up)
            return functional.linear(ops.silu_mul(x), down)

        return call

    def exact(self) -> torch.Tensor:
        """The output in fp64; resets the input."""
        self.reset()
        x, (first, second) = self.tokens.double(), (norm.double() for norm in self.norms)
        size = first.shape
        qkv, out, gate_up, down = (one.plain(torch.float64) for one in self.weights.values())
        x = x + (functional.rms_norm(x, size, first, EPS) @ qkv.T)[:, : self.heads] @ out.T
        gate, up = (functional.rms_norm(x, size, second, EPS) @ gate_up.T).chunk(2, 1)
        return x + (functional.silu(gate) * up) @ down.T

    def reset(self) -> None:
        self.residual.copy_(self.tokens)

    def _weight(self, rows: int, columns: int, weights: str) -> Weight:
        drawn, quantization = self._random(rows, columns) * columns**-0.5, WEIGHTS[weights]
        return Weight(*rounded(drawn, quantization) if quantization else (drawn, None))

    def _random(self, *size: int) -> torch.Tensor:
        return torch.randn(size, **self._kind)


# -- experts and latents ---------------------------------------------------------------------------

MODELS = ("mixtral-8x7b", "deepseek-v3")
ROUTED = (1, 8, 64, 1024)
"""Tokens."""
LATENTS = ((1, 1, 4096), (64, 1, 4096), (1, 1, 65536), (1, 2048, 4096))
"""Sequences, query tokens of each, and their contexts."""
BLOCK = 16


def experts(words: Sequence[str]) -> None:
    """Measure experts and latents; print a table, and keep the results."""
    measure("experts", ["experts", *words], works)


def works(tiny: bool, kind: Mapping[str, Any]) -> dict[str, Callable[[], Work]]:
    """A layer's experts, and its attention over latents."""
    found: dict[str, Callable[[], Work]] = {}
    for model in MODELS:
        for tokens in ROUTED[: 2 if tiny else None]:
            found[f"experts, {model}, {tokens} tokens"] = partial(routed, model, tokens, tiny, kind)
    shape = shape_of("deepseek-v3")
    assert shape.mla is not None
    for sequences, queries, context in LATENTS:
        heads = 4 if tiny else shape.heads
        if tiny:
            sequences, queries, context = min(sequences, 2), min(queries, 4), context // 64
        name = f"latents, {sequences} × {queries} of {context:,}"
        found[name] = partial(latent, shape.mla, heads, sequences, queries, context, kind)
    return found


def routed(model: str, tokens: int, tiny: bool, kind: Mapping[str, Any]) -> Work:
    """So many tokens through the router and the experts of a layer."""
    torch.manual_seed(0)
    shape = shape_of(model)
    assert shape.moe is not None
    each = shape.moe.experts_per_token
    count, hidden, inner = shape.moe.experts, shape.hidden, shape.moe.intermediate
    if tiny:
        count, hidden, inner = 2 * each, 64, 48
    up_weights = torch.randn(count, 2 * inner, hidden, **kind).mul_(hidden**-0.5)
    down_weights = torch.randn(count, hidden, inner, **kind).mul_(inner**-0.5)
    x, logits = torch.randn(tokens, hidden, **kind), torch.randn(tokens, count, **kind)
    route = partial(ops.route, logits, each, sums_to_one=True, dtype=torch.float32)
    chosen, weights = route()
    used = chosen.unique().tolist()

    def exact() -> torch.Tensor:
        """One expert at a time, since all of them in fp64 may not fit the memory."""
        out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
        for expert in used:
            token, place = (chosen == expert).nonzero(as_tuple=True)
            gate, up = (x[token].double() @ up_weights[expert].double().T).chunk(2, 1)
            seen = (functional.silu(gate) * up) @ down_weights[expert].double().T
            out[token] += seen * weights[token, place, None].double()
        return out

    wanted = exact()
    return Work(
        lambda: ops.experts(x, up_weights, down_weights, *route()),
        lambda out: norm_error(out, wanted),
        allowed(x.dtype),
        (up_weights[0].nbytes + down_weights[0].nbytes) * len(used),
        6 * tokens * each * hidden * inner,
    )


def latent(
    mla: MLA, heads: int, sequences: int, queries: int, context: int, kind: Mapping[str, Any]
) -> Work:
    """Latent attention of identical sequences."""
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
    wanted = exact()
    return Work(
        lambda: ops.attend_latent(q, cache[:, 0], batch, rank=rank, scale=scale),
        lambda out: norm_error(out, wanted),
        allowed(q.dtype),
        sequences * context * width * cache.element_size(),
        2 * pairs * heads * (rank + width),
    )


main = main_of(__name__, products, experts)
