"""Paged attention and swapping on a GPU, against the GPU's limits and against other libraries.

    python -m pagedsim.experiments.benchmarks.kernels
    python -m pagedsim.experiments.benchmarks.kernels swap [--kv-cache-dtype fp8_e4m3]
    python -m pagedsim.experiments.benchmarks.kernels --device cpu --quick  (without a GPU)

The limit of a case is the time of its bytes at the speed of a device copy, or of its FLOP at that
of a matrix product, whichever is longer; both are timed in the same rounds as the kernels. Outputs
are first compared with plain torch in fp64; a wrong one is not timed. Results go to
experiments/results/<GPU>/kernels.json, or to a file of another `--name`; `--headlines` measures
only the cases with a bar.

Peers are the installed libraries that can compute a case; `--peers` without names measures ours
alone. SDPA gets contiguous keys and values, which saves it the block tables; it takes no 8-bit
cache, no contexts that differ and no chunks. FlashInfer and FlashAttention 3 get the same
paged cache, FlashAttention 2 the same in pages of 256 tokens, its smallest size.

`swap` moves blocks out and in by block size and layout. The engine's mover copies blocks between
random places of both pools, so that no two of them share a copy, the worst case. It is timed by the
host's clock, until all copies are done, in the same rounds as one large copy of pinned memory each
way, its limit. The moved bytes are compared first. Results go to swap.json, those of an 8-bit cache
to a file of their own.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import accumulate, product, starmap
from typing import Any, NamedTuple

import torch

from pagedsim.core import StepPlan
from pagedsim.core.memory import Pairs
from pagedsim.engine.cache import LAYOUTS, Cache, CacheShape, Mover
from pagedsim.experiments.benchmarks.device import CACHE, OPTIONS, Results, dtype_of, parse_device
from pagedsim.experiments.benchmarks.harness import columns, main_of
from pagedsim.experiments.benchmarks.shapes import (
    SHAPES,
    TINY,
    Case,
    Problem,
    grid,
    headlines,
    shape_of,
)
from pagedsim.experiments.benchmarks.timing import (
    TIMED,
    Bench,
    Line,
    Rival,
    Work,
    limits_table,
    medians,
    noise,
    wait,
)
from pagedsim.kernels.float8 import AUTO, FORMATS

FREE = 0.9
"""The share of free memory that a case may take."""


def kernels(words: Sequence[str]) -> None:
    """Measure the grid; print a table, and keep the results."""
    peers = {"nargs": "*", "choices": list(PEERS), "default": list(PEERS)}
    headlines_only = {"action": "store_true", "help": "only the cases with a bar"}
    more = {"--peers": peers, "--name": "kernels", "--headlines": headlines_only}
    asked = parse_device(__doc__, words, {**OPTIONS, **more})
    device, dtype = asked.device, dtype_of(asked.device)
    bench = Bench(asked, dtype)
    room = FREE * torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else float("inf")
    wanted = [*(headlines if asked.headlines else grid)(asked.quick)]
    left_out = [str(case) for case in wanted if case.room(dtype) >= room]
    results = Results(asked.name, "kernels", words, asked, dtype, left_out=left_out)

    def line(case: Case) -> Line:
        problem = Problem(case, dtype, device)
        rivals = {name: partial(PEERS[name], problem) for name in asked.peers}
        size = case.moved(dtype), case.flop
        work = Work(problem.ours, problem.error, problem.allowed, *size, rivals)
        return {"kind": case.kind, **asdict(case), **bench.line(work)}

    results.sweep({str(case): case for case in wanted if str(case) not in left_out}, line)
    text = limits_table(results.heading(), results.timed())
    if left_out:
        text += f"\n\nleft out, for want of memory: {'; '.join(left_out)}"
    results.close(text)


# -- peers -----------------------------------------------------------------------------------------

PAGE = 256
"""Tokens of the smallest page of FlashAttention 2."""


def sdpa(problem: Problem) -> Rival | None:
    """torch's `scaled_dot_product_attention`, which has no causal mask for a chunk."""
    case = problem.case
    if case.kind == "chunk" or case.cache != AUTO or case.beside:
        return None
    q, k, v = problem.dense
    settings: Any = {"is_causal": case.queries > 1, "scale": problem.scale, "enable_gqa": True}
    attend = partial(torch.nn.functional.scaled_dot_product_attention, q, k, v)

    def error(out: torch.Tensor) -> float:
        return problem.error(out.transpose(1, 2).flatten(0, 1))

    return Rival(lambda: attend(**settings), error)


def flash(problem: Problem) -> Rival | None:
    """FlashAttention over a paged cache: version 3, or else 2, whichever is installed."""
    case = problem.case
    if problem.q.device.type != "cuda" or case.cache != AUTO:
        return None
    named = "page_table"
    if importlib.util.find_spec("flash_attn_interface") is not None:
        library: Any = importlib.import_module("flash_attn_interface")
    elif importlib.util.find_spec("flash_attn") is not None:
        library = importlib.import_module("flash_attn")
        named = "block_table"
        problem = Problem(replace(case, block_size=PAGE), problem.q.dtype, problem.q.device)
    else:
        return None
    q = problem.q.unflatten(0, (len(case.contexts), case.queries))
    settings: dict[str, Any] = {named: problem.tables, "cache_seqlens": problem.batch.context_lens}
    settings |= {"softmax_scale": problem.scale, "causal": True}
    attend = partial(library.flash_attn_with_kvcache, q, problem.k_cache, problem.v_cache)

    def error(out: Any) -> float:
        found: torch.Tensor = out[0] if isinstance(out, tuple) else out  # with the log-sum-exp
        return problem.error(found.flatten(0, 1))

    return Rival(lambda: attend(**settings), error)


