"""What kernels reach of the data sheets, by GPU family, from measured kernels.

    pip install --no-deps -c constraints.txt aiconfigurator-core
    python -m pagedsim.experiments.fidelity.families

A product of m × k with k × n takes `us + ((FLOP / rate)^s + (bytes / bandwidth)^s)^(1/s)`: the
roofline, whose corner is rounded by the sharpness s. Attention of prompts reaches a share of the
FLOP rate; attention of decodes and an all-reduce take a latency, and for each byte a share of the
memory's or the link's rate. All constants are least squares in logarithms over the shapes that
layers of models have, of the newest table of each framework. A family's are fitted to all of its
GPUs together. A GPU that is left out is predicted by the shares of all others, and its data sheet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray

from pagedsim.experiments.fidelity.kernels import (
    ALL_REDUCES,
    DECODES,
    PRODUCTS,
    PROMPTS,
    folder_of_tables,
    newest,
)
from pagedsim.experiments.fidelity.least_squares import Floats, minimized
from pagedsim.experiments.fidelity.truth_data import by
from pagedsim.fidelity.sheets import hardware_named
from pagedsim.sim.hardware import Hardware

Table = Mapping[str, Floats]

GPUS = {
    **{"a100_sxm": "a100-80gb", "h100_sxm": "h100", "h200_sxm": "h200", "b200_sxm": "b200"},
    **{"l40s": "l40s", "rtx_pro_6000_server": "rtx-pro-6000-server"},
}
"""GPUs of the tables that conf/hardware has."""
BYTES = {"bfloat16": 2.0, "fp8": 1.0, "nvfp4": 0.5625}
FORMATS = {"bfloat16": "fp16", "fp8": "fp8", "nvfp4": "fp4"}
MOST_SHARE = 0.98
"""Of a rate that kernels may be said to reach."""


class Samples(NamedTuple):
    """Kernels of one kind on one GPU: their work by the data sheet, and what they took."""

    compute: Floats
    """Seconds at the full FLOP rate."""
    moving: Floats
    """Seconds at the full rate of the memory, or of the link."""
    seconds: Floats


Law = Callable[[Floats, Samples], Floats]


def rounded(constants: Floats, samples: Samples) -> Floats:
    """A latency in µs, shares of FLOP and bandwidth, and the sharpness of the corner."""
    us, compute, bandwidth, sharpness = constants
    work = (samples.compute / compute) ** sharpness + (samples.moving / bandwidth) ** sharpness
    return 1e-6 * us + work ** (1 / sharpness)


def moved(constants: Floats, samples: Samples) -> Floats:
    """A latency in µs, and a share of the bandwidth."""
    us, share = constants
    return 1e-6 * us + samples.moving / share


def added(constants: Floats, samples: Samples) -> Floats:
    """A latency in µs, and shares of FLOP and bandwidth that are used in turn."""
    us, compute, bandwidth = constants
    return 1e-6 * us + samples.compute / compute + samples.moving / bandwidth


class Kind(NamedTuple):
    """A kind of kernels, and the law of their time."""

    samples: Callable[[Path, Hardware], Samples]
    law: Law
    names: tuple[str, ...]
    begin: tuple[float, ...]


# -- tables ----------------------------------------------------------------------------------------


def tables(folder: Path, table: str) -> Iterator[Table]:
    """The columns of each framework's newest table."""
    for path in newest(folder, table).values():
        columns = pq.read_table(path)
        yield {name: columns[name].to_numpy() for name in columns.column_names}


def _joined(parts: Sequence[tuple[Floats, Floats, Floats]]) -> Samples:
    empty = np.zeros(0)
    if not parts:
        return Samples(empty, empty, empty)
    return Samples(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))


