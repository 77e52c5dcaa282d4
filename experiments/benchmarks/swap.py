"""Swapping blocks out and in by block size and layout, against one copy of pinned memory.

    python -m experiments.benchmarks.swap [--kv-cache-dtype fp8_e4m3]
    python -m experiments.benchmarks.swap --device cpu --quick    (the same way, without a GPU)

The engine's mover takes blocks from anywhere in one pool to anywhere in the other, so that no two
of them go in one copy: the least favourable case. It is timed by the host's clock, with all copies
queued and done, in the same rounds as one large copy each way. What has moved is compared
before anything is timed. Results go to experiments/results/<GPU>/swap.json, those of a cache of 8
bits to a file of their own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from experiments.benchmarks.device import (
    add_cache,
    device_of,
    facts,
    noise,
    options,
    table,
    wait,
    wall_medians,
)
from experiments.benchmarks.results import before, end, folder, keep
from experiments.benchmarks.shapes import SHAPES, TINY, Shape
from pagedsim.core import StepPlan
from pagedsim.core.memory import Pairs
from pagedsim.engine.cache import Cache, CacheShape
from pagedsim.engine.mover import LAYOUTS, Mover
from pagedsim.kernels.float8 import AUTO, FORMATS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SIZES, FEW_SIZES = (8, 16, 32, 64, 128), (8, 16)
"""Tokens a block."""
MOVED, LITTLE = 128 * 2**20, 64 * 2**10
"""Bytes that a swap moves, and the one large copy beside it."""
WAYS = ("out", "in")


class Swap(NamedTuple):
    """One line of the table."""

    model: str
    block_size: int
    layout: str

    @property
    def shape(self) -> Shape:
        """The model's."""
        return {**SHAPES, **TINY}[self.model]

    def cache(self, dtype: torch.dtype) -> CacheShape:
        """What its blocks hold."""
        shape = self.shape
        return CacheShape(shape.layers, self.block_size, shape.kv_heads, shape.head_dim, dtype)

    def copies(self) -> int:
        """Copies that a block takes."""
        return 2 * self.shape.layers if self.layout == "layer" else 1

    def __str__(self) -> str:
        return f"{self.model}, blocks of {self.block_size}, a copy a {self.layout}"


def main(words: Sequence[str] | None = None) -> None:
    """Measure all of them; print a table, and keep the results."""
    words = sys.argv[1:] if words is None else words
    parser = options(__doc__)
    add_cache(parser)
    asked = parser.parse_args(words)
    device = device_of(asked)
    place = folder(device, asked)
    cache = asked.kv_cache_dtype
    dtype = FORMATS.get(cache, torch.bfloat16)
    name = "swap" if cache == AUTO else f"swap-{cache}"
    result: dict[str, Any] = {
        **facts(device, "experiments.benchmarks.swap", words),
        "dtype": str(dtype).removeprefix("torch."),
        "rounds": asked.rounds,
        "quick": asked.quick,
    }
    known = before(place, name, result, "swaps") if asked.resume else []
    result["swaps"] = [one for one in known if one["right"]]
    there = {one["swap"] for one in result["swaps"]}
    moved = LITTLE if asked.quick else MOVED
    for swap in swaps(asked.quick):
        if str(swap) in there:
            continue
        found = measure(swap, dtype, device, moved, asked.rounds)
        result["swaps"].append(found)
        keep(place, name, result)
        print(line(found), file=sys.stderr, flush=True)
    print(written(result))
    end(place, name, result, draw)
    wrong = [one["swap"] for one in result["swaps"] if not one["right"]]
    if wrong:
        sys.exit(f"wrong: {'; '.join(wrong)}")


def swaps(quick: bool) -> Iterator[Swap]:
    """Every model, block size and layout."""
    for model in TINY if quick else SHAPES:
        for size in FEW_SIZES if quick else SIZES:
            for layout in LAYOUTS:
                yield Swap(model, size, layout)


