"""How true `cost=measured` is between the shapes that were measured, and what it costs.

    python -m pagedsim.experiments.fidelity.kernels [FOLDER]

Each inner point of a table is left out and predicted from its neighbours along one size, as the
cost model interpolates: medians over points and sizes, of each framework's newest version. FOLDER
has tables in the layout of aiconfigurator-core; without it the installed ones are taken.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

import numpy as np
import pyarrow.parquet as pq

from pagedsim.core import ConfigError
from pagedsim.experiments.benchmarks.harness import cpu_seconds, table
from pagedsim.experiments.benchmarks.simulator import cases, run_of, serve
from pagedsim.experiments.fidelity.least_squares import Floats
from pagedsim.fidelity.sheets import hardware_named, model_named
from pagedsim.sim.cost import Measured
from pagedsim.sim.cost.tables import FRAMEWORKS, Equal, installed, release
from pagedsim.sim.replica import Replica


class Grid(NamedTuple):
    """A table, the sizes along which points are left out, and what else tells its rows apart."""

    table: str
    sizes: tuple[str, ...]
    shape: tuple[str, ...] = ()
    equal: Equal = ()
    straight: str = ""
    """The size between whose values the cost model draws straight lines, not in logarithms."""


PRODUCT = ("m", "n", "k")
HEADS = ("num_heads", "num_key_value_heads", "head_dim")
KEPT: Equal = (("window_size", 0), ("attn_dtype", "bfloat16"), ("kv_cache_dtype", "bfloat16"))
EXPERTS = ("hidden_size", "inter_size", "topk", "num_experts", "moe_tp_size", "moe_ep_size")
ROUTED: Equal = (("moe_dtype", "bfloat16"), ("distribution", "power_law_1.01"))
PRODUCTS, PROMPTS = "gemm/gemm_perf", "attention/context_attention_perf"
DECODES, ALL_REDUCES = "attention/generation_attention_perf", "comm/custom_allreduce_perf"
GRIDS = {
    "products, bf16": Grid(PRODUCTS, PRODUCT, (), (("gemm_dtype", "bfloat16"),)),
    "products, fp8": Grid(PRODUCTS, PRODUCT, (), (("gemm_dtype", "fp8"),)),
    "prompts": Grid(PROMPTS, ("batch_size", "isl"), HEADS, KEPT),
    "decodes": Grid(DECODES, ("batch_size", "step"), HEADS, KEPT, "step"),
    "all-reduce": Grid(ALL_REDUCES, ("message_size",), ("num_gpus",)),
    "experts": Grid("moe/moe_perf", ("num_tokens",), EXPERTS, ROUTED),
}


def newest(gpu: Path, table: str) -> dict[str, Path]:
    """By framework, the newest <family>/<table> of a GPU's folder."""
    family, name = table.split("/")
    paths = sorted(
        gpu.glob(f"{family}/*/*/{name}.parquet"),
        key=lambda path: (path.parts[-3], release(path.parts[-2])),
    )
    return {path.parts[-3]: path for path in paths}


def left_out(columns: dict[str, Floats], size: str, straight: bool = False) -> Floats:
    """Errors of the inner points along a size; `latency` is measured."""
    others = [name for name in columns if name not in (size, "latency")]
    order = np.lexsort([columns[name] for name in (size, *others)])
    groups = np.array([columns[name][order] for name in others])
    x, y = columns[size][order], columns["latency"][order]
    if not straight:
        x, y = np.log(x), np.log(y)
    inner = (groups[:, 2:] == groups[:, :-2]).all(axis=0)
    (low, at, high), (before, measured, after) = (
        (each[:-2][inner], each[1:-1][inner], each[2:][inner]) for each in (x, y)
    )
    predicted = before + (at - low) / (high - low) * (after - before)
    return np.abs(predicted / measured - 1 if straight else np.expm1(predicted - measured))


def fastest(path: Path, grid: Grid) -> dict[str, Floats]:
    """The columns of a table, of several kernels for a shape the fastest."""
    has = pq.read_schema(path).names
    filters = [(name, "=", value) for name, value in grid.equal if name in has]
    names = [*grid.sizes, *grid.shape]
    rows = pq.read_table(path, columns=[*names, "latency"], filters=filters or None)
    rows = rows.group_by(names).aggregate([("latency", "min")])
    columns = {name: rows[name].to_numpy().astype(float) for name in names}
    return {**columns, "latency": rows["latency_min"].to_numpy()}


def accuracy(folder: Path) -> list[list[str]]:
    """Median errors by GPU, table and framework."""
    rows = []
    for system in sorted(folder.iterdir()):
        for name, grid in GRIDS.items():
            paths = newest(system, grid.table)
            cells = dict.fromkeys(FRAMEWORKS, "–")
            for framework in paths.keys() & cells.keys():
                columns = fastest(paths[framework], grid)
                if len(columns["latency"]):
                    errors = [left_out(columns, size, size == grid.straight) for size in grid.sizes]
                    cells[framework] = f"{np.median(np.concatenate(errors)) * 100:.1f} %"
            if paths:
                rows.append([system.name, name, *cells.values()])
    return rows


def speed(folder: Path, cost: str) -> list[str]:
    """Steps of a simulation, its seconds, and microseconds a step."""
    given = [f"cost={cost}", *([f"cost.tables={folder}"] if cost == "measured" else [])]
    run = run_of((*cases(None, 10_000)["conversation, drawn"], *given))
    workload, prepared, steps = run.workload(), run.prepare(), list[int]()
    seconds = cpu_seconds(lambda: steps.append(serve(prepared, workload).steps().num_rows))
    return [cost, f"{steps[0]:,}", f"{seconds:.2f}", f"{seconds / steps[0] * 1e6:.2f}"]


def folder_of_tables(description: str, words: Sequence[str] | None) -> Path:
    """The folder that a command names, or the installed one; no return where there is none."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("tables", nargs="?", type=Path, help="folder of tables; the installed ones")
    try:
        folder = parser.parse_args(words).tables or installed()
    except ConfigError as error:
        parser.error(str(error))
    if not any(folder.glob("*/*/*/*/*.parquet")):
        parser.error(f"{folder}: has no <GPU>/<family>/<framework>/<version>/<table>.parquet")
    return folder


def main(words: Sequence[str] | None = None) -> None:
    """Print the tables."""
    folder = folder_of_tables(__doc__, words)
    begun = perf_counter()
    where = Replica(model_named("llama-3.1-70b"), hardware_named("h100"), tensor_parallel=8)
    Measured(where, tables=str(folder)).decode_seconds(8, 8000)
    size = sum(path.stat().st_size for path in folder.glob("*/*/*/*/*.parquet")) / 1e6
    print(f"{perf_counter() - begun:.2f} s to a first step; {size:.0f} MB of tables\n")
    rows = [speed(folder, cost) for cost in ("roofline", "measured")]
    print(table(["Llama-2-7B, A100-80GB", "steps", "seconds", "µs a step"], rows), "\n")
    print(table(["GPU", "left out", *FRAMEWORKS], accuracy(folder)))


if __name__ == "__main__":
    main()
