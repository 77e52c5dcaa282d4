"""The kernels compiled for GPUs that are not there: nothing spills, everything fits."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

from pagedsim.kernels.float8 import FORMATS
from pagedsim.kernels.tiles import decode_tiles, resident

Call = dict[str, Any]
"""See `compiling.Call`."""
Launched = dict[str, Any]
"""A `fake_gpu.Usage`."""
ROOT = Path(__file__).resolve().parent.parent.parent
BOTH = (80, 90)
"""An A100 and an H100."""
SHARED = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024, 120: 99 * 1024}
"""Bytes that one program may have."""
CHOSEN = {**SHARED, 80: 99 * 1024}
"""The same for tiles that the kernels choose: 8.6 and 8.9 have less than 8.0 and get the same."""
FEW = 40
"""Bytes that may spill in fp32, which does without tensor cores and is for checking, and in toy
models' heads of less than 64 dims. To fit more programs side by side, ptxas now and then stops at
56 to 96 registers there and spills a handful; more than that is a fault."""
PRODUCTS = ("_attention", "_decode", "_latent", "_up", "_down", "_product")
"""What is bound by matrix products, or has them on its way."""

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed"
)


def taken(calls: Sequence[Call], capability: int | None = None) -> list[list[Launched]]:
    """What `compiling.py` says of each call's kernels; a call names its GPU, or all are for one."""
    named = [call | ({"capability": capability} if capability else {}) for call in calls]
    child = subprocess.run(
        [sys.executable, "-m", "tests.kernels.compiling"],
        input=json.dumps(named),
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"},
        capture_output=True,
        text=True,
    )
    assert child.returncode == 0, child.stderr
    answer: list[list[Launched]] = json.loads(child.stdout)
    return answer


def faults(call: Call, kernels: Iterable[Launched], few: int = FEW) -> list[str]:
    """What is wrong with the compiled kernels of a call; `few` bytes may spill in fp32."""
    half = call["dtype"] != "float32"
    found = []
    for kernel in kernels:
        says = f"{call}: {kernel}"
        if kernel["spilled"] > (0 if half and call.get("head_dim", 128) >= 64 else few):
            found.append(f"spills: {says}")
        if kernel["shared"] > CHOSEN[call["capability"]]:
            found.append(f"too much shared memory: {says}")
        if kernel["name"] in PRODUCTS and half == (kernel["products"] == "none"):
            found.append(f"the wrong units: {says}")
    return found


