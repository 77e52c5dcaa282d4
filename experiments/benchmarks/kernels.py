"""Paged attention on a GPU, against the GPU's limits and against other libraries.

    python -m experiments.benchmarks.kernels
    python -m experiments.benchmarks.kernels --device cpu --quick    (the same way, without a GPU)

The limit of a case is the time of its bytes at the speed of a device copy, or of its FLOP at that
of a matrix product, whichever is longer; both are timed in the same rounds as the kernels. Outputs
are first compared with plain torch in fp64; a wrong one is not timed. A case that raises an error
is reported, and the others are measured. Results go to experiments/results/<GPU>/kernels.json, or
to a file of another `--name`; `--headlines` measures only the cases with a bar.

Peers are the installed libraries that can compute a case; `--peers` without names measures ours
alone. SDPA and FlexAttention get contiguous keys and values, which saves them the block tables;
they take no 8-bit cache and no contexts that differ. FlashInfer and FlashAttention 3 get the same
paged cache, FlashAttention 2 the same in pages of 256 tokens, its smallest size.
"""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from itertools import accumulate
from statistics import median
from typing import Any, NamedTuple

import torch

from experiments.benchmarks.device import (
    OPTIONS,
    Copy,
    Results,
    dtype_of,
    failure,
    medians,
    parse_device,
)
from experiments.benchmarks.harness import columns, main_of
from experiments.benchmarks.shapes import Case, Problem, grid, headlines
from pagedsim.kernels.float8 import AUTO

SIDE, SHORT_SIDE = 8192, 256
"""The side of the limiting product's matrices, and at tiny sizes."""
FREE = 0.9
"""The share of free memory that a case may take."""


def kernels(words: Sequence[str]) -> None:
    """Measure the grid; print a table, and keep the results."""
    peers = {"nargs": "*", "choices": list(PEERS), "default": list(PEERS)}
    headlines_only = {"action": "store_true", "help": "only the cases with a bar"}
    more = {"--peers": peers, "--name": "kernels", "--headlines": headlines_only}
    asked = parse_device(__doc__, words, {**OPTIONS, **more})
    device, dtype = asked.device, dtype_of(asked.device)
    limits = Limits(device, dtype, asked.quick)
    left_out: list[str] = []
    results = Results(
        asked.name, "kernels", words, asked, timed="of_limit", dtype=dtype, left_out=left_out
    )

    def line(case: Case) -> dict[str, Any] | None:
        if device.type == "cuda":
            torch.cuda.empty_cache()
            if case.room(dtype) >= FREE * torch.cuda.mem_get_info(device)[0]:
                left_out.append(str(case))
                return None
        try:
            return measured(case, dtype, asked.peers, limits, asked.rounds)
        except Exception as problem:  # any error: the other cases are measured
            return {"case": str(case), "failed": failure(problem)}

    wanted = headlines(asked.quick) if asked.headlines else grid(asked.quick)
    results.sweep(wanted, line, lambda one: str(one["case"]), progress)
    results.close(written(results, asked.peers))


class Limits:
    """The limits of the device: a copy within it, and a matrix product."""

    def __init__(self, device: torch.device, dtype: torch.dtype, tiny: bool) -> None:
        self.device = device
        side = SHORT_SIDE if tiny else SIDE
        kind: Any = {"dtype": dtype, "device": device}
        self._copy = Copy(device, tiny)
        self._one, self._other = torch.randn(2, side, side, **kind).unbind()
        self._product = torch.empty(side, side, **kind)
        self._flop = 2 * side**3

    def calls(self) -> dict[str, Callable[[], object]]:
        """The calls to time beside the kernels."""
        return {
            "copy": self._copy,
            "product": lambda: torch.matmul(self._one, self._other, out=self._product),
        }

    def of(self, case: Case, dtype: torch.dtype, seconds: Mapping[str, float]) -> dict[str, Any]:
        """The least time of a case, from the times of these calls."""
        bytes_s = self._copy.moved / seconds["copy"]
        flop_s = self._flop / seconds["product"]
        moving, computing = case.moved(dtype) / bytes_s, case.flop / flop_s
        return {
            "copy_gb_s": bytes_s / 1e9,
            "product_tflop_s": flop_s / 1e12,
            "bound": "bytes" if moving > computing else "flop",
            "seconds": max(moving, computing),
        }