def products(dtype: str) -> Callable[[Path, Hardware], Samples]:
    """Products with matrices as large as those of layers; in 8 bits of the fastest framework at
    each shape, since some tables quantise activations in them, which servers fuse with other
    kernels. In 4 bits, with scales of their own, activations are quantised at any rate."""

    def samples(folder: Path, gpu: Hardware) -> Samples:
        parts = [_products(table, dtype) for table in tables(folder, PRODUCTS)]
        m, n, k, seconds = np.concatenate([np.zeros((4, 0)), *parts], axis=1)
        if dtype == "fp8":
            m, n, k, seconds = _fastest(np.stack([m, n, k, seconds]))
        moved_bytes = BYTES[dtype] * (n * k + m * k) + 2 * m * n
        rate = gpu.rates.get(FORMATS[dtype], gpu.flop_rate)
        return Samples(2 * m * n * k / rate, moved_bytes / gpu.bandwidth, seconds)

    return samples


def _products(table: Table, dtype: str) -> Floats:
    """Rows m, n, k and seconds of a format."""
    m, n, k = (table[name].astype(float) for name in "mnk")
    layer = (n * k >= 1 << 22) & (np.maximum(n, k) <= 1 << 16) & (m <= 1 << 14)
    rows = layer & (table["gemm_dtype"] == dtype)
    return np.stack([m, n, k, 1e-3 * table["latency"]])[:, rows]


def _fastest(rows: Floats) -> Floats:
    """The least seconds of each shape."""
    rows = rows[:, np.lexsort(rows[::-1])]
    _, first = np.unique(rows[:3], axis=1, return_index=True)
    return np.asarray(rows[:, first])


def prompts(folder: Path, gpu: Hardware) -> Samples:
    """Attention of prompts of 256 tokens and more over themselves."""
    parts = []
    for table in tables(folder, PROMPTS):
        rows = _plain(table) & (table["isl"] >= 256) & (table["isl"] * table["batch_size"] <= 16384)
        batch, length, heads = (
            table[name][rows].astype(float) for name in ("batch_size", "isl", "num_heads")
        )
        kept = table["num_key_value_heads"][rows]
        flop = 4 * batch * heads * 128 * length * (length + 1) / 2
        moved_bytes = 2 * 128 * batch * length * 2 * (heads + kept)
        seconds = 1e-3 * table["latency"][rows]
        parts.append((flop / gpu.flop_rate, moved_bytes / gpu.bandwidth, seconds))
    return _joined(parts)


def decodes(folder: Path, gpu: Hardware) -> Samples:
    """Attention of decodes over 128 tokens and more: of little, or of more than caches of GPUs
    hold, since a benchmark reads the same again and again."""
    parts = []
    for table in tables(folder, DECODES):
        context = table["isl"] + table["step"]
        rows = _plain(table) & (context >= 128) & (table["num_key_value_heads"] <= 8)
        batch, length, heads = (
            column[rows].astype(float)
            for column in (table["batch_size"], context, table["num_key_value_heads"])
        )
        read = batch * length * heads * 128 * 2 * 2
        uncached = (read <= 1 << 21) | (read >= 1 << 28)
        seconds = 1e-3 * table["latency"][rows]
        parts.append((np.zeros(len(read)), read / gpu.bandwidth, seconds))
        parts[-1] = tuple(column[uncached] for column in parts[-1])
    return _joined(parts)


def of_8_bits(folder: Path) -> Iterator[tuple[str, float]]:
    """By framework: how fast decodes read a cache of 8 bits, more than caches of GPUs hold,
    relative to one of 16."""
    for table in tables(folder, DECODES):
        batch, length, heads = (
            column.astype(float)
            for column in (
                *(table["batch_size"], table["isl"] + table["step"]),
                table["num_key_value_heads"],
            )
        )
        values = batch * length * heads * 128 * 2
        large = (values >= 1 << 28) & (heads <= 8)
        rates = [
            size * np.median((values / table["latency"])[large & _plain(table, kind)])
            for kind, size in (("bfloat16", 2), ("fp8", 1))
            if (large & _plain(table, kind)).any()
        ]
        if len(rates) == 2:
            yield str(table["framework"][0]).lower(), float(rates[1] / rates[0])


def _plain(table: Table, cache: str = "bfloat16") -> NDArray[np.bool_]:
    """Rows in 16 bits, over such a cache, of heads of 128, over all tokens, of several heads to
    each of the cache."""
    grouped = table["num_heads"] >= 4 * table["num_key_value_heads"]
    sixteen = (table["attn_dtype"] == "bfloat16") & (table["kv_cache_dtype"] == cache)
    whole = table["window_size"] == 0 if "window_size" in table else np.ones(len(grouped), bool)
    return np.asarray(grouped & sixteen & whole & (table["head_dim"] == 128))


