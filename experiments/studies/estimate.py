"""Estimate of capacity, step times and bottlenecks from data sheets, without a run."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from pagedsim.backends.sim import Simulated
from pagedsim.core import ConfigError
from pagedsim.core.errors import require_whole
from pagedsim.core.memory.reserved import ReservedMemory
from pagedsim.experiments.studies.estimate_arithmetic import MOST, Case, data_of
from pagedsim.metrics.result import Listing, Row
from pagedsim.report.figures import FigureSpec
from pagedsim.report.labels import Label, Point, place
from pagedsim.report.numbers import binary, decimal, number, percent
from pagedsim.report.style import GRID, MUTED, key, looks, margins, new_figure, short, tidy
from pagedsim.run.job import Arm
from pagedsim.run.parts import refuse_fleet
from pagedsim.run.runs import Runs
from pagedsim.run.study import Analysis, Study
from pagedsim.sim.cost import Measured, Roofline
from pagedsim.sim.cost.base import milliseconds
from pagedsim.spec.run import RunSpec, memory_target

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


PROMPT = 1024


@dataclass(frozen=True, kw_only=True)
class Estimate(Study):
    """Arithmetic on the model's shape and the GPU's data sheet, without a run."""

    asks = False
    backends = ("sim",)
    why = "an estimate runs nothing"

    title: str
    question: str
    prompt: int | None = None
    batch: int | None = None
    output: int = 256

    def __post_init__(self) -> None:
        for name in ("prompt", "batch", "output"):
            if getattr(self, name) is not None:
                require_whole(name, getattr(self, name), 1)

    def next_runs(self, runs: Runs) -> Sequence[Arm]:
        self.case(runs)  # raises ConfigError early
        return ()

    def analyse(self, runs: Runs) -> Analysis:
        case = self.case(runs)
        data = data_of(case)
        caption = (
            "Each product of a prefill and of decodes: how much it computes for each byte that it "
            "reads, and the rate that it reaches by that. Dashed: the parts of the data sheet's "
            "rates that kernels are taken to reach."
        )
        return Analysis(
            finding=list(finding(data)),
            rows=rows(data),
            listings=listings(data),
            notes=list(notes(case)),
            data=data,
            table=[
                {"step": step, **product}
                for step, products in data["products"].items()
                for product in products
            ],
            drawings={"roofline": FigureSpec("Roofline", caption, partial(draw_roofline, data))},
        )

    def case(self, runs: Runs) -> Case:
        """The server and the request sizes; raises ConfigError if nothing can be estimated."""
        config = runs.config
        run_config = RunSpec(dict(config))
        refuse_fleet(run_config, "an estimate is of one server")
        backend = run_config.backend
        assert isinstance(backend, Simulated)
        stage = backend.simulation(run_config)
        if not isinstance(stage.cost, Roofline | Measured):
            raise ConfigError(
                f"cost._target_={config['cost']['_target_']}: does not know what binds a step; "
                "an estimate takes cost=roofline or cost=measured"
            )
        if isinstance(stage.scheduler.memory, ReservedMemory):
            raise ConfigError(
                f"memory={memory_target(config['memory'])}: must be paged, prefix or radix; how "
                "many contexts reservations hold depends on what they are reserved for"
            )
        longest = stage.scheduler.max_model_len
        if self.prompt is not None and self.prompt > longest:
            raise ConfigError(
                f"prompt={self.prompt}: must be at most {longest:,}, the longest context that "
                f"model={stage.replica.model.name} and the memory of hardware="
                f"{stage.replica.hardware.name} hold"
            )
        prompt = self.prompt or min(PROMPT, longest)
        return Case(
            cost=stage.cost,
            power=backend.power,
            scheduler=stage.scheduler,
            server=stage.server,
            memory=config["memory"],
            prompt=prompt,
            batch=self.batch,
            output=max(1, min(self.output, longest - prompt)),
            wanted=self.output,
        )


Data = Mapping[str, Any]


def finding(data: Data) -> Iterator[str]:
    """The main results as sentences."""
    memory, steps = data["memory"], data["steps"]
    prefill, single, full = (steps[name] for name in ("prefill", "decode_one", "decode_full"))
    prompt, longest = data["prompt"], memory["max_model_len"]
    held = f"{memory['contexts_of_prompt']:,} contexts of {prompt:,} tokens"
    if longest != prompt:
        held += f", or {memory['contexts_of_max_model_len']:,} of {longest:,}"
    yield (
        f"{data['model']} on {_gpus(data)}: {memory['blocks']:,} blocks of "
        f"{memory['block_size']} tokens hold {held}."
    )
    yield (
        f"A prompt of {prompt:,} tokens takes {milliseconds(prefill['seconds'])}, bound by "
        f"{_binds(prefill)}. A decode takes {milliseconds(single['seconds'])} for one sequence, "
        f"bound by {_binds(single)}, and {milliseconds(full['seconds'])} for "
        f"{data['batches']['full']:,}, bound by {_binds(full)}: {single['tokens_per_s']:,.0f} and "
        f"{full['tokens_per_s']:,.0f} tokens/s."
    )
    size, bound = data["bounds"]["products_compute_from"], "bound by bandwidth"
    bound += (
        f", up to {MOST:,} sequences" if size is None else f", from {size:,} sequences by compute"
    )
    yield f"Products of decodes with weights are {'bound by compute' if size == 1 else bound}."
    asked = data["batches"].get("batch", data["batches"]["full"])
    many = steps["decode_batch" if "batch" in data["batches"] else "decode_full"]
    if single["watts"] is not None:
        yield (
            f"Power of {_gpus(data)}: about {prefill['watts']:,.0f} W in the prefill and "
            f"{many['watts']:,.0f} W in a decode for {asked:,}, which gives "
            f"{number(many['tokens_per_joule'])} tokens per joule, against "
            f"{number(single['tokens_per_joule'])} for one sequence."
        )
    if (euros := data["euros_per_hour"]) is not None:
        yield (
            f"An hour of {_gpus(data)} costs {euros:,.2f} €: "
            f"{many['tokens_per_euro'] / 1e6:,.2f} million tokens per euro in a decode for "
            f"{asked:,}, against {single['tokens_per_euro'] / 1e6:,.2f} for one sequence."
        )
    if data["output"] > 1:
        kept, again = (data["kv_cache"][key] for key in ("with", "without"))
        yield (
            f"Without a KV cache an answer of {data['output']:,} tokens would take "
            f"{again['flop'] / kept['flop']:,.0f} times the FLOP, and "
            f"{again['seconds'] / kept['seconds']:,.1f} times as long."
        )


def rows(data: Data) -> list[Row]:
    """The main numbers."""
    memory = data["memory"]
    contexts = {
        data["prompt"]: memory["contexts_of_prompt"],
        memory["max_model_len"]: memory["contexts_of_max_model_len"],
    }
    return [
        Row("keys and values of a token", memory["kv_bytes_per_token"], unit="B"),
        Row("weights", sum(memory["weights"].values()) / 1e9, unit="GB"),
        Row("blocks", memory["blocks"]),
        *(Row(f"contexts of {tokens:,} tokens", held) for tokens, held in contexts.items()),
        *(
            Row(_named(name, data), 1e3 * step["seconds"], unit="ms")
            for name, step in data["steps"].items()
        ),
    ]


def listings(data: Data) -> list[Listing]:
    """The tables."""
    last = list(data["steps"])[-1]
    shown = "decode_batch" if "decode_batch" in data["steps"] else last
    return [
        _memory(data["memory"]),
        _steps(data),
        _terms(data),
        _bounds(data),
        _product_table(data, "prefill"),
        _product_table(data, shown),
        _rates(data),
        Listing(
            f"An answer of {data['output']:,} tokens, with and without a KV cache",
            ["", "FLOP", "time"],
            [
                [name, decimal(cost["flop"], "FLOP"), milliseconds(cost["seconds"])]
                for name, cost in data["kv_cache"].items()
            ],
        ),
    ]


def notes(case: Case) -> Iterator[str]:
    """Notes of the report."""
    which = "times" if case.cost is case.roofline else "times of single products"
    yield f"{which} are by the efficiencies of cost=roofline; MFU and MBU are of the data sheet"
    yield from case.cost.notices
    hardware, server = case.replica.hardware, case.server
    if case.power is not None and hardware.tdp_w is None:
        yield f"hardware={hardware.name} has no tdp_w, without which there are no watts"
    if hardware.price_per_hour is None:
        yield f"hardware={hardware.name} has no price_per_hour, without which there is no cost"
    seats = f"server.max_seqs={server.max_seqs}"
    if server.groups > 1:
        seats += f" in each of {server.groups} groups"
    if case.batch is not None and case.batch > case.full:
        held = f"memory holds {case.fitting:,} contexts of {case.prompt:,} tokens"
        why = held if case.batch > case.fitting else seats
        yield f"batch={case.batch} does not fit: {why}"
    if case.full < case.fitting:
        yield f"the full batch is {seats}"
    if case.prompt > (most := case.step_tokens):
        yield (
            f"a step computes at most {most:,} tokens, so the prompt, "
            "which is taken as one step here, would be computed in several"
        )
    if case.output < case.wanted:
        yield f"an answer is cut to the {case.output:,} tokens that a context has left"


def _memory(memory: Data) -> Listing:
    def part(name: str, value: float) -> list[str]:
        return [name, binary(value)]

    def parts(name: str, of: Mapping[str, float]) -> Iterator[list[str]]:
        yield part(name, sum(of.values()))
        yield from (part(f"  {key}", value) for key, value in of.items())

    share = f"of {binary(memory['memory_bytes'])} at {memory['gpu_memory_utilization']:g}"
    step = f"{memory['max_batched_tokens']:,} tokens, {memory['max_seqs']:,} sequences"
    table = [
        part(f"usable ({share})", memory["usable_bytes"]),
        *parts("weights", memory["weights"]),
        *parts(f"activations of a step ({step})", memory["activations"]),
        part("reserved", memory["reserved_bytes"]),
        part("left for keys and values", memory["left_bytes"]),
        part("keys and values of a token", memory["kv_bytes_per_token"]),
        part(f"a block of {memory['block_size']} tokens", memory["block_bytes"]),
    ]
    return Listing("Memory of a GPU", ["", "bytes"], table)


def _steps(data: Data) -> Listing:
    head = ["", "time", "bound by", "FLOP", "bytes", "MFU", "MBU", "tokens/s"]
    table = [
        [
            _named(name, data),
            milliseconds(step["seconds"]),
            step["bound"],
            decimal(step["flop"], ""),
            decimal(step["bytes"], ""),
            percent(step["mfu"], 1),
            percent(step["mbu"], 1),
            f"{step['tokens_per_s']:,.0f}",
        ]
        for name, step in data["steps"].items()
    ]
    return Listing("Steps (FLOP, bytes, MFU and MBU of a GPU)", head, table)


def _terms(data: Data) -> Listing:
    steps = data["steps"]
    times = {
        name: {term["name"]: term["seconds"] for term in step["terms"]}
        for name, step in steps.items()
    }
    names = dict.fromkeys(term for terms in times.values() for term in terms)
    table = [
        [term, *(milliseconds(terms[term]) if term in terms else "–" for terms in times.values())]
        for term in names
    ]
    return Listing("Where the time goes", ["", *(_named(name, data) for name in steps)], table)


def _bounds(data: Data) -> Listing:
    table = [
        [what, f"{change['from']:,}", change["bound"], change["term"]]
        for kind, what in (("prefill", "tokens of a prompt"), ("decode", "sequences that decode"))
        for change in data["bounds"][kind]
    ]
    title = f"What binds a step, up to {MOST:,} (contexts of {data['prompt']:,} tokens)"
    return Listing(title, ["", "from", "bound by", "longest part"], table)


def _product_table(data: Data, name: str) -> Listing:
    many = data["gpus"]
    of = "" if many == 1 else f"; shapes of the whole, all else of one of {many} GPUs"
    table = [
        [
            product["name"],
            "–"
            if product["inputs"] is None
            else "×".join(number(product[key]) for key in ("rows", "inputs", "outputs")),
            number(product["times"]),
            decimal(product["flop"], ""),
            decimal(product["bytes"], ""),
            number(1e3 * product["computing_s"]),
            number(1e3 * product["reading_s"]),
            product["bound"],
        ]
        for product in data["products"][name]
    ]
    head = ["", "shape", "count", "FLOP", "bytes", "compute", "read", "bound by"]
    return Listing(f"Products: {_named(name, data)} (times in ms{of})", head, table)


def _rates(data: Data) -> Listing:
    """Rates by number format, and the time of the products with weights at each."""
    peak, reached = data["peak"], data["reached"]
    efficiency = reached["flop_rate"] / peak["flop_rates"]["fp16"]
    flop = sum(p["flop"] for p in data["products"]["prefill"] if not p["attention"])
    table = [
        [
            name,
            decimal(rate, "FLOP/s"),
            f"{rate / peak['bandwidth']:,.0f}",
            milliseconds(flop / (rate * efficiency)),
        ]
        for name, rate in peak["flop_rates"].items()
    ]
    head = ["", "data sheet", "FLOP a byte to compute", "prefill's products with weights"]
    return Listing("Rates by the format of what is multiplied", head, table)


def _named(name: str, data: Data) -> str:
    if name == "prefill":
        return f"prefill, {data['prompt']:,}"
    return f"decode, {data['batches'][name.removeprefix('decode_')]:,}"


def _binds(step: Data) -> str:
    """Such as "bandwidth (weights)"."""
    bound, term = step["bound"], step["term"]
    return bound if term == bound else f"{bound} ({term})"


def _gpus(data: Data) -> str:
    many = data["gpus"]
    return data["hardware"] if many == 1 else f"{many} × {data['hardware']}"


# -- figure ----------------------------------------------------------------------------------------

_MARKERS = "os^D"
_MARGIN = 2.0
_PLAIN = ("fp16", "reached")
"""The roofs that the cost model uses."""


def draw_roofline(data: Mapping[str, Any]) -> Figure:
    """FLOP/s over FLOP per byte: the roofs, each step's products, and, filled, the step itself."""
    from matplotlib.lines import Line2D

    products = {
        name: [(p["name"], _point(p, max(p["computing_s"], p["reading_s"]))) for p in of_step]
        for name, of_step in data["products"].items()
    }
    whole = {name: _point(step, step["seconds"]) for name, step in data["steps"].items()}
    points = [*whole.values(), *(point for of_step in products.values() for _, point in of_step)]
    figure = new_figure(4.6)
    axes = figure.subplots()
    margins(figure, left=0.75)
    roof = _draw_roofs(axes, data, [x for x, _ in points if math.isfinite(x)])
    axes.set_ylim(bottom=min(y for _, y in points) / _MARGIN**2)
    look, entries = looks(list(products)), {}
    near: dict[Point, dict[str, None]] = {}
    for (name, of_step), marker in zip(products.items(), _MARKERS, strict=False):
        colour = look[name].colour
        for product, (x, y) in of_step:
            at = min(x, roof[-1][0] / 1.2), y  # infinite intensity is drawn at the edge
            axes.plot(*at, marker, ms=6, color=colour, mfc="none", mew=1.4)
            near.setdefault((float(f"{at[0]:.2g}"), float(f"{y:.2g}")), {})[product] = None
        axes.plot(*whole[name], marker, ms=8, color=colour)
        label = _named(name, data)
        entries[label] = Line2D([], [], ls="", marker=marker, color=colour, label=label)
    style = {"fontsize": 7, "color": MUTED}
    labels = [Label(short(", ".join(names), 40), at, style) for at, names in near.items()]
    place(axes, [*labels, *(Label("", at, style) for at in whole.values())], roof)
    tidy(axes, x="FLOP for each byte that is read", y="FLOP/s of a GPU")
    key(figure, entries)
    return figure


