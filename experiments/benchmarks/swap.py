"""Swapping blocks out and in by block size and layout, against one copy of pinned memory.

    python -m experiments.benchmarks.swap [--kv-cache-dtype fp8_e4m3]
    python -m experiments.benchmarks.swap --device cpu --quick    (the same way, without a GPU)

The engine's mover copies blocks between random places of both pools, so that no two of them share a
copy, the worst case. It is timed by the host's clock, until all copies are done, in the same rounds
as one large copy each way. The moved bytes are compared before the timing. Results go to
experiments/results/<GPU>/swap.json, those of an 8-bit cache to a file of their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from experiments.benchmarks.device import (
    CACHE,
    OPTIONS,
    Results,
    medians,
    noise,
    parse_device,
    wait,
)
from experiments.benchmarks.harness import main_of, table
from experiments.benchmarks.shapes import SHAPES, TINY
from pagedsim.core import StepPlan
from pagedsim.core.memory import Pairs
from pagedsim.engine.cache import LAYOUTS, Cache, CacheShape, Mover
from pagedsim.kernels.float8 import AUTO, FORMATS

SIZES, FEW_SIZES = (8, 16, 32, 64, 128), (8, 16)
"""Tokens a block."""
MOVED, LITTLE = 128 * 2**20, 64 * 2**10
"""Bytes of a swap and of the one large copy beside it; at tiny sizes."""
WAYS = ("out", "in")


class Swap(NamedTuple):
    """One line of the table."""

    model: str
    block_size: int
    layout: str

    def __str__(self) -> str:
        return f"{self.model}, blocks of {self.block_size}, a copy a {self.layout}"


def swap(words: Sequence[str]) -> None:
    """Measure all swaps; print a table, and keep the results."""
    asked = parse_device(__doc__, words, {**OPTIONS, "--kv-cache-dtype": CACHE})
    cache = asked.kv_cache_dtype
    dtype = FORMATS.get(cache, torch.bfloat16)
    name = "swap" if cache == AUTO else f"swap-{cache}"
    results = Results(name, "swap", words, asked, lines="swaps", timed=WAYS[0], dtype=dtype)
    moved = LITTLE if asked.quick else MOVED
    results.sweep(
        swaps(asked.quick),
        lambda one: measure(one, dtype, asked.device, moved, asked.rounds),
        lambda one: str(one["swap"]),
        progress,
    )
    head = ["model", "block", "layout", "KiB a copy", "GB/s out", "of a pinned copy, out"]
    rows = [
        [one["model"], str(one["block_size"]), one["layout"], f"{one['copy_bytes'] / 1024:,.4g}"]
        + [
            cell
            for way in WAYS
            for cell in (f"{one[way]['gb_s']:,.3g}", f"{one[way]['of_pinned']:.0%}")
        ]
        for one in results.timed()
    ]
    text = table([*head, "GB/s in", "of a pinned copy, in"], rows)
    results.close(f"{results.heading()}\n\n{text}", "wrong")


def swaps(quick: bool) -> Iterator[Swap]:
    """Every model, block size and layout."""
    for model in TINY if quick else SHAPES:
        for size in FEW_SIZES if quick else SIZES:
            for layout in LAYOUTS:
                yield Swap(model, size, layout)


def measure(
    swap: Swap, dtype: torch.dtype, device: torch.device, moved: int, rounds: int
) -> dict[str, Any]:
    """Whether it moves the right bytes and, if so, its speed each way."""
    of = {**SHAPES, **TINY}[swap.model]
    shape = CacheShape(of.layers, swap.block_size, of.kv_heads, of.head_dim, dtype)
    blocks = max(2, moved // shape.block_bytes)
    cache = Cache(shape, 2 * blocks, 2 * blocks, device)
    mover = Mover(cache, swap.layout)
    pairs = scattered(blocks)
    found: dict[str, Any] = {
        "swap": str(swap),
        **swap._asdict(),
        "blocks": blocks,
        "block_bytes": shape.block_bytes,
        "copy_bytes": shape.block_bytes // (2 * of.layers if swap.layout == "layer" else 1),
        "right": right(cache, mover, pairs),
    }
    if not found["right"]:
        return found
    size = blocks * shape.block_bytes
    host = noise(size, torch.device("cpu"), pinned=device.type == "cuda")
    there = noise(size, device)
    # Pools contain random bytes, not zeros, as those of a server.
    for pool in (cache.gpu, cache.cpu):
        pool.view(torch.uint8).random_()
    seconds = medians(
        {
            "swap out": lambda: mover.move(plan_of("out", pairs)),
            "swap in": lambda: mover.move(plan_of("in", pairs)),
            "copy out": lambda: host.copy_(there, non_blocking=True),
            "copy in": lambda: there.copy_(host, non_blocking=True),
        },
        device,
        rounds,
        wall=True,
    )
    for way in WAYS:
        own, pinned = seconds[f"swap {way}"], seconds[f"copy {way}"]
        rates = {"gb_s": size / own / 1e9, "pinned_gb_s": size / pinned / 1e9}
        found[way] = {"seconds": own, **rates, "of_pinned": pinned / own}
    return found


def scattered(blocks: int) -> Pairs:
    """(GPU block, CPU block); no two pairs are adjacent in both pools, of 2 × blocks each."""
    order = torch.randperm(blocks, generator=torch.Generator().manual_seed(0)).tolist()
    return [(2 * block, 2 * place + 1) for place, block in enumerate(order)]


def plan_of(way: str, pairs: Pairs) -> StepPlan:
    """A step that only swaps."""
    plan = StepPlan(number=0, now=0.0)
    if way == "out":
        plan.swap_out = pairs
    else:
        plan.swap_in = [(place, block) for block, place in pairs]
    return plan


def right(cache: Cache, mover: Mover, pairs: Pairs) -> bool:
    """Whether swapped blocks come back unchanged, and no other block changes."""
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


def progress(found: Mapping[str, Any]) -> str:
    """The line printed while others are measured."""
    if not found["right"]:
        return f"{found['swap']}: moves the wrong bytes, not timed"
    ways = (f"{way} {found[way]['of_pinned']:.0%}" for way in WAYS)
    return f"{found['swap']}: {', '.join(ways)} of one pinned copy"


main = main_of(swap)

if __name__ == "__main__":
    main()
