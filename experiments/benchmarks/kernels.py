"""Paged attention on a GPU, against the GPU's limits and against other libraries.

    python -m experiments.benchmarks.kernels
    python -m experiments.benchmarks.kernels --device cpu --quick    (the same way, without a GPU)

The limit of a case is the time of its bytes at the speed of a device copy, or of its FLOP at that
of a matrix product, whichever is longer; both are timed in the same rounds as the kernels. Outputs
are first compared with plain torch in fp64; a wrong one is not timed. Results go to
experiments/results/<GPU>/kernels.json, or to a file of another `--name`; `--headlines` measures
only the cases with a bar.

Peers are the installed libraries that can compute a case; `--peers` without names measures ours
alone. SDPA gets contiguous keys and values, which saves it the block tables; it takes no 8-bit
cache, no contexts that differ and no chunks. FlashInfer and FlashAttention 3 get the same
paged cache, FlashAttention 2 the same in pages of 256 tokens, its smallest size.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import accumulate
from typing import Any

import torch

from experiments.benchmarks.device import OPTIONS, Results, dtype_of, parse_device
from experiments.benchmarks.harness import main_of
from experiments.benchmarks.shapes import Case, Problem, grid, headlines
from experiments.benchmarks.timing import Bench, Line, Rival, Work, limits_table
from pagedsim.kernels.float8 import AUTO

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


main = main_of(kernels)

if __name__ == "__main__":
    main()