def _draw_roofs(axes: Axes, data: Mapping[str, Any], shown: list[float]) -> list[Point]:
    """Draw the data sheet's roofs and, dashed, the attainable one, which is returned."""
    peak, reached = data["peak"], data["reached"]
    ridge = max(peak["flop_rates"].values()) / peak["bandwidth"]
    left, right = min(shown) / _MARGIN, max(ridge, *shown) * _MARGIN**2
    formats: dict[float, list[str]] = {}
    for name, rate in peak["flop_rates"].items():
        formats.setdefault(rate, []).append(name)
    roofs = [(peak["bandwidth"], rate, "-", ", ".join(names)) for rate, names in formats.items()]
    roofs.append((reached["bandwidth"], reached["flop_rate"], "--", "reached"))
    for bandwidth, rate, dashes, name in roofs:
        xs, ys = [left, rate / bandwidth, right], [left * bandwidth, rate, rate]
        axes.plot(xs, ys, dashes, color=MUTED if name in _PLAIN else GRID, lw=1.2, zorder=1)
        style: Any = {"textcoords": "offset points", "ha": "right", "fontsize": 8, "color": MUTED}
        axes.annotate(name, (right, rate), (-2, 3), **style)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(left, right)
    return list(zip(xs, ys, strict=True))


def _point(work: Mapping[str, Any], seconds: float) -> Point:
    """FLOP per byte, infinite if nothing is read, and FLOP/s."""
    return work["flop"] / work["bytes"] if work["bytes"] else math.inf, work["flop"] / seconds
