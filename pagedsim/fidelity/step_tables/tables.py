"""Rows of measured cases: from files of three benchmarks, from logs, and from published fits.

A file's layout is recognised by its header.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from math import ceil
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from pagedsim.core import ConfigError, Request, StepPlan
from pagedsim.core.plan import Chunk
from pagedsim.fidelity.logs.log import Log
from pagedsim.fidelity.rows import Row, read_rows
from pagedsim.fidelity.sheets import hardware_named, model_named, option_names, settings
from pagedsim.fidelity.step_tables.protocol import COLUMNS, Protocol, stack_of
from pagedsim.sim.cost import Fitted
from pagedsim.sim.hardware import FP16, Hardware
from pagedsim.sim.huggingface import read_shape
from pagedsim.sim.model import ModelShape
from pagedsim.sim.replica import Replica
from pagedsim.spec.objects import make

Metric = Literal["prompt", "token", "latency", "ttft", "tpot", "e2e"]
METRICS: Mapping[Metric, str] = {
    "prompt": "prompt step",
    "token": "token step",
    "latency": "batch",
    "ttft": "TTFT",
    "tpot": "TPOT",
    "e2e": "E2E",
}
"""What each is called on a page."""
Way = Literal["steps", "batch", "loop"]
"""What was measured: steps (one of prompts, one of decodes); a batch of requests that arrive at
once; or a closed loop with a number of concurrent requests."""


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
    protocol: Protocol | None = None
    """Of a closed loop."""
    held_out: bool = False
    """Whether no constant may be fitted to it."""
    name: str = ""
    """What its benchmark calls the row."""
    backend: str = "vllm"

    @property
    def replica(self) -> Replica:
        cache = "auto" if self.protocol is None else self.protocol.kv_cache_dtype
        return Replica(self.model, self.hardware, self.tensor_parallel, kv_cache_dtype=cache)

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
    "meta-llama/Llama-3.1-70B": "llama-3.1-70b",
    "meta-llama/Llama-3.1-8B-Instruct": "llama-3.1-8b",
    "nvidia/Llama-3.1-8B-Instruct-FP8": "llama-3.1-8b",
    "Qwen/Qwen3-32B": "qwen3-32b",
    "Qwen/Qwen3-235B-A22B-FP8": "qwen3-235b-a22b",
    "deepseek-ai/DeepSeek-R1": "deepseek-v3",
    "deepseek-ai/DeepSeek-V3": "deepseek-v3",
    "meta-llama/Llama-3.3-70B-Instruct": "llama-3.1-70b",
}
"""Models as tables call them; Llama 3 and 3.3 have the shape of Llama 3.1, DeepSeek-R1 that of
V3."""
GPUS = {
    "Nvidia A100 GPU": "a100-40gb",
    "Nvidia H100 GPU": "h100",
    "Nvidia GH200 GPU": "gh200",
    "AMD MI300X GPU": "mi300x",
    "h100-80gb": "h100",
    "h100_sxm": "h100",
    "h200_sxm": "h200",
    "b200_sxm": "b200",
    "NVIDIA A100-SXM4-80GB": "a100-80gb",
    "NVIDIA H100 80GB HBM3": "h100",
    "NVIDIA H200": "h200",
    "NVIDIA B200": "b200",
    "AMD Instinct MI300X": "mi300x",
    "AMD Instinct MI300X OAM": "mi300x",
}
"""GPUs likewise, also as PyTorch calls them. LLM-Inference-Bench's A100 has 40 GB;
experiments/data/README.md says why."""
PRECISIONS = {
    **dict.fromkeys(("", "bf16", "fp16"), ("fp16", 2.0)),
    "fp8": ("fp8", 1.0),
    "fp4": ("fp4", 0.5625),  # NVFP4: each 16 numbers of 4 bits share a scale of 8
}
"""What products with weights are computed in, as tables call it, and the bytes of a weight."""
SHAPELESS = {"Deci/DeciLM-7B": "its layers differ in their numbers of heads"}
"""Models that no dozen numbers describe, and why; their rows are left out."""

_VARIANT = re.compile(r"(-(instruct|chat|hf|bf16|fp8|fp4|nvfp4|kv|dynamic))+$")
"""What checkpoints of one shape differ in, at the end of their names."""
NO_SHEETS = {"cpu", "hf", "tiny"}
"""Files in conf/ that describe nothing that a table could name."""


class Layout(NamedTuple):
    """The columns of a benchmark's file, and what it measured."""

    stack: str
    """The server of its time, in conf/stack; empty: rows name their servers, with a protocol."""
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
        "vllm-0.2",
        "steps",
        *("tensor_parallel", "prompt_tokens", "output_tokens", "batch"),
        {"prompt": ("prompt_ms", 1e-3), "token": ("token_ms", 1e-3)},
    ),
    # LLM-Inference-Bench: a static batch, with answers as long as the prompts.
    Layout(
        "vllm-0.6",
        "batch",
        *("gpus", "tokens_in_and_out", "tokens_in_and_out", "batch"),
        {"latency": ("latency_s", 1.0)},
    ),
    # AIConfigurator's samples, vllm bench serve: a closed loop.
    Layout(
        "",
        "loop",
        *("tensor_parallel", "input_tokens", "output_tokens", "concurrency"),
        {"ttft": ("ttft_ms", 1e-3), "tpot": ("tpot_ms", 1e-3)},
        precision="precision",
    ),
    # vllm bench latency and throughput: all of such a loop, from the first arrival to the last end.
    Layout(
        "",
        "loop",
        *("tensor_parallel", "input_tokens", "output_tokens", "concurrency"),
        {"latency": ("latency_s", 1.0)},
        precision="precision",
    ),
)


