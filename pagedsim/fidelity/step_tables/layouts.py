"""Files of measured cases, in the layouts of three benchmarks; the header tells which it is."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import isfinite
from pathlib import Path
from typing import NamedTuple

from pagedsim.core import ConfigError
from pagedsim.fidelity.step_tables.cell import SHORTEST, Cell
from pagedsim.fidelity.step_tables.sheets import hardware_named, model_named, there
from pagedsim.sim.hardware import Hardware
from pagedsim.sim.model import ModelShape
from pagedsim.workload.traces.rows import file_at, opened, readable

ALIASES = {
    "meta-llama/Llama-2-7b-hf": "llama-2-7b",
    "meta-llama/Llama-2-70b-hf": "llama-2-70b",
    "llama2-70b": "llama-2-70b",
    "meta-llama/Meta-Llama-3-8B": "llama-3.1-8b",
    "meta-llama/Meta-Llama-3-70B": "llama-3.1-70b",
    "mistralai/Mistral-7B-v0.1": "mistral-7b",
    "mistralai/Mixtral-8x7B-v0.1": "mixtral-8x7b",
    "Qwen/Qwen2-7B": "qwen2-7b",
    "Llama-3.1-70B": "llama-3.1-70b",
    "Qwen3-32B": "qwen3-32b",
}
"""Models as tables call them; Llama 3 has the shape of Llama 3.1."""
GPUS = {
    "Nvidia A100 GPU": "a100-40gb",
    "Nvidia H100 GPU": "h100",
    "Nvidia GH200 GPU": "gh200",
    "AMD MI300X GPU": "mi300x",
    "h100-80gb": "h100",
    "h100_sxm": "h100",
    "h200_sxm": "h200",
    "b200_sxm": "b200",
}
"""GPUs likewise. LLM-Inference-Bench's A100 has 40 GB; experiments/data/README.md says why."""
PRECISIONS = {"": "fp16", "bf16": "fp16", "fp16": "fp16", "fp8": "fp8"}
"""What products with weights are computed in, as tables call it."""
SHAPELESS = {"Deci/DeciLM-7B": "its layers differ in their numbers of heads"}
"""Models that no dozen numbers describe, and why; their rows are left out."""


class Reader(NamedTuple):
    """A row, and where it stands."""

    table: str
    place: str
    row: Mapping[str, str | None]

    def text(self, column: str) -> str:
        """What stands in a column."""
        return (self.row[column] or "").strip()

    def whole(self, column: str) -> int:
        """A number of tokens, requests or GPUs."""
        text = self.text(column)
        if not (text.isascii() and text.isdecimal() and int(text)):
            raise ConfigError(f"{self.place}: {column}={text}: must be a whole number from 1")
        return int(text)

    def seconds(self, column: str, unit: float = 1e-3) -> float:
        """A measured time."""
        text = self.text(column)
        try:
            value = float(text)
        except ValueError:
            value = 0.0
        if not (isfinite(value) and value > 0):
            raise ConfigError(f"{self.place}: {column}={text}: must be a time above 0")
        return value * unit

    def model(self, precision: str = "fp16") -> ModelShape:
        """The shape that conf/model has; `precision` is of the layers' weights and products."""
        shape = model_named(self._name("model", ALIASES))
        return shape if precision == "fp16" else replace(shape, dtype_bytes=1.0, products=precision)

    def hardware(self) -> Hardware:
        """The sheet that conf/hardware has."""
        return hardware_named(self._name("gpu", GPUS))

    def _name(self, column: str, aliases: Mapping[str, str]) -> str:
        """The name of a file in conf/, from that or from one that benchmarks use."""
        text = self.text(column)
        name, known = aliases.get(text, text), there(GROUPS[column])
        if name not in known:
            choices = ", ".join(sorted({*aliases, *known} - NO_SHEETS))
            raise ConfigError(f"{self.place}: {column}={text}: unknown; choose from {choices}")
        return name


GROUPS = {"model": "model", "gpu": "hardware"}
"""Columns, and the groups of conf/ that say what is in them."""
NO_SHEETS = {"cpu", "hf", "tiny"}
"""Files there that describe nothing that a table could name."""


class Layout(NamedTuple):
    """What a benchmark's file holds."""

    stack: str
    """The server of its time, in conf/stack."""
    columns: tuple[str, ...]
    """Those that are read; they tell it from the others."""
    cell: Callable[[Reader, str], Cell]


