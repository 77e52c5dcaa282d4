"""Tiles of the products of a layer, tried on the GPU that is there; writes tuned_products.json.

    python -m experiments.benchmarks.tune_products [--models llama-3.1-8b ...] [--weights int8]

For each matrix of a model's layer, and as many tokens as each tile has rows, candidates take turns
with the default; the entry is the fastest. A candidate that does not fit the GPU, or computes
something else than the default does, is out.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch

from experiments.benchmarks.cuts import DTYPE
from experiments.benchmarks.device import Plain, facts, medians, require_gpu
from experiments.benchmarks.products import WEIGHTS, Layer, widths
from experiments.benchmarks.shapes import BASE
from experiments.benchmarks.tune_kernels import Gpu
from experiments.benchmarks.words import Parser, at_least_one
from pagedsim.kernels import product_tuning, tuning
from pagedsim.kernels.product_tuning import Entry, Matrix
from pagedsim.kernels.tiles import ProductTiles

MODELS = ("llama-3.1-8b", "qwen3-0.6b", "llama-2-7b", "llama-3.1-70b")
ROWS = (16, 32)
COLUMNS = (16, 32, 64, 128)
DEPTHS = (64, 128, 256, 512)
WARPS = (4, 8)
STAGES = (3, 4, 6)
STAGE = (4 * 1024, 48 * 1024)
"""Bytes that one stage of the pipeline may have: what fits a GPU Triton says by itself."""

Race = Callable[[Layer, str, Sequence[ProductTiles]], Mapping[ProductTiles, float]]
"""Seconds of a product of a layer by tiles; those that cannot do it are left out."""


def main(words: Sequence[str] | None = None) -> None:
    """Tune each model's layer, and write an entry as soon as it is known."""
    words = sys.argv[1:] if words is None else words
    parser = Parser(description=__doc__, formatter_class=Plain)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=[BASE])
    parser.add_argument("--weights", choices=list(WEIGHTS), default="auto")
    parser.add_argument(
        "--rounds", type=at_least_one, default=20, help="a time is the median of so many"
    )
    parser.add_argument("--table", type=Path, default=product_tuning.PATH, help="where to write")
    parser.add_argument("--resume", action="store_true", help="without what this code has tuned")
    asked = parser.parse_args(words)
    require_gpu()
    device = torch.device("cuda", torch.cuda.current_device())
    told = facts(device, "experiments.benchmarks.tune_products", words)
    gpu = Gpu(told.pop("device"), tuning.capability(device))

    def race(layer: Layer, name: str, tiles: Sequence[ProductTiles]) -> dict[ProductTiles, float]:
        return timed(layer, name, tiles, device, asked.rounds)

    known = product_tuning.read(asked.table) if asked.resume and asked.table.exists() else []
    done = {
        (one.matrix, one.tiles.rows)
        for one in known
        if one.gpu == gpu.name and one.measured.get("code") == told["code"]
    }
    for model in asked.models:
        for rows in ROWS:
            layer = Layer(widths(model), rows, asked.weights, DTYPE, device)
            for entry in tuned(layer, rows, gpu, told, race, done):
                known = product_tuning.read(asked.table) if asked.table.exists() else []
                product_tuning.write([*known, entry], asked.table)


def tuned(
    layer: Layer,
    rows: int,
    gpu: Gpu,
    told: Mapping[str, Any],
    race: Race,
    done: Container[tuple[Matrix, int]] = (),
) -> Iterator[Entry]:
    """The entry of each matrix that is not done; says what it found."""
    for name in layer.weights:
        matrix = matrix_of(layer, name)
        if (matrix, rows) in done:
            continue
        default = product_tuning.usual(matrix, rows, gpu.capability)
        seconds = race(layer, name, [default, *candidates(matrix, rows)])
        if default not in seconds:
            sys.exit(f"{name}, {rows} tokens: wrong already with the default, {default}")
        best = min(seconds, key=lambda tiles: seconds[tiles])
        ratio = seconds[best] / seconds[default]
        print(f"{name}, {rows} tokens: {ratio:.3f} of the default's time with {best}", flush=True)
        yield Entry(*gpu, matrix, best, {**told, "of_default_seconds": round(ratio, 4)})


def matrix_of(layer: Layer, name: str) -> Matrix:
    """What a product of a layer is tuned for."""
    values, gated = layer.weights[name].values, name == "gate_up"
    outputs, inputs = values.shape
    itemsizes = DTYPE.itemsize, values.itemsize
    return Matrix(outputs // 2 if gated else outputs, inputs, itemsizes, gated)


def candidates(matrix: Matrix, rows: int) -> Iterator[ProductTiles]:
    """What is tried, in tiles that are neither tiny nor huge."""
    item, weight_item = matrix.itemsizes
    for columns, depth, warps, stages in product(COLUMNS, DEPTHS, WARPS, STAGES):
        weights = columns * (2 if matrix.gated else 1) * weight_item
        if STAGE[0] <= depth * weights and depth * (weights + rows * item) <= STAGE[1]:
            yield ProductTiles(rows, columns, depth, warps, stages)


def timed(
    layer: Layer, name: str, tiles: Sequence[ProductTiles], device: torch.device, rounds: int
) -> dict[ProductTiles, float]:
    """A race on the GPU; what is first is what the others must agree with."""
    one = Product(layer, name)
    right = one.fresh(tiles[0])
    able = {str(number): cut for number, cut in enumerate(tiles) if one.can(cut, right)}
    calls = {number: partial(one.run, cut) for number, cut in able.items()}
    seconds = medians(calls, device, rounds)
    return {able[number]: of for number, of in seconds.items()}


class Product:
    """One product of a layer, with what stands around it."""

    def __init__(self, layer: Layer, name: str) -> None:
        self._layer, self._added = layer, name in ("out", "down")
        self._weight, self._gated = layer.weights[name], name == "gate_up"
        values = self._weight.values
        kind: Any = {"dtype": layer.tokens.dtype, "device": values.device}
        self._x = layer.tokens
        if self._added:
            self._x = torch.randn(len(layer.tokens), values.shape[1], **kind)

    def run(self, tiles: ProductTiles) -> torch.Tensor:
        """What is timed."""
        from pagedsim.kernels import product

        (values, scale), layer = self._weight, self._layer
        if self._added:
            product.add_product(layer.residual, self._x, values, None, scale, tiles=tiles)
            return layer.residual
        return product.product(
            self._x, values, None, scale, norm=layer.known, gated=self._gated, tiles=tiles
        )

    def fresh(self, tiles: ProductTiles) -> torch.Tensor:
        """What comes of fresh tokens."""
        self._layer.fresh()
        return self.run(tiles).double()

    def can(self, tiles: ProductTiles, right: torch.Tensor) -> bool:
        """Does it fit, and compute the same?"""
        from triton.runtime.errors import OutOfResources, PTXASError

        try:
            off = (self.fresh(tiles) - right).norm() / right.norm()
        except (OutOfResources, PTXASError):
            return False
        return bool(off <= torch.finfo(self._x.dtype).eps)


if __name__ == "__main__":
    main()
