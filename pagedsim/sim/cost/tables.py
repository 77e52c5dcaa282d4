"""Tables of measured kernels in the layout of aiconfigurator-core: which are there, and their rows.

`<GPU>/<family>/<framework>/<version>/<table>.parquet`, a row a kernel and shape, in milliseconds.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from itertools import product
from math import inf, log, prod
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray
from pyarrow import ArrowInvalid

from pagedsim.core import ConfigError
from pagedsim.sim.cost.base import UnmeasuredError
from pagedsim.sim.cost.grids import Curve, Surface, around, blended

PACKAGE = "aiconfigurator_core"
FRAMEWORKS = ("vllm", "sglang", "trtllm")
ALIASES = {"a100-80gb": "a100_sxm"}
"""GPUs whose name in the tables is neither that of conf/hardware nor that with _sxm."""

SIXTEEN_BITS = ("bfloat16",)
UNSPLIT = ("vllm_flash_attn_fa2", "vllm_flash_attn")
"""FlashAttention 2, which splits the context of decodes alone."""
WEIGHTS = {
    **{"hidden_size": 1, "inter_size": 1, "num_experts": 1},
    **{"moe_tp_size": -1, "moe_ep_size": -1},
}
"""The powers with which the weights of experts on a GPU go with their shape."""

Rows = Mapping[str, NDArray[np.float64]]
Equal = tuple[tuple[str, object], ...]
"""Columns and the value that rows must have there."""


def framework_of(stack: str) -> tuple[str, tuple[int, ...]]:
    """The framework of a serving stack and its version, if its name has one.

    >>> framework_of("sglang-0.5"), framework_of("vllm-0.33"), framework_of("ideal")
    (('sglang', (0, 5)), ('vllm', (0, 33)), ('vllm', ()))
    """
    name, _, version = stack.partition("-")
    return (name if name in FRAMEWORKS else FRAMEWORKS[0]), release(version)


def release(version: str) -> tuple[int, ...]:
    """All numbers of a version.

    >>> release("1.3.0rc20")
    (1, 3, 0, 20)
    """
    return tuple(map(int, re.findall(r"\d+", version)))


def installed() -> Path:
    """The folder of the installed tables, found without importing their package."""
    spec = find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(
            "cost.tables=null: needs the tables of aiconfigurator-core, which is not installed: "
            "pip install --no-deps -c constraints.txt aiconfigurator-core"
        )
    return Path(spec.submodule_search_locations[0]) / "systems" / "data"


class Part(NamedTuple):
    """Rows of a table that equal these values; `latency` is in milliseconds."""

    path: Path
    equal: Equal
    rows: Rows

    @property
    def label(self) -> str:
        """Framework and version."""
        return " ".join(self.path.parts[-3:-1])

    def shapes(self, names: Iterable[str]) -> set[tuple[float, ...]]:
        """The different values of these columns."""
        return set(zip(*(self.rows[name].tolist() for name in names), strict=True))

    def of(self, names: Iterable[str], shape: Iterable[float]) -> Part:
        """The rows of a shape."""
        same = np.all([self.rows[n] == size for n, size in zip(names, shape, strict=True)], axis=0)
        return self._replace(rows={name: column[same] for name, column in self.rows.items()})

    def curve(self, size: str, factor: float = 1.0, law: float = 1.0) -> Curve:
        """Seconds by a column, of several rows for a size the fastest."""
        order = np.lexsort((self.rows["latency"], sizes := self.rows[size]))
        kept = order[np.unique(sizes[order], return_index=True)[1]]
        seconds = self.rows["latency"][kept] * 1e-3 * factor
        return Curve(sizes[kept].tolist(), seconds.tolist(), law)

    def surface(self, count: str, length: str, law: float = 1.0, wide: float = 1.0) -> Surface:
        """Seconds by two columns."""
        counts = [number for (number,) in self.shapes([count])]
        return Surface({n: self.of([count], [n]).curve(length, 1.0, law) for n in counts}, wide)

    def attention(self, wide: float = 1.0) -> Surface:
        """Of prompts by their length; of decodes (isl 1, after `step` tokens) by their context."""
        law = 1.0 if self.rows["step"].max() > 0 else 2.0
        rows = {**self.rows, "length": self.rows["isl"] + self.rows["step"]}
        return self._replace(rows=rows).surface("batch_size", "length", law, wide)

    def between(self, names: Sequence[str], sizes: Sequence[float]) -> Curve | None:
        """Seconds by rows (m) at sizes between or beyond those that were measured."""
        known = [_sizes(self.path, self.equal, name) for name in names]
        corners = product(*(around(grid, size) for grid, size in zip(known, sizes, strict=True)))
        parts = [
            (self.of(names, [edge for edge, _ in corner]), prod(share for _, share in corner))
            for corner in corners
        ]
        beyond = prod(max(size / grid[-1], 1.0) for grid, size in zip(known, sizes, strict=True))
        curves = [(part.curve("m"), share) for part, share in parts if part]
        return blended(curves, beyond) if curves else None

    def __bool__(self) -> bool:
        return len(self.rows["latency"]) > 0


class KernelTables:
    """The tables of one GPU; of several frameworks and versions the nearest that has the rows."""

    def __init__(self, folder: Path, gpu: str, stack: str) -> None:
        self._framework, self._version = framework_of(stack)
        known = sorted(path.name for path in folder.glob("*") if any(path.glob("*/*/*/*.parquet")))
        plain = gpu.replace("-", "_")
        named = [name for name in (ALIASES.get(gpu), plain, f"{plain}_sxm") if name in known]
        if not named:
            which = ", ".join(known) or "none"
            raise UnmeasuredError(
                f"hardware={gpu}: no kernels of it in {folder}, which has {which}"
            )
        self.system = str(named[0])
        self._folder = folder / self.system
        self.taken: dict[str, str] = {}
        """Framework and version by kernel."""
        self.replaced: list[str] = []
        """What was taken instead of what the tables lack."""

    def product(self, dtype: str, outputs: float, inputs: float) -> Curve | None:
        """A product with a matrix, by rows, in a format; None if the tables have none in it."""
        part = self._part("products", "gemm/gemm_perf", ("m", "n", "k"), (("gemm_dtype", dtype),))
        return part.between(("n", "k"), (outputs, inputs)) if part else None

    def one_pass(self, values: float, table: str = "scale_matrix_perf") -> Curve | None:
        """A kernel that reads 16 bits and writes 8 of so many values a row, by rows."""
        equal = (("quant_dtype", "fp8"),)
        part = self._part("norms", f"quantize/{table}", ("m", "k"), equal)
        return part.between(("k",), (values,)) if part else None

    def attention(
        self, table: str, heads: float, kv_heads: float, head_dim: int, kv_format: str
    ) -> Surface:
        """Attention of a layer by sequences and length. Heads are independent, so a sequence of
        twice as many, or of twice the width, is as two of the nearest that were measured."""
        columns = ("num_heads", "num_key_value_heads", "head_dim", "batch_size", "isl", "step")
        formats = [
            (("window_size", 0), ("attn_dtype", "bfloat16"), ("kv_cache_dtype", kind))
            for kind in dict.fromkeys((kv_format, "bfloat16"))
        ]
        part = self._part("attention", f"attention/{table}", columns, *formats)
        if part is None:
            raise UnmeasuredError(f"cost.tables: no {table} of {self.system} in 16 bits")
        if part.equal != formats[0]:
            self.lacks(f"attention over a KV cache in {kv_format}", "that in 16 bits")

        def distance(key: tuple[float, ...]) -> tuple[float, ...]:
            queries, keys, width = key
            group = abs(log(heads / kv_heads * keys / queries))
            return abs(log(width / head_dim)), group, kv_heads % keys, abs(log(kv_heads / keys))

        best = min(part.shapes(columns[:3]), key=distance)
        wide = kv_heads * head_dim / (best[1] * best[2])
        return part.of(columns[:3], best).attention(wide)

    def tile(self, head_dim: int) -> Curve | None:
        """A tile of queries passing over its context, by the context: as long as a prompt of one
        head, whose tiles all run at once. None where the nearest kernel splits contexts, or may.

        On an RTX PRO 6000 that is 171 µs for 8,192; LLMServingSim's profile has 184 to 187 for 16
        to 128 tokens of Qwen3-32B there.
        """
        same = (("num_heads", 1), ("head_dim", head_dim), ("batch_size", 1), ("window_size", 0))
        for path in self._files("attention/context_attention_perf")[:1]:
            for source in UNSPLIT if "kernel_source" in _columns(path) else ():
                equal = (*same, ("kernel_source", source))
                if part := Part(path, equal, _read(path, ("isl", "latency"), equal)):
                    return part.curve("isl")
        return None

    def latent_attention(self, table: str, heads: float, dtype: str, kv_format: str) -> Surface:
        """Attention of DeepSeek-V3 with its products, of a layer, by sequences and length."""
        columns = ("num_heads", "batch_size", "isl", "step")
        formats = [
            (("gemm_type", kind), ("kv_cache_dtype", kv_format))
            for kind in dict.fromkeys((dtype, "bfloat16"))
        ]
        part = self._part("attention", f"mla/{table}", columns, *formats)
        if part is None:
            raise UnmeasuredError(f"model.mla: no {table} of {self.system} in {dtype} or 16 bits")
        nearest = min(part.shapes(columns[:1]), key=lambda key: abs(log(key[0] / heads)))
        return part.of(columns[:1], nearest).attention()

    def all_reduce(self, gpus: int) -> Curve:
        """Seconds by the number of 16-bit values: of the framework's kernel and NCCL's the faster,
        as servers choose by size."""
        of_nccl = (("num_gpus", gpus), ("op_name", "all_reduce"), ("nccl_dtype", "half"))
        parts = [
            self._part("all-reduce", "comm/custom_allreduce_perf", ("message_size",), of_nccl[:1]),
            self._part("all-reduce", "comm/nccl_perf", ("message_size",), of_nccl),
        ]
        curves = [part.curve("message_size") for part in parts if part]
        if not curves:
            raise UnmeasuredError(
                f"tensor_parallel={gpus}: no all-reduce of so many {self.system} in the tables"
            )
        sizes = sorted({size for curve in curves for size in curve.sizes})
        return Curve(sizes, [min(curve(size) for curve in curves) for size in sizes])

    def experts(self, shape: Mapping[str, float], dtypes: tuple[str, ...], load: str) -> Curve:
        """Seconds of a layer's experts by the tokens of all groups; `shape` by column. Where there
        are none of this shape, those of the nearest, by their weights."""
        formats = [(("moe_dtype", dtype), ("distribution", load)) for dtype in dtypes]
        least, nearest = inf, None
        for part in self._parts("moe/moe_perf", (*shape, "num_tokens"), *formats):
            for key in part.shapes(shape):
                ratios = [size / other for size, other in zip(shape.values(), key, strict=True)]
                if (distance := sum(abs(log(ratio)) for ratio in ratios)) < least:
                    least, nearest = distance, (part, key, ratios)
            if not least:
                break
        if nearest is None and dtypes != SIXTEEN_BITS:
            self.lacks(f"experts in {dtypes[0]}", "those in 16 bits")
            return self.experts(shape, SIXTEEN_BITS, load)
        if nearest is None:
            raise UnmeasuredError(
                f"cost.tables: no experts of {self.system} in {' or '.join(dtypes)}"
            )
        part, key, ratios = nearest
        if least:
            shown = " ".join(f"{name}={size:g}" for name, size in zip(shape, key, strict=True))
            self.lacks("experts of this shape", f"those of {shown}, by their weights")
        self.taken.setdefault("experts", part.label)
        powers = [WEIGHTS.get(name, 0) for name in shape]
        larger = prod(ratio**power for ratio, power in zip(ratios, powers, strict=True))
        return part.of(shape, key).curve("num_tokens", larger)

    def lacks(self, what: str, instead: str) -> None:
        """Note what the tables lack."""
        if (line := f"{what} by {instead}") not in self.replaced:
            self.replaced.append(line)

    def _part(
        self, kernel: str, table: str, columns: tuple[str, ...], *formats: Equal
    ) -> Part | None:
        """The rows of the first format that any table has, of the nearest table."""
        for part in self._parts(table, columns, *formats):
            self.taken.setdefault(kernel, part.label)
            return part
        return None

    def _parts(self, table: str, columns: tuple[str, ...], *formats: Equal) -> Iterator[Part]:
        for equal in formats:
            for path in self._files(table):
                if part := Part(path, equal, _read(path, (*columns, "latency"), equal)):
                    yield part

    def _files(self, table: str) -> list[Path]:
        """The files of <family>/<table>: of the stack's framework before others, of its version
        before the next later one before earlier ones."""
        family, name = table.split("/")
        return sorted(self._folder.glob(f"{family}/*/*/{name}.parquet"), key=self._distance)

    def _distance(self, path: Path) -> tuple[int, int, tuple[int, ...]]:
        order = [self._framework, *(name for name in FRAMEWORKS if name != self._framework)]
        framework, version, wanted = path.parts[-3], release(path.parts[-2]), self._version
        other = order.index(framework) if framework in order else len(order)
        newest = tuple(-number for number in version)
        if other or version[: len(wanted)] == wanted:
            return other, 0, newest
        return (other, 1, version) if version > wanted else (other, 2, newest)


@cache
def _columns(path: Path) -> list[str]:
    """Names of a file's columns."""
    try:
        return list(pq.read_schema(path).names)
    except ArrowInvalid as error:
        raise ConfigError(f"cost.tables: {path} is no Parquet file: {error}") from None


@cache
def _read(path: Path, columns: tuple[str, ...], equal: Equal) -> Rows:
    """The columns of the rows that equal these values, where the table has such columns; read once
    by a process."""
    has = _columns(path)
    filters = [(name, "=", value) for name, value in equal if name in has]
    table = pq.read_table(path, columns=[*columns], filters=filters or None)
    if "latency" in columns:  # some are differences, within their noise
        table = table.filter(pc.greater(table["latency"], 0.0))
    return {name: table[name].to_numpy().astype(float) for name in columns}


@cache
def _sizes(path: Path, equal: Equal, name: str) -> list[float]:
    """The different values of a column."""
    return sorted(set(_read(path, (name,), equal)[name].tolist()))