def measured(
    case: Case, dtype: torch.dtype, peers: Iterable[str], limits: Limits, rounds: int
) -> dict[str, Any]:
    """The line of a case, without a time if its result is wrong."""
    problem = Problem(case, dtype, limits.device)
    found: dict[str, Any] = {
        **{"case": str(case), "kind": case.kind, **asdict(case)},
        **{"flop": case.flop, "bytes": case.moved(dtype)},
        **{"error": problem.error(problem.ours()), "error_allowed": problem.allowed, "peers": {}},
    }
    if found["error"] > problem.allowed:
        return found
    others, failures = contenders(problem, peers)
    calls = {name: other.call for name, other in others.items()}
    seconds = medians({"ours": problem.ours, **limits.calls(), **calls}, limits.device, rounds)
    limit = limits.of(case, dtype, seconds)
    found["peers"] = {
        **{name: {"seconds": seconds[name], "to_ours": seconds[name] / seconds["ours"]}
           for name in others},
        **{name: {"failed": why} for name, why in failures.items()},
    }  # fmt: skip
    return {
        **found,
        "limit": limit,
        "seconds": seconds["ours"],
        "of_limit": limit["seconds"] / seconds["ours"],
        "gb_s": case.moved(dtype) / seconds["ours"] / 1e9,
        "tflop_s": case.flop / seconds["ours"] / 1e12,
    }


def progress(found: Mapping[str, Any]) -> str:
    """The line printed while others are measured."""
    if "failed" in found:
        return f"{found['case']}: {found['failed']}, not timed"
    if "of_limit" not in found:
        return f"{found['case']}: off by {found['error']:.2g} of the norm, not timed"
    others = "".join(
        f", {name} {one['to_ours']:.2f} ×" if "to_ours" in one else f", {name}: {one['failed']}"
        for name, one in found["peers"].items()
    )
    return f"{found['case']}: {found['of_limit']:.0%} of the limit{others}"


def written(results: Results, peers: Sequence[str]) -> str:
    """The results as Markdown."""
    timed = results.timed()

    def ratio(one: Mapping[str, Any], name: str) -> str:
        peer = one["peers"].get(name, {})
        return f"{peer['to_ours']:.2f}" if "to_ours" in peer else "–"

    shown = [name for name in peers if any(ratio(one, name) != "–" for one in timed)]
    cells: dict[str, Callable[[Mapping[str, Any]], str]] = {
        "case": lambda one: one["case"],
        "µs": lambda one: f"{one['seconds'] * 1e6:,.0f}",
        "GB/s": lambda one: f"{one['gb_s']:,.0f}",
        "TFLOP/s": lambda one: f"{one['tflop_s']:,.3g}",
        "bound by": lambda one: one["limit"]["bound"],
        "of the limit": lambda one: f"{one['of_limit']:.0%}",
        **{f"{name} / ours": partial(ratio, name=name) for name in shown},
    }
    text = [results.heading()]
    if timed:
        copy = median(one["limit"]["copy_gb_s"] for one in timed)
        product = median(one["limit"]["product_tflop_s"] for one in timed)
        text[0] += f": a copy {copy:,.0f} GB/s, a product {product:,.3g} TFLOP/s"
        text += ["", columns(timed, cells)]
    if left_out := results.content["left_out"]:
        text += ["", f"left out, for want of memory: {'; '.join(left_out)}"]
    return "\n".join(text)


# -- peers -----------------------------------------------------------------------------------------

PAGE = 256
"""Tokens of the smallest page of FlashAttention 2."""


class Contender(NamedTuple):
    """A way to compute a problem."""

    call: Callable[[], Any]
    rows: Callable[[Any], torch.Tensor] = lambda out: out
    """From the result of a call to [tokens, heads, dim]."""


def contenders(
    problem: Problem, names: Iterable[str]
) -> tuple[dict[str, Contender], dict[str, str]]:
    """The peers that compute the problem rightly, and the reasons why others do not."""
    able: dict[str, Contender] = {}
    failures: dict[str, str] = {}
    for name in names:
        try:
            contender = PEERS[name](problem)
            if contender is None:
                continue
            error = problem.error(contender.rows(contender.call()))
        except Exception as failure:  # any error: ours is timed
            failures[name] = str(failure).strip().partition("\n")[0][:200]
            continue
        if error > problem.allowed:
            failures[name] = f"off by {error:.2g} of the norm"
        else:
            able[name] = contender
    return able, failures


