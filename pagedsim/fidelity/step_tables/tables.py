"""Rows of measured cases: from files of three benchmarks, from logs, and from published fits.

The header of a file tells its layout.
"""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from pagedsim.core import ConfigError, Request, StepPlan
from pagedsim.core.plan import Chunk
from pagedsim.fidelity.logs.log import Log
from pagedsim.fidelity.sheets import hardware_named, model_named, settings, there
from pagedsim.run.objects import make
from pagedsim.sim.cost import Fitted
from pagedsim.sim.hardware import Hardware
from pagedsim.sim.model import ModelShape
from pagedsim.sim.replica import Replica
from pagedsim.workload.traces.rows import file_at, opened, readable

Metric = Literal["prompt", "token", "latency", "ttft", "tpot"]
METRICS: Mapping[Metric, str] = {
    "prompt": "prompt step",
    "token": "token step",
    "latency": "batch",
    "ttft": "TTFT",
    "tpot": "TPOT",
}
"""What each is called on a page."""
Way = Literal["steps", "batch", "loop"]
"""How it was measured: a step of prompts and one of tokens; requests that all come at once; as many
requests at a time, each followed by another."""
SHORTEST = 0.8
"""Lengths of such a loop are drawn from this share of what its row says up to all of it."""


@dataclass(frozen=True)
class Cell:
    """Requests of one size on one server, all times in seconds."""

    table: str
    place: str
    """The file, and the line in it."""
    model: ModelShape
    hardware: Hardware
    tensor_parallel: int
    stack: str
    way: Way
    prompt: int
    output: int
    at_once: int
    measured: Mapping[Metric, float]

    @property
    def replica(self) -> Replica:
        return Replica(self.model, self.hardware, self.tensor_parallel)

    @property
    def precision(self) -> str:
        """What its products are computed in."""
        return self.model.products

    def __str__(self) -> str:
        gpus = f"{self.tensor_parallel} × {self.hardware.name}"
        form = "" if self.precision == "fp16" else f" {self.precision}"
        sizes = f"{self.prompt:,} in, {self.output:,} out, {self.at_once} at once"
        return f"{self.model.name}{form} on {gpus}: {sizes}"


# -- files -----------------------------------------------------------------------------------------

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
        header = table.fieldnames or ()
    layout = next((one for one in LAYOUTS.values() if set(one.columns) <= set(header)), None)
    if layout is None:
        known = "; or ".join(", ".join(one.columns) for one in LAYOUTS.values())
        raise ConfigError(f"{file}: has the columns {', '.join(header):.200}: must have {known}")
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


# -- requests of a log that were alone -------------------------------------------------------------

COLD_REQUESTS = 2
"""Requests at the beginning of a log that may still have waited for the server to warm up."""


def alone(
    log: Log, table: str, model: ModelShape, hardware: Hardware, stack: str
) -> Iterator[Cell]:
    """Rows of requests that were alone from arrival to finish.

    What lies between their first and their last token are steps of one sequence each.
    """
    ends = log.arrived + log.latencies.e2e
    before = np.concatenate([[0.0], np.maximum.accumulate(ends)[:-1]])
    after = np.concatenate([log.arrived[1:], [np.inf]])
    for row in np.flatnonzero((log.arrived >= before) & (ends <= after)).tolist():
        if row < COLD_REQUESTS or log.output[row] < 2:
            continue
        ttft, tpot = float(log.latencies.ttft[row]), float(log.latencies.tpot[row])
        yield Cell(
            *(table, log.places[row], model, hardware, 1, stack),
            way="steps",
            prompt=int(log.prompt[row]),
            output=int(log.output[row]),
            at_once=1,
            measured={"ttft": ttft, "token": tpot},
        )


# -- published fits --------------------------------------------------------------------------------

LENGTHS = (128, 256, 512, 1024)
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
ANSWER = 128
"""Tokens: the step of decodes is the one in the middle."""
STEP_TOKENS = 4096
"""Prompts of a step have so many tokens at most; nothing says that more were measured."""


def grid(table: str, name: str, stack: str) -> Iterator[Cell]:
    """Rows of the fit in conf/cost of that name."""
    words: Mapping[str, Any] = settings("cost", name)
    fitted_for = words["fitted_for"]
    model, hardware = model_named(fitted_for["model"]), hardware_named(fitted_for["hardware"])
    replica = Replica(model, hardware, fitted_for["tensor_parallel"])
    cost = make("cost", words, Fitted, replica=replica)
    for length in LENGTHS:
        for count in BATCHES:
            context = count * (length + ANSWER // 2)
            measured: dict[Metric, float] = {"token": cost.decode_seconds(count, context)}
            if count * length <= STEP_TOKENS:
                plan = StepPlan(0, 0.0)
                for number in range(count):
                    chunk = Chunk(Request(number, length), 0, length, samples=True)
                    plan.add_chunk(chunk)
                measured = {"prompt": cost.step_seconds(plan), **measured}
            yield Cell(
                *(table, f"cost={name}", model, hardware, replica.tensor_parallel, stack),
                *("steps", length, ANSWER, count, measured),
            )
