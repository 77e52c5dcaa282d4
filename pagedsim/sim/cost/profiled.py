"""Kernels of whole models, as the profiler of LLMServingSim writes them.

`<GPU>/<model>/<format>/tp<n>/<table>.csv`, also with the folders in the file's name: `dense`, by
layer and tokens; `per_sequence`; `attention`, by chunk and decodes; `moe`, by tokens and the
experts that they choose. In microseconds, and without all-reduces.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pyarrow.compute as pc
from pyarrow import Table, csv

from pagedsim.core import ConfigError
from pagedsim.sim.cost.grids import Curve, Surface
from pagedsim.sim.cost.kernels import Kernel, StepKernels, all_reduces, sources
from pagedsim.sim.cost.tables import KernelTables, installed
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
        raise ConfigError(
            f"model={model.name}: not measured in {folder} on hardware={hardware.name} with "
            f"{replica.split}; there are {which}"
        )
    by_tokens = [*_kernels(tables["dense"], "tokens", replica), *_experts(tables, replica)]
    if replica.tensor_parallel > 1:
        others = KernelTables(installed(), hardware.name, stack.name)
        by_tokens += all_reduces(replica, others)
        notices = [sources(others)]
    attention = csv.read_csv(tables["attention"])
    of_chunks = _surface(attention, "prefill_chunk", "kv_prefill", without="n_decode")
    return StepKernels(
        by_tokens,
        list(_kernels(tables["per_sequence"], "sequences", replica)),
        lambda prompts, tokens, before: prompts * of_chunks(tokens, before + 1.0),
        _surface(attention, "n_decode", "kv_decode", without="prefill_chunk"),
        notices if replica.tensor_parallel > 1 else [],
    )


def _moe(replica: Replica) -> list[str]:
    return ["moe"] if replica.model.moe else []


def _kernels(path: Path, size: str, replica: Replica) -> Iterator[Kernel]:
    """The kernels of a table by layer."""
    rows, hardware = csv.read_csv(path), replica.hardware
    for layer in rows["layer"].unique().to_pylist():
        curve = _curve(rows.filter(pc.equal(rows["layer"], layer)), size)
        calls = CALLS.get(layer, 1) * replica.model.layers if size == "tokens" else 1
        weights = layer.endswith("_proj") or layer == "lm_head"
        compute_from = hardware.flop_rate / hardware.bandwidth if weights else float("inf")
        yield Kernel(layer.removesuffix("_proj"), "bandwidth", calls or 1, curve, compute_from)


def _experts(tables: dict[str, Path], replica: Replica) -> Iterator[Kernel]:
    """Experts by tokens, which choose as many as are expected of uniform routing."""
    if moe := replica.model.moe:
        surface = _surface(csv.read_csv(tables["moe"]), "tokens", "activated_experts")
        layers = replica.model.moe_layers
        yield Kernel(
            "experts",
            "bandwidth",
            layers,
            lambda tokens: surface(tokens, moe.expected_experts(tokens)),
        )


def _surface(rows: Table, count: str, length: str, without: str = "") -> Surface:
    """Seconds by two columns, of the rows that have nothing of a third."""
    kept = rows.filter(pc.greater(rows[count], 0))
    if without:
        kept = kept.filter(pc.equal(kept[without], 0))
    counts = kept[count].unique().sort().to_pylist()
    return Surface(
        {number: _curve(kept.filter(pc.equal(kept[count], number)), length) for number in counts}
    )


def _curve(rows: Table, size: str) -> Curve:
    sizes = pc.add(rows[size], 1) if size == "kv_prefill" else rows[size]  # logarithms: from 1 on
    order = pc.sort_indices(sizes)
    seconds = pc.multiply(rows["time_us"].take(order), 1e-6)
    return Curve(sizes.take(order).to_pylist(), seconds.to_pylist())


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())