def sdpa(problem: Problem) -> Contender | None:
    """torch's `scaled_dot_product_attention`, which has no causal mask for a chunk."""
    if problem.case.kind == "chunk" or not _dense(problem):
        return None
    q, (k, v) = problem.dense_queries, problem.dense
    settings: Any = {"is_causal": problem.case.queries > 1, "scale": problem.scale}
    attend = torch.nn.functional.scaled_dot_product_attention
    return Contender(lambda: attend(q, k, v, enable_gqa=True, **settings), _flat)


def flex(problem: Problem) -> Contender | None:
    """torch's FlexAttention, compiled for each shape; on a CPU without compilation."""
    if not _dense(problem):
        return None
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    case, device = problem.case, problem.q.device
    q, (k, v) = problem.dense_queries, problem.dense
    before = case.context - case.queries

    def seen(batch: object, head: object, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return query + before >= key

    mask = None
    if case.queries > 1:
        mask = create_block_mask(seen, None, None, case.queries, case.context, device=device)
    attend: Any = flex_attention
    if device.type == "cuda":
        torch.compiler.reset()  # or compilation stops after some shapes of one function
        attend = torch.compile(flex_attention, dynamic=False)
    else:
        warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
    return Contender(
        lambda: attend(q, k, v, block_mask=mask, scale=problem.scale, enable_gqa=True), _flat
    )


def flash(problem: Problem) -> Contender | None:
    """FlashAttention over a paged cache: version 3, or else 2, whichever is installed."""
    case = problem.case
    if problem.q.device.type != "cuda" or case.cache != AUTO:
        return None
    caches, tables, named = (problem.k_cache, problem.v_cache), problem.tables, "page_table"
    if importlib.util.find_spec("flash_attn_interface") is not None:
        library: Any = importlib.import_module("flash_attn_interface")
    elif importlib.util.find_spec("flash_attn") is not None:
        library = importlib.import_module("flash_attn")
        caches, tables = _paged(problem, PAGE)
        named = "block_table"
    else:
        return None
    q = problem.q.unflatten(0, (len(case.contexts), case.queries))
    settings: dict[str, Any] = {named: tables, "cache_seqlens": problem.batch.context_lens}
    settings |= {"softmax_scale": problem.scale, "causal": True}

    def rows(out: Any) -> torch.Tensor:
        found: torch.Tensor = out[0] if isinstance(out, tuple) else out  # with the log-sum-exp
        return found.flatten(0, 1)

    return Contender(lambda: library.flash_attn_with_kvcache(q, *caches, **settings), rows)


def flashinfer(problem: Problem) -> Contender | None:
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
            room, "NHD", use_tensor_cores=shape.group > 1
        )
        wrapper.plan(*pages, *heads, **kind)
    else:
        wrapper = library.BatchPrefillWithPagedKVCacheWrapper(room, "NHD")
        wrapper.plan(starts * case.queries, *pages, *heads, causal=True, **kind)
    caches = (problem.k_cache, problem.v_cache)
    return Contender(lambda: wrapper.run(problem.q, caches))


PEERS: Mapping[str, Callable[[Problem], Contender | None]] = {
    "sdpa": sdpa,
    "flex": flex,
    "flash": flash,
    "flashinfer": flashinfer,
}


def _dense(problem: Problem) -> bool:
    """Whether keys and values can be one tensor of the queries' dtype."""
    return problem.case.cache == AUTO and not problem.case.beside


def _paged(problem: Problem, size: int) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Keys and values in pages of so many tokens, and page tables."""
    pages: list[list[torch.Tensor]] = [[], []]
    counts = []
    for run in problem.runs():
        counts.append(-(-len(run[0]) // size))
        for found, own in zip(pages, run, strict=True):
            room = own.new_zeros(counts[-1] * size, *own.shape[1:])
            room[: len(own)] = own
            found.append(room.unflatten(0, (counts[-1], size)))
    k, v = (torch.cat(own) for own in pages)
    order = torch.arange(sum(counts), dtype=torch.int32, device=k.device).split(counts)
    return (k, v), torch.nn.utils.rnn.pad_sequence(list(order), batch_first=True)


def _flat(out: torch.Tensor) -> torch.Tensor:
    return out.transpose(1, 2).flatten(0, 1)


main = main_of(kernels)

if __name__ == "__main__":
    main()