class Table(NamedTuple):
    """The rows of a file."""

    name: str
    cells: Sequence[Cell]
    left_out: Mapping[str, int]
    """How many rows are of each of SHAPELESS."""


def read_table(path: str | Path, stack: str | None = None, server: Sequence[str] = ()) -> Table:
    """Read all rows of a file; `stack` replaces the stack of its time, and `server` are the words
    of a server where rows name none."""
    rows, name = read_rows(path, "study.tables"), Path(path).stem
    layout = _layout(path, rows[0].values)
    servers = [*server, *(row.text("server") for row in rows if row.text("server"))]
    if servers and layout.way != "loop":
        raise ConfigError(
            f"{servers[0]}: rows of {path} are no closed loops, and have no server's protocol; "
            "study.stack= is their stack"
        )
    cells, left_out = [], Counter[str]()
    for row in rows:
        if (model := row.text("model")) in SHAPELESS:
            left_out[model] += 1
        else:
            cells.append(cell_of(name, row, layout, stack, server))
    if not cells:
        why = "; ".join(f"{model}: {SHAPELESS[model]}" for model in left_out)
        raise ConfigError(f"study.tables={path}: all of its rows are left out: {why}")
    return Table(name, cells, left_out)


def _layout(path: str | Path, header: Collection[str]) -> Layout:
    layout = next((candidate for candidate in LAYOUTS if {*candidate.columns} <= {*header}), None)
    if layout is None:
        known = "; or ".join(", ".join(layout.columns) for layout in LAYOUTS)
        raise ConfigError(f"{path}: has the columns {', '.join(header):.200}: must have {known}")
    if layout.way == "loop" and (lacking := [name for name in COLUMNS if name not in header]):
        meanings = "; ".join(f"{name}: {COLUMNS[name]}" for name in lacking)
        raise ConfigError(
            f"{path}: has no column {', '.join(lacking)}: a closed loop needs its protocol "
            f"({meanings})"
        )
    return layout