def all_reduces(folder: Path, gpu: Hardware) -> Samples:
    """All-reduces of a graph, of the activations of 1 to 16,384 tokens, as a ring moves them."""
    parts = []
    for table in tables(folder, ALL_REDUCES):
        size, gpus = table["message_size"].astype(float), table["num_gpus"].astype(float)
        eager = np.array(["eager" in source for source in table["kernel_source"]], bool)
        rows = (size >= 1 << 13) & (size <= 1 << 27) & ~eager
        ring = 2 * (gpus - 1) / gpus * size
        seconds = 1e-3 * table["latency"]
        parts.append((np.zeros(rows.sum()), (ring / gpu.interconnect)[rows], seconds[rows]))
    return _joined(parts)


_PRODUCTS = ("us", "compute", "bandwidth", "sharpness")
KINDS = {
    **{
        f"products, {FORMATS[dtype]}": Kind(
            products(dtype), rounded, _PRODUCTS, (4.0, 0.7, 0.8, 2.0)
        )
        for dtype in BYTES
    },
    "attention of prompts": Kind(
        prompts, added, ("us", "attention", "bandwidth"), (10.0, 0.6, 0.6)
    ),
    "attention of decodes": Kind(decodes, moved, ("us", "cache"), (8.0, 0.8)),
    "all-reduce": Kind(all_reduces, moved, ("us", "share"), (5.0, 0.4)),
}


# -- fits ------------------------------------------------------------------------------------------


def fitted(kind: Kind, gpus: Sequence[Samples]) -> Floats:
    """The constants of a kind, each GPU with the same weight."""
    least = min(len(samples.seconds) for samples in gpus)
    thinned = [
        Samples(*(column[:: max(len(column) // max(least, 1), 1)] for column in samples))
        for samples in gpus
    ]

    def residuals(constants: Floats) -> Floats:
        parts = [np.log(kind.law(constants, samples) / samples.seconds) for samples in thinned]
        return np.concatenate(parts)

    bounds = [np.inf if name in ("us", "sharpness") else MOST_SHARE for name in kind.names]
    return minimized(residuals, np.array(kind.begin), np.array(bounds)).values


def error(kind: Kind, constants: Floats, samples: Samples) -> float:
    """The median |error|."""
    return float(np.median(np.abs(kind.law(constants, samples) / samples.seconds - 1)))


def main(words: Sequence[str] | None = None) -> None:
    """Print the constants of each kind by family, and errors of GPUs left out."""
    folder = folder_of_tables(__doc__, words)
    for name, kind in KINDS.items():
        samples = {
            gpu: kind.samples(folder / gpu, hardware_named(sheet)) for gpu, sheet in GPUS.items()
        }
        samples = {gpu: rows for gpu, rows in samples.items() if len(rows.seconds)}
        print(f"\n{name}: median |error| of each GPU by its family's constants, and left out")
        families = by(samples, lambda gpu: hardware_named(GPUS[gpu]).family or gpu)
        for family, members in {**families, "all": [*samples]}.items():
            constants = fitted(kind, [samples[gpu] for gpu in members])
            shown = " ".join(f"{n} {v:.3g}" for n, v in zip(kind.names, constants, strict=True))
            print(f"  {family}: {shown}")
            for gpu in members if family != "all" else ():
                of_family = error(kind, constants, samples[gpu])
                others = [rows for other, rows in samples.items() if other != gpu]
                line = f"    {gpu:20} {len(samples[gpu].seconds):7,} kernels {of_family:6.1%}"
                if others:
                    line += f", left out {error(kind, fitted(kind, others), samples[gpu]):6.1%}"
                print(line)
    print("\ncache of 8 bits: median bytes/s of long decodes, relative to those of 16 bits")
    for gpu in GPUS:
        shares = " ".join(f"{name} {share:.2f}" for name, share in of_8_bits(folder / gpu))
        print(f"  {gpu:20} {shares}")


if __name__ == "__main__":
    main()
