"""Kernels of whole models, as the profiler of LLMServingSim writes them.

`<GPU>/<model>/<format>/tp<n>/<table>.csv`, also with the folders in the file's name: `dense`, by
layer and tokens; `per_sequence`; `attention`, by chunk and decodes; `moe`, by tokens and the
experts that they choose. In microseconds, and without all-reduces.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from math import inf
from pathlib import Path

import pyarrow.compute as pc
from pyarrow import csv

from pagedsim.sim.cost.base import UnmeasuredError
from pagedsim.sim.cost.kernels import Kernel, StepKernels, all_reduces, sources
from pagedsim.sim.cost.tables import KernelTables, Part, installed
from pagedsim.sim.replica import Replica
from pagedsim.sim.stack import Stack

_FILE = re.compile(
    r"(?:.*perf_)?(?P<gpu>[^_]+)_(?P<model>.+)_[^_]+_tp(?P<gpus>\d+)_"
    r"(?P<table>dense|per_sequence|attention|moe)\.csv"
)
CALLS = {"embedding": 0, "final_layernorm": 0, "layernorm": 2}
"""How often layers run in each layer of the model, if not once; 0: once in a step."""


def profiled_kernels(folder: Path, replica: Replica, stack: Stack) -> StepKernels | None:
    """The kernels of a replica; None for a folder of another layout."""
    profiles: dict[tuple[str, str, int], dict[str, Path]] = {}
    for path in sorted(folder.glob("**/*.csv")):
        if match := _FILE.fullmatch("_".join(path.relative_to(folder).parts)):
            profile = profiles.setdefault((match["gpu"], match["model"], int(match["gpus"])), {})
            profile[match["table"]] = path
    if not profiles:
        return None
    model, hardware, tables = replica.model, replica.hardware, None
    for (gpu, name, gpus), profile in profiles.items():
        same = _plain(hardware.name).startswith(_plain(gpu)) and _plain(model.name) in _plain(name)
        if same and gpus == replica.gpus == replica.tensor_parallel:
            tables = profile
    if tables is None or not {"dense", "per_sequence", "attention", *_moe(replica)} <= set(tables):
        which = ", ".join(f"{name} on {gpus} {gpu}" for gpu, name, gpus in profiles)
        raise UnmeasuredError(
            f"model={model.name}: not measured in {folder} on hardware={hardware.name} with "
            f"{replica.split}; there are {which}"
        )
    by_tokens = list(_kernels(tables["dense"], "tokens", replica))
    notices = []
    if replica.tensor_parallel > 1:
        others = KernelTables(installed(), hardware.name, stack.name)
        by_tokens += all_reduces(replica, others)
        notices = [sources(others)]
    chunks = _part(tables["attention"], "n_decode", 0)
    rows = {**chunks.rows, "from": chunks.rows["kv_prefill"] + 1.0}  # 0 has no logarithm
    of_chunks = chunks._replace(rows=rows).surface("prefill_chunk", "from")
    return StepKernels(
        by_tokens,
        list(_kernels(tables["per_sequence"], "sequences", replica)),
        list(_experts(tables, replica)),
        lambda prompts, tokens, before: prompts * of_chunks(tokens, before + 1.0),
        _part(tables["attention"], "prefill_chunk", 0).surface("n_decode", "kv_decode"),
        notices,
    )


def _moe(replica: Replica) -> list[str]:
    return ["moe"] if replica.model.moe else []


def _kernels(path: Path, size: str, replica: Replica) -> Iterator[Kernel]:
    """The kernels of a table by layer."""
    hardware = replica.hardware
    for layer in csv.read_csv(path)["layer"].unique().to_pylist():
        calls = CALLS.get(layer, 1) * replica.model.layers if size == "tokens" else 1
        weights = layer.endswith("_proj") or layer == "lm_head"
        compute_from = hardware.flop_rate / hardware.bandwidth if weights else inf
        curve = _part(path, "layer", layer).curve(size)
        yield Kernel(layer.removesuffix("_proj"), "bandwidth", calls or 1, curve, compute_from)


def _experts(tables: Mapping[str, Path], replica: Replica) -> Iterator[Kernel]:
    """Experts by tokens, which choose as many as are expected of uniform routing."""
    if moe := replica.model.moe:
        surface = _part(tables["moe"]).surface("tokens", "activated_experts")
        seconds = lambda tokens: surface(tokens, moe.expected_experts(tokens))  # noqa: E731
        yield Kernel("experts", "bandwidth", replica.model.moe_layers, seconds)


def _part(path: Path, column: str = "", value: object = None) -> Part:
    """The rows of a table that have this value in a column."""
    table = csv.read_csv(path)
    kept = table.filter(pc.equal(table[column], value)) if column else table
    names = [name for name in kept.column_names if name != "layer"]
    rows = {name: kept[name].to_numpy().astype(float) for name in names}
    return Part(path, (), {**rows, "latency": rows["time_us"] * 1e-3})


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())
