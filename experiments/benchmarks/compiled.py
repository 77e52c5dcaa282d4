"""What kernels are once they are compiled, for GPUs that need not be there.

    python -m experiments.benchmarks.compiled [--model llama-3.1-8b] [--capabilities 80 90]

One line for each kernel of attention, kind of cache and GPU, in bf16, and one for each product of a
layer of Llama-3.1-8B, of up to 16 tokens, for each kind of weights: the instructions of one warp
for one tile of keys or of weights, its matrix products and its loads of 16 bytes a thread, the
tiles in flight during every product, then registers, bytes that spill and shared memory. A tile is
rows × keys, or outputs × inputs. In flight are asynchronous copies to shared memory that the loop
has issued and not yet waited for, counted in the machine code; 0: what a turn needs is waited for
at its head, and memory is idle during some product. No time is measured: it says what a GPU has to
do, not how fast it does it.

A second table says how the contexts of a decode are cut into parts and dealt to the programs that
an H100 runs at one time: by how many bytes what is left to merge adds to keys and values, and how
many tiles of keys each program gets.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch

from experiments.benchmarks.ahead import Taken, disassembled, launched, stand_in, taken
from experiments.benchmarks.cuts import DTYPE, heads_of, run, usual
from experiments.benchmarks.device import Plain, table
from experiments.benchmarks.products import WEIGHTS, Layer, widths
from experiments.benchmarks.sass import Loop, main_loop
from experiments.benchmarks.shapes import BASE, LONG, SHAPES, Case, Problem
from experiments.benchmarks.sharing import shares
from experiments.benchmarks.words import Parser, at_least_one
from pagedsim.kernels import ops
from pagedsim.kernels.float8 import AUTO, FORMATS
from pagedsim.kernels.tiles import product_tiles

CAPABILITIES = (80, 90, 100, 120)
TOKENS = 16
"""Of the products: as many as the smallest tile has."""
QUERIES = {"prefill": 512, "decode": 1}
MAIN = {"prefill": "_attention", "decode": "_decode"}


CONTEXTS = {
    "64 × 256": [256] * 64,
    "64 × 1,024": [1024] * 64,
    "64 × 4,096": [4096] * 64,
    "63 × 1,024 and one of 131,072": [*[1024] * 63, LONG],
    "1 × 131,072": [LONG],
}


class Line(NamedTuple):
    """One kernel for one GPU."""

    capability: int
    kernel: str
    held: str
    """What the cache holds, or the weights."""
    tiles: str
    loop: Loop | None
    taken: Taken


def main(words: Sequence[str] | None = None) -> None:
    """Compile and print."""
    words = sys.argv[1:] if words is None else words
    parser = Parser(description=__doc__, formatter_class=Plain)
    parser.add_argument("--model", choices=list(SHAPES), default=BASE)
    parser.add_argument("--capabilities", type=at_least_one, nargs="+", default=CAPABILITIES)
    asked = parser.parse_args(words)
    print(written(list(lines(asked.model, asked.capabilities))))
    print(f"\n{parts(asked.model)}")


def lines(model: str, capabilities: Sequence[int]) -> Iterator[Line]:
    """What each kernel of a model takes, with the tiles that are taken where none were tuned."""
    for capability in capabilities:
        stand_in(capability)
        for kernel, queries in QUERIES.items():
            for cache in (AUTO, *FORMATS):
                case = Case(model, 1, queries, max(queries, 64), cache=cache)
                cut = usual(kernel, heads_of(model, cache), divmod(capability, 10))
                problem = Problem(case, DTYPE, torch.device("cpu"))
                found = launched(partial(run, problem, cut))
                (one,) = (one for one in found if one.name == MAIN[kernel])
                tiles = cut.tiles
                size = f"{tiles.rows} × {tiles.keys}, {tiles.warps}, {tiles.stages}"
                loop = main_loop(disassembled(one))
                yield Line(capability, kernel, cache, size, loop, taken(one))
        yield from products(capability)


def products(capability: int) -> Iterator[Line]:
    """What each product of a layer takes."""
    setattr(ops, "on_gpu", lambda tensor: True)  # noqa: B010
    for weights in WEIGHTS:
        layer = Layer(widths(), TOKENS, weights, DTYPE, torch.device("meta"))
        for (name, weight), kernel in zip(layer.weights.items(), launched(layer.ours), strict=True):
            gated = name == "gate_up"
            tiles = product_tiles(
                TOKENS,
                len(weight.values) // (2 if gated else 1),
                weight.values.shape[1],
                (DTYPE.itemsize, weight.values.itemsize),
                divmod(capability, 10),
                gated,
            )
            size = f"{tiles.columns} × {tiles.depth}, {tiles.warps}, {tiles.stages}"
            loop = main_loop(disassembled(kernel))
            yield Line(capability, name, weights, size, loop, taken(kernel))


def written(found: Sequence[Line]) -> str:
    """As Markdown."""
    head = ["GPU", "kernel", "cache or weights", "tile, warps, stages", "instructions", "products"]
    head += ["loads", "of 16 bytes", "in flight", "registers", "spilled", "shared KiB"]
    rows = []
    for line in found:
        loop, one = line.loop, line.taken
        rows.append(
            [
                f"{line.capability / 10:.1f}",
                line.kernel,
                "bf16" if line.held == AUTO else line.held,
                line.tiles,
                *(_cells(loop) if loop else [""] * len(Loop._fields)),
                str(one.registers),
                str(one.spilled),
                f"{one.shared / 1024:.0f}",
            ]
        )
    return table(head, rows)


def parts(model: str) -> str:
    """How contexts are cut and dealt, as Markdown."""
    head = ["contexts", "cache", "parts", "bytes to merge, of K and V's", "programs", "tiles each"]
    rows = []
    for name, contexts in CONTEXTS.items():
        for cache in (AUTO, "fp8_e4m3"):
            found = shares(model, cache, contexts)
            rows.append(
                [
                    name,
                    "bf16" if cache == AUTO else cache,
                    f"{found.parts:,}",
                    f"{100 * found.left:.1f} %",
                    f"{found.programs}",
                    f"{found.fewest}–{found.most}",
                ]
            )
    return table(head, rows)


def _cells(loop: Loop) -> list[str]:
    *counts, in_flight = loop
    return [*map(str, counts), f"{in_flight:.1f}"]


if __name__ == "__main__":
    main()