def cell_of(table: str, row: Row, layout: Layout, stack: str | None, server: Sequence[str]) -> Cell:
    """A row, with the server of the words `server` if it names none."""

    def whole(column: str, low: int = 1) -> int:
        return int(row.number(column, f"a whole number from {low}", low=low, whole=True))

    gpu = _name(row, "gpu", "hardware", GPUS)
    if row.text("request_rate") not in ("", "inf"):
        raise row.wrong("request_rate", "empty or inf: other loads are held against logs")
    protocol = Protocol.of(row, server) if layout.way == "loop" else None
    if stack is None and protocol is not None:
        stack = _stack(row, protocol, gpu)
    elif stack is None:
        of_amd = f"{layout.stack}-rocm" if gpu.startswith("mi") else ""
        stack = of_amd if of_amd in option_names("stack") else layout.stack
    model = _model(row, layout.precision)
    cell = Cell(
        table,
        row.place,
        model,
        hardware_named(gpu),
        whole(layout.gpus),
        stack,
        layout.way,
        whole(layout.prompt),
        # A loop's shortest answers must have two tokens.
        whole(layout.output, 1 if protocol is None else ceil(2 / protocol.shortest)),
        whole(layout.at_once),
        _measured(row, layout),
        protocol,
        held_out(row) or (protocol is not None and model.moe is not None),
        row.text("id"),
        row.text("backend") or "vllm",
    )
    try:
        _ = cell.replica  # which refuses a model that cannot be split so
    except ConfigError as error:
        raise ConfigError(f"{row.place}: {error}") from error
    return cell


def _measured(row: Row, layout: Layout) -> dict[Metric, float]:
    """The times of a row; E2E of a loop is that of a request as long as the row says."""
    measured: dict[Metric, float] = {
        metric: unit * row.number(column, "a time above 0", above=0)
        for metric, (column, unit) in layout.measured.items()
    }
    if "ttft" in measured:
        tokens = row.number(layout.output) - 1
        measured["e2e"] = measured["ttft"] + tokens * measured["tpot"]
    return measured


def _stack(row: Row, protocol: Protocol, gpu: str) -> str:
    try:
        return stack_of(protocol.server, gpu)
    except ConfigError as error:
        raise ConfigError(f"{row.place}: {error}") from error


def held_out(row: Row) -> bool:
    """Whether no constant may be fitted to a row: a quarter of all servers, by a hash of what the
    row calls its model, GPU, server and version. None is fitted to closed loops of experts."""
    names = (row.text(column) for column in ("model", "gpu", "backend", "version"))
    return sha256("|".join(names).encode()).digest()[0] % 4 == 0


def _model(row: Row, column: str | None) -> ModelShape:
    """The model of conf/model, or of a config.json; `column` has the number format of weights and
    products."""
    shape = _shape(row)
    precision = "" if column is None else row.text(column).lower()
    if precision not in PRECISIONS:
        known = ", ".join(name for name in PRECISIONS if name)
        raise row.wrong(str(column), f"empty or one of {known}")
    called = re.search("fp[48]", row.text("model").lower())
    if column is not None and called and precision != called[0]:
        raise row.wrong(column, f"{called[0]}, as model={row.text('model')} says")
    products, size = PRECISIONS[precision]
    return shape if products == FP16 else replace(shape, dtype_bytes=size, products=products)


def _shape(row: Row) -> ModelShape:
    path = Path(text := row.text("model"))
    if not (path.is_file() or (text and (path / "config.json").is_file())):
        return model_named(_name(row, "model", "model", ALIASES, ", or the path of a config.json"))
    try:
        return read_shape(path)
    except ConfigError as error:
        raise ConfigError(f"{row.place}: model={text}: {error}") from error


def _name(row: Row, column: str, group: str, aliases: Mapping[str, str], else_: str = "") -> str:
    """The name of a file in a group of conf/, from that or from one that benchmarks use."""
    text, known = row.text(column), option_names(group)
    plain = text.rpartition("/")[2].lower().removeprefix("meta-")
    name = aliases.get(text, text if text in known else _VARIANT.sub("", plain))
    if name not in known:
        choices = ", ".join(sorted({*aliases, *known} - NO_SHEETS))
        raise ConfigError(f"{row.place}: {column}={text}: unknown; choose from {choices}{else_}")
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
