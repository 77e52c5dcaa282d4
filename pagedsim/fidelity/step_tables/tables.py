"""Rows of measured cases: from files of three benchmarks, from logs, and from published fits.

A file's layout is recognised by its header.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from pagedsim.core import ConfigError, Request, StepPlan
from pagedsim.core.plan import Chunk
from pagedsim.fidelity.logs.log import Log
from pagedsim.fidelity.rows import Row, read_rows
from pagedsim.fidelity.sheets import hardware_named, model_named, option_names, settings
from pagedsim.sim.cost import Fitted
from pagedsim.sim.hardware import Hardware
from pagedsim.sim.model import ModelShape
from pagedsim.sim.replica import Replica
from pagedsim.spec.objects import make

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
"""What was measured: steps (one of prompts, one of decodes); a batch of requests that arrive at
once; or a closed loop with a number of concurrent requests."""
SHORTEST = 0.8
"""Lengths in a closed loop are drawn from this share of the row's length up to all of it."""


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
    def server(self) -> str:
        """A description of the server."""
        products = self.model.products
        form = "" if products == "fp16" else f" {products}"
        return f"{self.model.name}{form} on {self.tensor_parallel} × {self.hardware.name}"

    def __str__(self) -> str:
        sizes = f"{self.prompt:,} in, {self.output:,} out, {self.at_once} at once"
        return f"{self.server}: {sizes}"


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


NO_SHEETS = {"cpu", "hf", "tiny"}
"""Files in conf/ that describe nothing that a table could name."""


class Layout(NamedTuple):
    """The columns of a benchmark's file, and what it measured."""

    stack: str
    """The server of its time, in conf/stack."""
    way: Way
    gpus: str
    prompt: str
    output: str
    at_once: str
    measured: Mapping[Metric, tuple[str, float]]
    """Columns, and their units in seconds."""
    precision: str | None = None

    @property
    def columns(self) -> list[str]:
        """The columns that are read, by which the layout is recognised."""
        sizes = self.gpus, self.prompt, self.at_once, self.output
        named = "model", "gpu", *sizes, *(column for column, _ in self.measured.values())
        return list(dict.fromkeys([*named, *([self.precision] if self.precision else [])]))


LAYOUTS = (
    # Splitwise: one step of prompts and one of tokens.
    Layout(
        "vllm-2023",
        "steps",
        *("tensor_parallel", "prompt_tokens", "output_tokens", "batch"),
        {"prompt": ("prompt_ms", 1e-3), "token": ("token_ms", 1e-3)},
    ),
    # LLM-Inference-Bench: a static batch, with answers as long as the prompts.
    Layout(
        "vllm-2024",
        "batch",
        *("gpus", "tokens_in_and_out", "tokens_in_and_out", "batch"),
        {"latency": ("latency_s", 1.0)},
    ),
    # InferenceMAX: a closed loop.
    Layout(
        "vllm-2026",
        "loop",
        *("tensor_parallel", "input_tokens", "output_tokens", "concurrency"),
        {"ttft": ("ttft_ms", 1e-3), "tpot": ("tpot_ms", 1e-3)},
        precision="precision",
    ),
)


class Table(NamedTuple):
    """The rows of a file."""

    name: str
    cells: Sequence[Cell]
    left_out: Mapping[str, int]
    """How many rows are of each of SHAPELESS."""


def read_table(path: str | Path, stack: str | None = None) -> Table:
    """Read all rows of a file; `stack` replaces the stack of its time."""
    rows, name = read_rows(path, "study.tables"), Path(path).stem
    header = rows[0].values
    layout = next((candidate for candidate in LAYOUTS if {*candidate.columns} <= {*header}), None)
    if layout is None:
        known = "; or ".join(", ".join(layout.columns) for layout in LAYOUTS)
        raise ConfigError(f"{path}: has the columns {', '.join(header):.200}: must have {known}")
    cells, left_out = [], Counter[str]()
    for row in rows:
        if (model := row.text("model")) in SHAPELESS:
            left_out[model] += 1
        else:
            cells.append(_cell(name, row, layout, stack or layout.stack))
    if not cells:
        why = "; ".join(f"{model}: {SHAPELESS[model]}" for model in left_out)
        raise ConfigError(f"study.tables={path}: all of its rows are left out: {why}")
    return Table(name, cells, left_out)


def _cell(table: str, row: Row, layout: Layout, stack: str) -> Cell:
    def whole(column: str, low: int = 1) -> int:
        return int(row.number(column, f"a whole number from {low}", low=low, whole=True))

    cell = Cell(
        table,
        row.place,
        _model(row, layout.precision),
        hardware_named(_name(row, "gpu", "hardware", GPUS)),
        whole(layout.gpus),
        stack,
        layout.way,
        whole(layout.prompt),
        # A loop's shortest answers must have two tokens.
        whole(layout.output, ceil(2 / SHORTEST) if layout.way == "loop" else 1),
        whole(layout.at_once),
        {
            metric: unit * row.number(column, "a time above 0", above=0)
            for metric, (column, unit) in layout.measured.items()
        },
    )
    try:
        _ = cell.replica  # which refuses a model that cannot be split so
    except ConfigError as error:
        raise ConfigError(f"{row.place}: {error}") from error
    return cell


def _model(row: Row, column: str | None) -> ModelShape:
    """The model of conf/model; `column` has the number format of weights and products."""
    shape = model_named(_name(row, "model", "model", ALIASES))
    precision = "" if column is None else row.text(column)
    if precision not in PRECISIONS:
        known = ", ".join(name for name in PRECISIONS if name)
        raise row.wrong(str(column), f"empty or one of {known}")
    products = PRECISIONS[precision]
    return shape if products == "fp16" else replace(shape, dtype_bytes=1.0, products=products)


def _name(row: Row, column: str, group: str, aliases: Mapping[str, str]) -> str:
    """The name of a file in a group of conf/, from that or from one that benchmarks use."""
    text = row.text(column)
    name, known = aliases.get(text, text), option_names(group)
    if name not in known:
        choices = ", ".join(sorted({*aliases, *known} - NO_SHEETS))
        raise ConfigError(f"{row.place}: {column}={text}: unknown; choose from {choices}")
    return name


# -- requests of a log that were alone -------------------------------------------------------------

COLD_REQUESTS = 2
"""Requests at the beginning of a log that may still have waited for the server to warm up."""


def alone(
    log: Log, table: str, model: ModelShape, hardware: Hardware, stack: str
) -> Iterator[Cell]:
    """Rows from requests that were alone in the server from arrival to finish.

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
"""Output tokens; the measured decode step is the one in the middle."""
STEP_TOKENS = 4096
"""Most prompt tokens of a step; no source says that larger ones were measured."""


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
