"""The kernels on a real GPU, held against fp64: what the interpreter cannot show.

bf16 and tensor cores; the tiles that are chosen for the chip; CUDA graphs; offsets past 2³¹.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from pagedsim.kernels import ops as kernels
from pagedsim.kernels.batch import AttentionBatch
from pagedsim.kernels.float8 import FORMATS
from tests.kernels.cases import LAYER, Case, check, forget, same
from tests.kernels.harness import DTYPES
from tests.kernels.test_attention import attend as paged_attention
from tests.kernels.test_attention import decode_some
from tests.kernels.test_mixtures import Mixture, drawn

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

EACH_DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
MIXED = Case(
    ((1, 900), (1, 0), (1, 33), (1, 1), (0, 0), (70, 300), (333, 333), (5, 700), (1, 40)),
    device="cuda",
    tail=5,
)
DECODES = Case(((1, 2000), (1, 0), (1, 33), (1, 1), (1, 640), (1, 16)), device="cuda")
CHANGES: list[dict[str, Any]] = [
    *({"group": group, "kv_heads": 1} for group in (1, 3, 5, 8, 20)),
    *({"head_dim": dim} for dim in (16, 80, 96, 128, 256)),
    *({"block_size": size} for size in (1, 8, 12, 32, 128)),
    {"window": 1},
    {"window": 100},
    {"softcap": 2.0, "spread": 4.0},
    {"softcap": 50.0, "window": 64, "head_dim": 256},
    {"spread": 20.0},
    {"seats": True},
    *({"cache": cache, "head_dim": dim} for cache in FORMATS for dim in (64, 80, 128, 256)),
    *({"cache": cache, "block_size": 12, "group": 5, "kv_heads": 1} for cache in FORMATS),
    {"cache": "fp8_e4m3", "window": 100, "softcap": 2.0, "spread": 4.0},
    *({"cache": cache, "reach": reach} for cache in FORMATS for reach in (1e-3, 1e3)),
]
# A case each, since every one of them compiles: processes share them, and a machine may be lent
# for minutes.
EACH_CHANGE = pytest.mark.parametrize(
    "change", CHANGES, ids=lambda change: "-".join(f"{key}{value}" for key, value in change.items())
)


def attend(case: Case, batch: AttentionBatch | None = None) -> torch.Tensor:
    """As the engine does it, into a cache that lacks this step's tokens."""
    i = case.inputs
    kv = i.kv.clone()
    forget(kv, i.slots)
    out = kernels.attend(
        i.q, i.new_k, i.new_v, kv[:, LAYER, 0], kv[:, LAYER, 1], batch or case.batch,
        scale=case.scale, window=case.window, softcap=case.softcap,
    )  # fmt: skip
    assert same(kv, i.kv)
    return out


@EACH_CHANGE
@EACH_DTYPE
def test_mixed_steps(dtype: torch.dtype, change: dict[str, Any]) -> None:
    case = replace(MIXED, dtype=dtype, **change)
    check(attend(case), case)


@EACH_CHANGE
@EACH_DTYPE
def test_decodes_by_both_kernels(dtype: torch.dtype, change: dict[str, Any]) -> None:
    case = replace(DECODES, dtype=dtype, **change)
    check(decode_some(case), case)
    check(paged_attention(case), case)


def test_a_decode_is_independent_of_the_batch() -> None:
    case = replace(DECODES, dtype=torch.bfloat16, head_dim=128)
    together = decode_some(case)
    for n in range(len(case.sequences)):
        assert torch.equal(decode_some(case, slice(n, n + 1)), together[n : n + 1])


