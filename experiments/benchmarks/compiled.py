"""Kernels as compiled for GPUs that need not be present, and the launches and bytes of a sample.

    python -m pagedsim.experiments.benchmarks.compiled [--model llama-3.1-8b] [--capabilities 80 90]
    python -m pagedsim.experiments.benchmarks.compiled sampling [--rows 64] [--vocab 128256]

The first has a line for each kernel of attention, kind of cache and GPU, in bf16, and one for each
product of a layer of Llama-3.1-8B, of up to 16 tokens, for each kind of weights: the instructions
of one warp for one tile (rows × keys, or outputs × inputs), its matrix products, its loads and
those of 16 bytes a thread, the tiles in flight during every product (copies to shared memory that
are issued and not yet waited for; 0: memory is idle during some product), registers, spilled bytes
and shared memory. A second table says how the contexts of a decode are split into parts and
assigned to the programs that an H100 runs at one time.

`sampling` counts, for each kind of request in a batch of its own: launches, the bytes that they
read and write if each touches its tensors once (the last kernel touches a tile of logits a row),
and the bytes between host and GPU. "torch" is the same sample one operation after another.

No time is measured: this is the work of a GPU, not its speed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from pagedsim.core import SamplingParams
from pagedsim.engine.sampler import Row, Sampler, stream_key
from pagedsim.experiments.benchmarks.fake_gpu import (
    FAKE,
    FakeGPU,
    Launch,
    Loop,
    compiled_kernels,
    disassembly,
    main_loop,
    moved,
    usage,
    use_target,
)
from pagedsim.experiments.benchmarks.harness import main_of, parse, table
from pagedsim.experiments.benchmarks.products import WEIGHTS, Layer
from pagedsim.experiments.benchmarks.shapes import BASE, LONG, SHAPES, Case, Problem, shape_of
from pagedsim.experiments.benchmarks.tune import DTYPE, attend, default_cut, heads_of, matrix_of
from pagedsim.kernels import ops, product_tuning, tuning
from pagedsim.kernels.float8 import AUTO, FORMATS
from pagedsim.kernels.reference.sampling import gumbel, hashed, token_hashes
from pagedsim.kernels.tiles import Split, resident
from pagedsim.kernels.top_k_top_p import Shape

# -- attention and products ------------------------------------------------------------------------

TOKENS = 16
"""Of the products: as many as the smallest tile has."""
QUERIES = {"prefill": 512, "decode": 1}
MAIN = {"prefill": "_attention", "decode": "_decode"}


def kernels(words: Sequence[str]) -> None:
    """Compile, and print both tables."""
    model = {"choices": list(SHAPES), "default": BASE}
    asked = parse(__doc__, words, {"--model": model, "--capabilities": [80, 90, 100, 120]})
    head = ["GPU", "kernel", "cache or weights", "tile, warps, stages", "instructions", "products"]
    head += ["loads", "of 16 bytes", "in flight", "registers", "spilled", "shared KiB"]
    rows = []
    for capability in asked.capabilities:
        use_target(capability)
        rows += [*attention_rows(asked.model, capability), *product_rows(capability)]
    print(f"{table(head, rows)}\n")
    head = ["contexts", "cache", "parts", "bytes to merge, of K and V's", "programs", "tiles each"]
    print(table(head, list(part_rows(asked.model))))


def attention_rows(model: str, capability: int) -> Iterator[list[str]]:
    """A line for each kernel of attention with the default tiles."""
    for kernel, queries in QUERIES.items():
        for cache in (AUTO, *FORMATS):
            case = Case(model, 1, queries, max(queries, 64), cache=cache)
            cut = default_cut(kernel, heads_of(model, cache), divmod(capability, 10))
            problem = Problem(case, DTYPE, torch.device("cpu"))
            found = compiled_kernels(partial(attend, problem, cut))
            (one,) = (one for one in found if one.name == MAIN[kernel])
            tiles = cut.tiles
            size = f"{tiles.rows} × {tiles.keys}, {tiles.warps}, {tiles.stages}"
            held = "bf16" if cache == AUTO else cache
            yield [f"{capability / 10:.1f}", kernel, held, size, *_kernel_cells(one)]


def product_rows(capability: int) -> Iterator[list[str]]:
    """A line for each product of a layer."""
    setattr(ops, "on_gpu", lambda tensor: True)  # noqa: B010
    for weights in WEIGHTS:
        layer = Layer(shape_of(BASE), TOKENS, weights, DTYPE, torch.device("meta"))
        found = compiled_kernels(layer.ours)
        for name, kernel in zip(layer.weights, found, strict=True):
            tiles = product_tuning.usual(matrix_of(layer, name), TOKENS, divmod(capability, 10))
            size = f"{tiles.columns} × {tiles.depth}, {tiles.warps}, {tiles.stages}"
            held = "bf16" if weights == AUTO else weights
            yield [f"{capability / 10:.1f}", name, held, size, *_kernel_cells(kernel)]


def _kernel_cells(kernel: object) -> list[str]:
    """The main loop and the resources of a compiled kernel."""
    loop, one = main_loop(disassembly(kernel)), usage(kernel)
    cells = [""] * len(Loop._fields)
    if loop is not None:
        *counts, in_flight = loop
        cells = [*map(str, counts), f"{in_flight:.1f}"]
    return [*cells, str(one.registers), str(one.spilled), f"{one.shared / 1024:.0f}"]


# -- parts of a decode's contexts ------------------------------------------------------------------

HOPPER = (9, 0)
PROCESSORS = 132
"""Of an H100."""
CONTEXTS = {
    "64 × 256": [256] * 64,
    "64 × 1,024": [1024] * 64,
    "64 × 4,096": [4096] * 64,
    "63 × 1,024 and one of 131,072": [*[1024] * 63, LONG],
    "1 × 131,072": [LONG],
}


def part_rows(model: str) -> Iterator[list[str]]:
    """A line for each set of contexts and cache, with the default tiles and parts."""
    for name, contexts in CONTEXTS.items():
        for cache in (AUTO, "fp8_e4m3"):
            heads, shape = heads_of(model, cache), shape_of(model)
            tiles, split = tuning.usual(heads, HOPPER)
            itemsize = FORMATS.get(cache, DTYPE).itemsize
            tiles_of = [
                -(-keys // tiles.keys)
                for context in contexts
                for keys in _part_keys(split, context)
            ]
            there = PROCESSORS * resident(tiles, shape.head_dim, itemsize, HOPPER)
            work = [0] * min(there, len(tiles_of) * shape.kv_heads)
            for number, keys in enumerate(one for one in tiles_of for _ in range(shape.kv_heads)):
                work[number % len(work)] += keys
            # Partial results are written and read in float32, each with a maximum and a sum.
            merged = sum(parts for context in contexts if (parts := split.parts(context)) > 1)
            partial_bytes = 2 * 4 * merged * shape.heads * (shape.head_dim + 2)
            cache_bytes = 2 * sum(contexts) * shape.kv_heads * shape.head_dim * itemsize
            yield [
                name,
                "bf16" if cache == AUTO else cache,
                f"{len(tiles_of):,}",
                f"{100 * partial_bytes / cache_bytes:.1f} %",
                f"{len(work)}",
                f"{min(work)}–{max(work)}",
            ]


def _part_keys(split: Split, context: int) -> list[int]:
    ends = [*range(0, context, split.size(context)), context]
    return [end - begin for begin, end in itertools.pairwise(ends)]


# -- sampling --------------------------------------------------------------------------------------

KINDS = {
    "greedy": SamplingParams(temperature=0),
    "random": SamplingParams(),
    "min-p": SamplingParams(min_p=0.05),
    "top-k": SamplingParams(top_k=50),
    "top-p": SamplingParams(top_p=0.9),
    "top-k, top-p, min-p": SamplingParams(top_k=50, top_p=0.9, min_p=0.05),
    "random, with penalties": SamplingParams(repetition_penalty=1.1, frequency_penalty=0.1),
    "random, with log-probabilities": SamplingParams(logprobs=5),
}


def sampling(words: Sequence[str]) -> None:
    """Count, and print the table."""
    asked = parse(__doc__, words, {"--rows": 64, "--vocab": 128256})
    head = [f"{asked.rows} × {asked.vocab:,}", "launches", "MB", "of logits", "bytes from the host"]
    print(table(head, sample_rows(asked.rows, asked.vocab)))


def sample_rows(rows: int, vocab: int) -> Iterator[list[str]]:
    """A line for each kind of batch."""
    for name, params in KINDS.items():
        sampler = Sampler()
        with FakeGPU() as gpu:
            batch = [Row(params, stream_key(i), 9, [1, 2], [3]) for i in range(rows)]
            logits = torch.empty(rows, vocab, device=FAKE)
            sampler.draw(logits, batch)
            yield _launch_cells(name, gpu, logits, partial(sampler.draw, logits, batch))
    with FakeGPU() as gpu:
        logits, temperature = (torch.empty(rows, n, device=FAKE) for n in (vocab, 1))
        noise_words = torch.empty(rows, 2, dtype=torch.int32, device=FAKE)
        token_hashes(vocab, FAKE)
        call = partial(plain_sample, logits, temperature, noise_words)
        yield _launch_cells("random, torch", gpu, logits, call)


def plain_sample(
    logits: torch.Tensor, temperature: torch.Tensor, words: torch.Tensor
) -> torch.Tensor:
    """A sample one operation after another."""
    bits = hashed(token_hashes(logits.shape[1], logits.device), words[:, :1], words[:, 1:])
    return gumbel(bits).add_(logits / temperature).argmax(1)


def _launch_cells(
    name: str, gpu: FakeGPU, logits: torch.Tensor, call: Callable[[], object]
) -> list[str]:
    gpu.launches.clear()
    gpu.copied = 0
    call()
    total = sum(_bytes(launch, logits) for launch in gpu.launches)
    counts = [str(len(gpu.launches)), f"{total / 1e6:.1f}", f"{total / moved([logits]):.1f} ×"]
    return [name, *counts, f"{gpu.copied:,}"]


def _bytes(launch: Launch, logits: torch.Tensor) -> int:
    if launch.name != "_settle":
        return launch.moved
    tile = Shape.of(logits.shape[1]).block * len(logits) * logits.element_size()
    return launch.moved - moved([logits]) + tile


main = main_of(__name__, kernels, sampling)