def _splitwise(row: Reader, stack: str) -> Cell:
    """One step of prompts and one of tokens."""
    return Cell(
        *(row.table, row.place, row.model(), row.hardware(), row.whole("tensor_parallel"), stack),
        way="steps",
        prompt=row.whole("prompt_tokens"),
        output=row.whole("output_tokens"),
        at_once=row.whole("batch"),
        measured={"prompt": row.seconds("prompt_ms"), "token": row.seconds("token_ms")},
    )


def _llm_inference_bench(row: Reader, stack: str) -> Cell:
    """A static batch, with answers as long as the prompts."""
    length = row.whole("tokens_in_and_out")
    return Cell(
        *(row.table, row.place, row.model(), row.hardware(), row.whole("gpus"), stack),
        way="batch",
        prompt=length,
        output=length,
        at_once=row.whole("batch"),
        measured={"latency": row.seconds("latency_s", 1.0)},
    )


def _inferencemax(row: Reader, stack: str) -> Cell:
    """A closed loop."""
    precision = row.text("precision")
    if precision not in PRECISIONS:
        known = ", ".join(name for name in PRECISIONS if name)
        raise ConfigError(f"{row.place}: precision={precision}: must be empty or one of {known}")
    return Cell(
        *(row.table, row.place, row.model(PRECISIONS[precision]), row.hardware()),
        *(row.whole("tensor_parallel"), stack),
        way="loop",
        prompt=row.whole("input_tokens"),
        output=row.whole("output_tokens"),
        at_once=row.whole("concurrency"),
        measured={"ttft": row.seconds("ttft_ms"), "tpot": row.seconds("tpot_ms")},
    )


LAYOUTS: Mapping[str, Layout] = {
    "splitwise": Layout(
        "vllm-2023",
        (
            *("model", "gpu", "tensor_parallel", "prompt_tokens", "batch", "output_tokens"),
            *("prompt_ms", "token_ms"),
        ),
        _splitwise,
    ),
    "llm-inference-bench": Layout(
        "vllm-2024",
        ("gpu", "gpus", "model", "tokens_in_and_out", "batch", "latency_s"),
        _llm_inference_bench,
    ),
    "inferencemax": Layout(
        "vllm-2026",
        (
            *("model", "gpu", "precision", "input_tokens", "output_tokens", "concurrency"),
            *("tensor_parallel", "ttft_ms", "tpot_ms"),
        ),
        _inferencemax,
    ),
}


class Table(NamedTuple):
    """What a file holds."""

    name: str
    cells: Sequence[Cell]
    left_out: Mapping[str, int]
    """How many rows are of each of SHAPELESS."""


def read_table(path: str | Path, stack: str | None = None) -> Table:
    """All rows of a file; `stack` stands in the place of that of its time."""
    file = file_at(path, "study.tables")
    with readable(file), opened(file) as text:
        table = csv.DictReader(text)
        rows = [(f"{file}:{table.line_num}", row) for row in table]
        layout = _layout(file, table.fieldnames or ())
    if not rows:
        raise ConfigError(f"study.tables={path}: holds no rows")
    cells, left_out = [], Counter[str]()
    for place, row in rows:
        if None in row:
            raise ConfigError(f"{place}: has more fields than the header")
        reader = Reader(file.stem, place, row)
        if (model := reader.text("model")) in SHAPELESS:
            left_out[model] += 1
        else:
            cells.append(_cell(reader, layout, stack))
    if not cells:
        why = "; ".join(f"{model}: {SHAPELESS[model]}" for model in left_out)
        raise ConfigError(f"study.tables={path}: all of its rows are left out: {why}")
    return Table(file.stem, cells, left_out)


def _cell(row: Reader, layout: Layout, stack: str | None) -> Cell:
    try:
        cell = layout.cell(row, stack or layout.stack)
        _ = cell.replica  # which refuses a model that cannot be split so
    except ConfigError as error:
        place = "" if str(error).startswith(row.place) else f"{row.place}: "
        raise ConfigError(f"{place}{error}") from error
    if cell.way == "loop" and cell.output * SHORTEST < 2:
        raise ConfigError(f"{row.place}: output_tokens={cell.output}: must be at least 3")
    return cell


def _layout(file: Path, header: Sequence[str]) -> Layout:
    for layout in LAYOUTS.values():
        if set(layout.columns) <= set(header):
            return layout
    known = "; or ".join(", ".join(layout.columns) for layout in LAYOUTS.values())
    raise ConfigError(f"{file}: has the columns {', '.join(header):.200}: must have {known}")