def flashinfer(problem: Problem) -> Rival | None:
    """FlashInfer's paged wrappers, without planning, which is done once for all layers."""
    if problem.q.device.type != "cuda" or importlib.util.find_spec("flashinfer") is None:
        return None
    library: Any = importlib.import_module("flashinfer")
    case, shape, device = problem.case, problem.case.shape, problem.q.device
    ints: Any = {"dtype": torch.int32, "device": device}
    room = torch.empty(256 * 2**20, dtype=torch.uint8, device=device)
    ends = [0, *accumulate(map(len, problem.blocks))]
    last = [(context - 1) % case.block_size + 1 for context in case.contexts]
    starts = torch.arange(len(last) + 1, **ints)
    pages = (torch.tensor(ends, **ints), torch.cat(problem.blocks), torch.tensor(last, **ints))
    heads = (shape.heads, shape.kv_heads, shape.head_dim, case.block_size)
    kind: Any = {
        "q_data_type": problem.q.dtype,
        "kv_data_type": problem.k_cache.dtype,
        "sm_scale": problem.scale,
    }
    if case.queries == 1:
        wrapper = library.BatchDecodeWithPagedKVCacheWrapper(
            room, "NHD", use_tensor_cores=shape.heads > shape.kv_heads
        )
        wrapper.plan(*pages, *heads, **kind)
    else:
        wrapper = library.BatchPrefillWithPagedKVCacheWrapper(room, "NHD")
        wrapper.plan(starts * case.queries, *pages, *heads, causal=True, **kind)
    caches = (problem.k_cache, problem.v_cache)
    return Rival(lambda: wrapper.run(problem.q, caches), problem.error)


PEERS: Mapping[str, Callable[[Problem], Rival | None]] = {
    "sdpa": sdpa,
    "flash": flash,
    "flashinfer": flashinfer,
}


# -- swapping --------------------------------------------------------------------------------------

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
    results = Results(name, "kernels", ["swap", *words], asked, dtype)
    moved = LITTLE if asked.quick else MOVED
    results.sweep(
        {str(one): one for one in swaps(asked.quick)},
        lambda one: swapped(one, dtype, asked.device, moved, asked.rounds),
    )
    cells: dict[str, Callable[[Line], str]] = {
        "model": lambda one: one["model"],
        "block": lambda one: str(one["block_size"]),
        "layout": lambda one: one["layout"],
        "KiB a copy": lambda one: f"{one['copy_bytes'] / 1024:,.4g}",
        "GB/s out, in": lambda one: ", ".join(f"{one[way]['gb_s']:,.3g}" for way in WAYS),
        "of a pinned copy, out, in": of_pinned,
    }
    results.close(f"{results.heading()}\n\n{columns(results.timed(), cells)}")


def of_pinned(line: Line) -> str:
    """The speed each way as a share of one large copy's."""
    return ", ".join(f"{line[way]['of_pinned']:.0%}" for way in WAYS)


def swaps(quick: bool) -> Iterator[Swap]:
    """Every model, block size and layout."""
    models, sizes = ((TINY.name,), FEW_SIZES) if quick else (SHAPES, SIZES)
    yield from starmap(Swap, product(models, sizes, LAYOUTS))


def swapped(swap: Swap, dtype: torch.dtype, device: torch.device, moved: int, rounds: int) -> Line:
    """Whether it moves the right bytes and, if so, its speed each way."""
    of = shape_of(swap.model)
    shape = CacheShape(of.layers, swap.block_size, of.kv_heads, of.head_dim, dtype)
    blocks = max(2, moved // shape.block_bytes)
    cache = Cache(shape, 2 * blocks, 2 * blocks, device)
    mover = Mover(cache, swap.layout)
    pairs = scattered(blocks)
    found: Line = {
        "blocks": blocks,
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
        found[way] = {"gb_s": size / own / 1e9, "of_pinned": pinned / own}
    return {**found, TIMED: seconds["swap out"] + seconds["swap in"]}


def scattered(blocks: int) -> Pairs:
    """(GPU block, CPU block); no two pairs are adjacent in both pools, of 2 × blocks each."""
    order = torch.randperm(blocks, generator=torch.Generator().manual_seed(0)).tolist()
    return [(2 * block, 2 * place + 1) for place, block in enumerate(order)]


def plan_of(way: str, pairs: Pairs) -> StepPlan:
    """A step that only swaps."""
    plan = StepPlan(number=0, now=0.0)
    if way == "out":
        plan._swap_out = tuple(pairs)
    else:
        plan._swap_in = tuple((place, block) for block, place in pairs)
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


main = main_of(__name__, kernels, swap)