@pytest.mark.parametrize("cache", ["auto", "fp8_e4m3"])
def test_parts_are_merged_alike_every_time(cache: str) -> None:
    """The last program merges: by far more parts than run at one time, many times over, by
    themselves and as the layers of one step, which share their counters."""
    case = replace(DECODES, kv_heads=8, dtype=torch.bfloat16, head_dim=128, cache=cache)
    contexts = (1, 256, 900, 1023, 1024, 1025, 6000)
    case = replace(case, sequences=tuple((1, context) for context in contexts))
    i = case.inputs
    tables, lengths = i.block_tables.repeat(40, 1), i.context_lens.repeat(40)
    args = (i.q.repeat(40, 1, 1), i.k_cache, i.v_cache)
    step = AttentionBatch(tables, lengths, lengths, lengths, len(lengths))
    first = kernels.attend_cached(*args, step, scale=case.scale)
    check(first[:7], case)
    for _ in range(50):
        assert torch.equal(kernels.attend_cached(*args, replace(step), scale=case.scale), first)
        assert torch.equal(kernels.attend_cached(*args, step, scale=case.scale), first)
    assert torch.equal(first.unflatten(0, (40, 7)), first[:7].expand(40, -1, -1, -1))


@pytest.mark.parametrize(
    ("window", "softcap", "cache"),
    [(None, None, "auto"), (100, 30.0, "auto"), (100, None, "fp8_e4m3")],
)
def test_a_graph_holds_a_decode_step(window: int | None, softcap: float | None, cache: str) -> None:
    """Captured with padding alone, replayed on batches that it has not seen."""
    case = replace(DECODES, dtype=torch.bfloat16, window=window, softcap=softcap, cache=cache)
    cases = [replace(case, seed=seed) for seed in (1, 2)]
    names = ("q", "new_k", "new_v", "kv", "block_tables", "context_lens", "slots")
    blocks = max(c.inputs.kv.shape[0] for c in cases)
    static = {name: torch.zeros_like(getattr(case.inputs, name)) for name in names}
    static["kv"] = torch.zeros(blocks, *case.inputs.kv.shape[1:], device="cuda").to(case.held)
    static["slots"].fill_(-1)

    def step() -> torch.Tensor:
        batch = AttentionBatch(
            static["block_tables"],
            case.inputs.query_start,
            static["context_lens"],
            static["slots"],
            len(case.sequences),
        )
        return kernels.attend(
            static["q"], static["new_k"], static["new_v"],
            static["kv"][:, LAYER, 0], static["kv"][:, LAYER, 1], batch,
            scale=case.scale, window=window, softcap=softcap,
        )  # fmt: skip

    step()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for other in cases:
        for name in names:
            source = getattr(other.inputs, name)
            static[name][: len(source)] = source
        graph.replay()
        check(out, other)


def test_offsets_past_two_to_the_31() -> None:
    """Block 0 and the last of a cache of 2³² elements hold the same, so they give the same."""
    case = Case(((1, 60), (20, 50)), block_size=64, dtype=torch.bfloat16, device="cuda")
    i = case.inputs
    blocks = 2**32 // i.kv[0].numel() + 1
    if torch.cuda.mem_get_info()[0] < 3 * 2**32:
        pytest.skip("less than 12 GiB of memory free")
    kv = torch.empty(blocks, *i.kv.shape[1:], dtype=case.dtype, device="cuda")
    used = torch.tensor([table[0] for table in i.block_tables.tolist()], device="cuda")
    far = torch.tensor([blocks - 1, blocks - 2], device="cuda")
    near = torch.tensor([0, 1], device="cuda")
    kv[near] = i.kv[used].nan_to_num()
    kernels.copy_blocks(kv, near, far)
    assert torch.equal(kv[far], kv[near])
    slots = i.slots + ((far - used) * 64).repeat_interleave(i.query_start.diff())
    kv[slots // 64, LAYER, :, slots % 64] = torch.nan
    batch = AttentionBatch(
        far[:, None].int(),
        i.query_start,
        i.context_lens,
        slots,
        1,
        ((20, 50),),
    )
    out = kernels.attend(
        i.q, i.new_k, i.new_v, kv[:, LAYER, 0], kv[:, LAYER, 1], batch, scale=case.scale
    )
    check(out, case)


def test_a_graph_holds_a_mixture() -> None:
    """Captured with all choices alike, replayed with others."""
    case = Mixture(24, 16, 4, 256, 128, torch.bfloat16, device="cuda")
    given, other = drawn(case), drawn(replace(case, crowded=True))
    kernels.experts(**given)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = kernels.experts(**given)
    for name in ("chosen", "weights"):
        given[name].copy_(other[name])
    graph.replay()
    assert torch.equal(out, kernels.experts(**given))