def measure(
    swap: Swap, dtype: torch.dtype, device: torch.device, moved: int, rounds: int
) -> dict[str, Any]:
    """One line: does it move what it should, and how fast each way?"""
    shape = swap.cache(dtype)
    blocks = max(2, moved // shape.block_bytes)
    cache = Cache(shape, 2 * blocks, 2 * blocks, device)
    mover = Mover(cache, swap.layout)
    pairs = scattered(blocks)
    found: dict[str, Any] = {
        "swap": str(swap),
        **swap._asdict(),
        "blocks": blocks,
        "block_bytes": shape.block_bytes,
        "copy_bytes": shape.block_bytes // swap.copies(),
        "right": right(cache, mover, pairs),
    }
    if not found["right"]:
        return found
    size = blocks * shape.block_bytes
    host = noise(size, torch.device("cpu"), pinned=device.type == "cuda")
    there = noise(size, device)
    # Pools are full of anything, as a server's are.
    for pool in (cache.gpu, cache.cpu):
        pool.view(torch.uint8).random_()
    calls: dict[str, Callable[[], object]] = {
        "swap out": lambda: mover.move(plan_of("out", pairs)),
        "swap in": lambda: mover.move(plan_of("in", pairs)),
        "copy out": lambda: host.copy_(there, non_blocking=True),
        "copy in": lambda: there.copy_(host, non_blocking=True),
    }
    seconds = wall_medians(calls, device, rounds)
    for way in WAYS:
        found[way] = {
            "seconds": seconds[f"swap {way}"],
            "gb_s": size / seconds[f"swap {way}"] / 1e9,
            "pinned_gb_s": size / seconds[f"copy {way}"] / 1e9,
            "of_pinned": seconds[f"copy {way}"] / seconds[f"swap {way}"],
        }
    return found


def scattered(blocks: int) -> Pairs:
    """(GPU block, CPU block), no two pairs beside each other in both pools; 2 × blocks in each."""
    order = torch.randperm(blocks, generator=torch.Generator().manual_seed(0)).tolist()
    return [(2 * block, 2 * place + 1) for place, block in enumerate(order)]


def plan_of(way: str, pairs: Pairs) -> StepPlan:
    """A step that does nothing else."""
    plan = StepPlan(number=0, now=0.0)
    if way == "out":
        plan.swap_out = pairs
    else:
        plan.swap_in = [(place, block) for block, place in pairs]
    return plan


def right(cache: Cache, mover: Mover, pairs: Pairs) -> bool:
    """Does what goes out come back as it was, and does nothing else change?"""
    gpu, cpu = cache.gpu.view(torch.uint8), cache.cpu.view(torch.uint8)
    gpu.random_()
    cpu.zero_()
    before = gpu.cpu().clone()  # on a CPU it is the pool itself
    blocks, places = (torch.tensor(side) for side in zip(*pairs, strict=True))
    expected = torch.zeros_like(cpu)
    expected[places] = before[blocks]
    mover.move(plan_of("out", pairs))
    wait(gpu.device)
    gone = torch.equal(cpu, expected)
    gpu.zero_()
    mover.move(plan_of("in", pairs))
    wait(gpu.device)
    expected = torch.zeros_like(before)
    expected[blocks] = before[blocks]
    return gone and torch.equal(gpu.cpu(), expected)


def line(found: Mapping[str, Any]) -> str:
    """What is said of one while others go on."""
    if not found["right"]:
        return f"{found['swap']}: moves the wrong bytes, not timed"
    ways = (f"{way} {found[way]['of_pinned']:.0%}" for way in WAYS)
    return f"{found['swap']}: {', '.join(ways)} of one pinned copy"


def written(result: Mapping[str, Any]) -> str:
    """The results as Markdown."""
    head = ["model", "block", "layout", "KiB a copy"]
    head += [f"{title} {way}" for way in WAYS for title in ("GB/s", "of a pinned copy,")]
    rows = [
        [
            one["model"],
            str(one["block_size"]),
            one["layout"],
            f"{one['copy_bytes'] / 1024:,.4g}",
            *(
                cell
                for way in WAYS
                for cell in (f"{one[way]['gb_s']:,.3g}", f"{one[way]['of_pinned']:.0%}")
            ),
        ]
        for one in result["swaps"]
        if one["right"]
    ]
    title = f"{result['device']}, {result['dtype']}, torch {result['torch']}, {result['date']}"
    return f"{title}\n\n{table(head, rows)}"


def draw(result: Mapping[str, Any]) -> Figure:
    """How much of a pinned copy's speed is left, by the bytes of one copy."""
    from pagedsim.report.style import (
        DECODE,
        YIELD,
        drawing,
        margins,
        new_figure,
        plain_log_ticks,
        tidy,
    )

    with drawing():
        figure = new_figure(3.8)
        axes = figure.subplots()
        for layout, colour in (("block", DECODE), ("layer", YIELD)):
            for way, marker in zip(WAYS, "^v", strict=True):
                points = [
                    one for one in result["swaps"] if one["layout"] == layout and one["right"]
                ]
                axes.plot(
                    [one["copy_bytes"] / 1024 for one in points],
                    [one[way]["of_pinned"] for one in points],
                    marker,
                    color=colour,
                    ms=5,
                    alpha=0.8,
                    label=f"a copy a {layout}, {way}",
                )
        axes.set(xscale="log")
        axes.set_ylim(bottom=0)
        plain_log_ticks(axes.xaxis)
        tidy(axes, x="KiB a copy", y="speed / one pinned copy's")
        axes.legend(loc="lower right")
        axes.set_title(f"Swap on {result['device']}")
        margins(figure, left=0.7, top=0.4)
        return figure


if __name__ == "__main__":
    main()