def check(calls: Iterable[Call], capabilities: Sequence[int] = BOTH, few: int = FEW) -> None:
    """Fail unless all calls' kernels compile for these GPUs without a fault; in fp32, which is for
    checking, for one of them in turn."""
    asked: list[Call] = [
        {**call, "capability": one}
        for number, call in enumerate(calls)
        for turn, one in enumerate(capabilities)  # each mask meets both
        if call["dtype"] != "float32" or turn == (number + number // 4) % len(capabilities)
    ]
    found = zip(asked, taken(asked), strict=True)
    assert [fault for call, launched in found for fault in faults(call, launched, few)] == []


MIXTURE: Call = {
    "kernel": "grouped",
    "dtype": "bfloat16",
    "experts": 128,
    "size": 2048,
    "inner": 768,
}
DEEPSEEK: Call = {"kernel": "latent", "dtype": "bfloat16", "rank": 512, "rope": 64, "heads": 128}
PRODUCT: Call = {"kernel": "product", "dtype": "bfloat16", "queries": 8}
CUT = [*["_count"] * 4, "_peak", "_mass", *["_weigh"] * 3, "_tie"]
EXPERTS = ["_list", "_up", "_down", "_sum", "_route"]
ATTENTION, DECODE = ["_attention"], ["_cut", "_decode"]
CHUNK = ["_share", "_attention", "_merge"]
QUICK: list[tuple[Call, list[str]]] = [
    ({"kernel": "attention", "dtype": "bfloat16"}, ATTENTION),
    ({"kernel": "decode", "dtype": "bfloat16"}, DECODE),
    ({"kernel": "decode", "dtype": "bfloat16", "cache": "fp8_e4m3"}, DECODE),
    ({"kernel": "write", "dtype": "bfloat16", "cache": "fp8_e4m3"}, ["_write"]),
    ({"kernel": "copy", "dtype": "bfloat16"}, ["_copy"]),
    ({"kernel": "norm", "dtype": "bfloat16", "size": 4096, "summed": True}, ["_norm"]),
    ({"kernel": "rotary", "dtype": "bfloat16", "normed": True}, ["_rotate"]),
    ({"kernel": "gate", "dtype": "bfloat16", "size": 14336}, ["_silu_mul"]),
    ({**PRODUCT, "size": 4096, "outputs": 6144, "around": "normed"}, ["_product"]),
    ({**MIXTURE, "queries": 1}, EXPERTS),
    ({**DEEPSEEK, "chunks": False}, ["_latent", "_merge", "_compress"]),
]
"""The kernels of models, once each."""
VOCABULARIES: list[tuple[Call, list[str]]] = [  # of one tile, or many; multiples of 16, or not
    (
        {"kernel": "pick", "dtype": "float32", "size": size, "filtered": filtered},
        [*(CUT if filtered else []), "_bound", "_settle"],
    )
    for size, filtered in itertools.product((97, 50257, 128256), (False, True))
]
GATED: Call = {**PRODUCT, "size": 4096, "outputs": 14336, "around": "normed, gated"}
MODELS: list[tuple[Call, list[str]]] = [
    *QUICK,
    (
        {"kernel": "attention", "dtype": "float16", "head_dim": 80, "group": 7, "window": 128},
        ATTENTION,
    ),
    ({"kernel": "attention", "dtype": "bfloat16", "head_dim": 256, "softcap": 50.0}, ATTENTION),
    ({"kernel": "attention", "dtype": "float32", "head_dim": 64, "block_size": 12}, ATTENTION),
    ({"kernel": "attention", "dtype": "bfloat16", "cache": "fp8_e4m3"}, ATTENTION),
    ({"kernel": "attention", "dtype": "bfloat16", "queries": 20, "context": 1024}, ATTENTION),
    ({"kernel": "attention", "dtype": "bfloat16", "queries": 20}, CHUNK),
    (
        {"kernel": "decode", "dtype": "float32", "head_dim": 64, "window": 128, "softcap": 50.0},
        DECODE,
    ),
    ({"kernel": "decode", "dtype": "float16", "cache": "fp8_e5m2", "head_dim": 80}, DECODE),
    ({"kernel": "write", "dtype": "bfloat16"}, ["_write"]),
    ({"kernel": "copy", "dtype": "bfloat16", "cache": "fp8_e4m3"}, ["_copy"]),
    ({"kernel": "rotary", "dtype": "bfloat16", "cache": "fp8_e5m2", "normed": True}, ["_rotate"]),
    *VOCABULARIES,
    ({**MIXTURE, "queries": 8192}, ["_count", *EXPERTS]),
    ({**DEEPSEEK, "chunks": True}, ["_latent", "_compress"]),
    ({**PRODUCT, "size": 4096, "outputs": 4096, "around": "added"}, ["_product"]),
    ({**PRODUCT, "size": 14336, "outputs": 4096, "around": "added"}, ["_product"]),
    ({**PRODUCT, "size": 14336, "outputs": 4096, "around": "added", "queries": 64}, ["_product"]),
    (GATED, ["_product"]),
    ({**GATED, "weights": "int8"}, ["_product"]),
    ({**GATED, "weights": "fp8_e4m3"}, ["_product"]),
    (
        {**PRODUCT, "size": 4096, "outputs": 4096, "queries": 512, "weights": "int8"},
        ["_product"],
    ),
]
"""More shapes of them: 8 bits, fp32, toys' heads, large vocabularies, prefills."""
SPILLS: Call = {
    "kernel": "attention", "dtype": "bfloat16", "tiles": {"keys": 64, "warps": 4}, "capability": 80
}  # fmt: skip


def runs(table: list[tuple[Call, list[str]]], capabilities: Sequence[int]) -> None:
    """Fail unless each call launches these kernels on these GPUs, and none has a fault."""
    asked = [({**call, "capability": one}, names) for call, names in table for one in capabilities]
    answer = taken([*(call for call, _ in asked), SPILLS])
    for (call, names), launched in zip(asked, answer[:-1], strict=True):
        assert [kernel["name"] for kernel in launched] == names
        few = 0 if call["kernel"] == "pick" else FEW
        assert faults(call, launched, few) == []
        if call["kernel"] in ("attention", "latent", "grouped") and "head_dim" not in call:
            large = call["kernel"] != "grouped" or call["queries"] > 512
            units = "wgmma" if large and call["capability"] == 90 else "mma.sync"
            assert {one["products"] for one in launched if one["name"] in PRODUCTS} == {units}
        if call["kernel"] == "decode" and call["dtype"] != "float32":
            side_by_side(call, launched[1])
    assert [fault.partition(":")[0] for fault in faults(SPILLS, answer[-1])] == ["spills"]


def side_by_side(call: Call, kernel: Launched) -> None:
    """A grid of more programs than a multiprocessor holds would run in turns."""
    capability = call["capability"]
    room = {80: 164 * 1024, 90: 228 * 1024}[capability]
    dim, target, eight = call.get("head_dim", 128), divmod(capability, 10), "cache" in call
    tiles = decode_tiles(dim, 4, 2, target, eight)
    there = resident(tiles, dim, 1 if eight else 2, target, bool(call.get("window")))
    registers = -(-kernel["registers"] // 8) * 8
    assert there >= 2 and there * 32 * tiles.warps * registers <= 2**16, kernel
    assert there * (kernel["shared"] + 1024) <= room, kernel


def test_what_a_model_runs() -> None:
    """Attention, decodes and products; the slow tests compile all kernels."""
    runs([QUICK[place] for place in (0, 2, 8)], [90])


@pytest.mark.slow
def test_what_models_run() -> None:
    runs(MODELS, BOTH)


@pytest.mark.slow
def test_newer_gpus() -> None:
    """What a model runs compiles for them, in 16 bits without spills, and fits."""
    calls = [
        call for call, _ in MODELS if call["kernel"] not in ("pick", "grouped", "latent", "product")
    ]
    check(calls, (100, 120))


@pytest.mark.slow
def test_every_mixture_and_latent() -> None:
    """Widths of Mixtral 8x7B, DeepSeek-V3, its smaller kin and toys, for decodes and prefills."""
    mixtures = ((8, 4096, 14336), (256, 7168, 2048), (3, 33, 65))
    latents = ((512, 64, 128), (192, 24, 4), (64, 16, 16))
    dtypes = ("bfloat16", "float32")
    calls: list[Call] = [
        *(
            {
                "kernel": "grouped", "dtype": dtype, "queries": queries, "experts": count,
                "size": size, "inner": inner, "summed": count == 256,
            }
            for (count, size, inner), queries, dtype in itertools.product(
                mixtures, (1, 512, 8192), dtypes
            )
        ),
        *(
            {
                "kernel": "latent", "dtype": dtype, "rank": rank, "rope": rope, "heads": heads,
                "chunks": chunks,
            }
            for (rank, rope, heads), chunks, dtype in itertools.product(
                latents, (False, True), dtypes
            )
        ),
    ]  # fmt: skip
    check(calls)


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["attention", "decode"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("cache", ["auto", "fp8_e4m3"])  # the other format has the same code
def test_every_shape(kernel: str, dtype: str, cache: str) -> None:
    """All dims with all lengths of queries; groups, masks and contexts that are cut in turn."""
    half = dtype == "bfloat16"
    dims = (16, 64, 80, 128, 256) if half else (64, 128)
    lengths = (8,) if kernel == "decode" else (1, 16, 512) if half else (1, 512)
    masks = itertools.cycle([(1, None, None), (7, None, None), (4, 128, None), (4, None, 50.0)])
    contexts = itertools.cycle([None, 1024, None, 1024, 1024, None, 1024, None])
    shape: Call = {"kernel": kernel, "dtype": dtype, "cache": cache}
    found: list[Call] = []
    for dim, queries, _ in itertools.product(dims, lengths, range(2)):
        group, window, softcap = next(masks)
        found.append(
            {**shape, "head_dim": dim, "queries": queries, "group": group, "window": window,
             "softcap": softcap, "context": next(contexts)}
        )  # fmt: skip
    check(found)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_every_shape_around_attention(dtype: str) -> None:
    """Widths from a toy's to the largest Llama's; nothing spills in 32 bits either."""
    sizes, dims = (64, 896, 1024, 3584, 4096, 5120, 8192, 16384), (16, 64, 80, 128, 256)
    calls: list[Call] = [
        *({"kernel": "norm", "size": size, "summed": size % 3 > 0} for size in sizes),
        *(
            {"kernel": "rotary", "head_dim": dim, "group": group, "normed": (dim + group) % 2 > 0}
            for dim, group in itertools.product(dims, (1, 4, 7, 8, 16))
        ),
        *(
            {"kernel": kernel, "head_dim": dim, "cache": cache}
            for kernel, dim, cache in itertools.product(("rotary", "write"), (16, 80, 256), FORMATS)
        ),
        *({"kernel": "gate", "size": size} for size in (688, 4864, 14336, 53248)),
    ]
    check([{**call, "dtype": dtype} for call in calls], few=0)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_every_product(dtype: str) -> None:
    """Widths of a small model and, in 16 bits, of the largest Llama, for all tiles of tokens."""
    widths = [(896, 1152), (16384, 53248)]
    check(
        {
            **PRODUCT, "dtype": dtype, "size": size, "outputs": outputs, "queries": queries,
            "around": around, "weights": weights,
        }
        for size, outputs in (widths if dtype == "bfloat16" else widths[:1])
        for weights in ("auto", "int8", "fp8_e4m3")
        for queries, around in [
            *itertools.product((1, 32, 64), ("normed, gated", "bias, normed", "added")),
            *(() if weights == "auto" else ((64, ""), (512, ""))),
        ]
    )  # fmt: skip
