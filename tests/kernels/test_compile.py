"""The kernels compiled for an A100 and an H100, without either: nothing spills, everything fits."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pagedsim.kernels.float8 import FORMATS
from pagedsim.kernels.tiles import decode_tiles, resident

ROOT = Path(__file__).resolve().parent.parent.parent
BOTH = pytest.mark.parametrize("capability", [80, 90])

SHARED = {80: 163 * 1024, 90: 227 * 1024}
"""Bytes that one program may have."""
CHOSEN = {80: 99 * 1024, 90: 227 * 1024}
"""The same for tiles that the kernels choose: 8.6 and 8.9 have less than 8.0 and get the same."""

FEW = 40
"""Bytes that may spill in fp32, which does without tensor cores and is for checking, and in toy
models' heads of less than 64 dims. To fit more programs side by side, ptxas now and then stops at
56 to 96 registers there and spills a handful; more than that is a fault."""

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed"
)


def taken(calls: list[dict[str, Any]], capability: int | None = None) -> list[list[dict[str, Any]]]:
    """What `compiling.py` says of each call's kernels; a call names its GPU, or all are for one."""
    child = subprocess.run(
        [sys.executable, "-m", "tests.kernels.compiling"],
        input=json.dumps(
            [call | ({"capability": capability} if capability else {}) for call in calls]
        ),
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"},
        capture_output=True,
        text=True,
    )
    assert child.returncode == 0, child.stderr
    answer: list[list[dict[str, Any]]] = json.loads(child.stdout)
    return answer


PRODUCTS = ("_attention", "_decode", "_latent", "_up", "_down")
"""What is bound by matrix products, or has them on its way."""


def faults(call: dict[str, Any], kernels: list[dict[str, Any]], capability: int) -> list[str]:
    half = call["dtype"] != "float32"
    found = []
    for kernel in kernels:
        says = f"{call}: {kernel}"
        if kernel["spilled"] > (0 if half and call.get("head_dim", 128) >= 64 else FEW):
            found.append(f"spills: {says}")
        if kernel["shared"] > CHOSEN[capability]:
            found.append(f"too much shared memory: {says}")
        if kernel["name"] in PRODUCTS and half == (kernel["products"] == "none"):
            found.append(f"the wrong units: {says}")
    return found


MODEL: list[dict[str, Any]] = [
    {"kernel": "attention", "dtype": "bfloat16"},
    {"kernel": "attention", "dtype": "float16", "head_dim": 80, "group": 7, "window": 128},
    {"kernel": "attention", "dtype": "bfloat16", "head_dim": 256, "softcap": 50.0},
    {"kernel": "attention", "dtype": "float32", "head_dim": 64, "block_size": 12},
    {"kernel": "decode", "dtype": "bfloat16"},
    {"kernel": "decode", "dtype": "float32", "head_dim": 64, "window": 128, "softcap": 50.0},
    {"kernel": "write", "dtype": "bfloat16"},
    {"kernel": "copy", "dtype": "bfloat16"},
    {"kernel": "norm", "dtype": "bfloat16", "size": 4096, "summed": True},
    {"kernel": "rotary", "dtype": "bfloat16", "normed": True},
    {"kernel": "gate", "dtype": "bfloat16", "size": 14336},
    {"kernel": "attention", "dtype": "bfloat16", "cache": "fp8_e4m3"},
    {"kernel": "decode", "dtype": "bfloat16", "cache": "fp8_e4m3"},
    {"kernel": "decode", "dtype": "float16", "cache": "fp8_e5m2", "head_dim": 80},
    {"kernel": "write", "dtype": "bfloat16", "cache": "fp8_e4m3"},
    {"kernel": "rotary", "dtype": "bfloat16", "cache": "fp8_e5m2", "normed": True},
    {"kernel": "copy", "dtype": "bfloat16", "cache": "fp8_e4m3"},
]
MIXTURE: dict[str, Any] = {"experts": 128, "size": 2048, "inner": 768}  # Qwen3-30B-A3B's
MIXTURES: list[dict[str, Any]] = [
    {"kernel": "grouped", "dtype": "bfloat16", "queries": queries, **MIXTURE}
    for queries in (1, 8192)
]
DEEPSEEK: dict[str, Any] = {"kernel": "latent", "rank": 512, "rope": 64}
LATENTS: list[dict[str, Any]] = [
    {**DEEPSEEK, "dtype": "bfloat16", "heads": 128, "chunks": chunks} for chunks in (False, True)
]
VOCABULARIES: list[dict[str, Any]] = [  # rows of one tile, or many; at multiples of 16, or not
    {"kernel": "pick", "dtype": "float32", "size": size, "filtered": filtered}
    for size in (97, 50257, 128256)
    for filtered in (False, True)
]
CUT = [*["_count"] * 4, "_peak", "_mass", *["_weigh"] * 3, "_tie"]
SPILLS = {"kernel": "attention", "dtype": "bfloat16", "tiles": {"keys": 64, "warps": 4}}


@pytest.fixture(scope="module")
def quick() -> dict[int, list[list[dict[str, Any]]]]:
    """What a model runs, its vocabularies, a mixture of experts, compressed keys and values and, on
    8.0, what spills: compiled by one process."""
    calls = {80: [*MODEL, *VOCABULARIES, *MIXTURES, *LATENTS, SPILLS]}
    calls[90] = calls[80][:-1]
    both = [{**call, "capability": one} for one, of_one in calls.items() for call in of_one]
    found = iter(taken(both))
    return {one: [next(found) for _ in of_one] for one, of_one in calls.items()}


@BOTH
def test_what_a_model_runs(capability: int, quick: dict[int, Any]) -> None:
    kernels = quick[capability][: len(MODEL)]
    assert [[kernel["name"] for kernel in launched] for launched in kernels] == [
        *[["_attention"]] * 4,
        *[["_cut", "_decode"]] * 2,
        ["_write"],
        ["_copy"],
        ["_norm"],
        ["_rotate"],
        ["_silu_mul"],
        ["_attention"],
        *[["_cut", "_decode"]] * 2,
        ["_write"],
        ["_rotate"],
        ["_copy"],
    ]
    for whole in (kernels[0], kernels[11]):  # of what is in 8 bits, too
        assert whole[0]["products"] == ("wgmma" if capability == 90 else "mma.sync")
    for call, launched in zip(MODEL, kernels, strict=True):
        assert faults(call, launched, capability) == []


@BOTH
def test_decodes_run_side_by_side_as_they_are_launched(
    capability: int, quick: dict[int, Any]
) -> None:
    """A grid of more programs than a multiprocessor holds would run in turns."""
    room = {80: 164 * 1024, 90: 228 * 1024}[capability]
    for call, launched in zip(MODEL, quick[capability], strict=False):
        if call["kernel"] == "decode" and call["dtype"] != "float32":
            dim, target = call.get("head_dim", 128), divmod(capability, 10)
            eight = "cache" in call
            tiles = decode_tiles(dim, 4, 2, target, eight)
            there = resident(tiles, dim, 1 if eight else 2, target)
            _, kernel = launched
            registers = -(-kernel["registers"] // 8) * 8
            assert there >= 2 and there * 32 * tiles.warps * registers <= 2**16, kernel
            assert there * (kernel["shared"] + 1024) <= room, kernel


@pytest.mark.slow
@pytest.mark.parametrize(("capability", "shared"), [(100, 227), (120, 99)])
def test_newer_gpus(capability: int, shared: int) -> None:
    """What a model runs compiles for them, in 16 bits without spills, and fits."""
    for call, launched in zip(MODEL, taken(MODEL, capability), strict=True):
        for kernel in launched:
            most = FEW if call["dtype"] == "float32" else 0
            assert kernel["spilled"] <= most, (call, kernel)
            assert kernel["shared"] <= shared * 1024, (call, kernel)


@BOTH
def test_no_vocabulary_spills(capability: int, quick: dict[int, Any]) -> None:
    kernels = quick[capability][len(MODEL) :][: len(VOCABULARIES)]
    for call, launched in zip(VOCABULARIES, kernels, strict=True):
        before = CUT if call["filtered"] else []
        assert [kernel["name"] for kernel in launched] == [*before, "_bound", "_settle"]
        for kernel in launched:
            assert kernel["spilled"] == 0, (call, kernel)


@BOTH
def test_a_mixture_of_experts(capability: int, quick: dict[int, Any]) -> None:
    few, many = quick[capability][len(MODEL) + len(VOCABULARIES) :][: len(MIXTURES)]
    names = ["_list", "_up", "_down", "_sum", "_route"]
    assert [kernel["name"] for kernel in few] == names
    assert [kernel["name"] for kernel in many] == ["_count", *names]
    for call, launched in zip(MIXTURES, (few, many), strict=True):
        assert faults(call, launched, capability) == []
    assert {kernel["products"] for kernel in few[1:3]} == {"mma.sync"}
    units = "wgmma" if capability == 90 else "mma.sync"
    assert {kernel["products"] for kernel in many[2:4]} == {units}


@pytest.mark.slow
@BOTH
def test_every_mixture(capability: int) -> None:
    """Widths of Mixtral 8x7B, DeepSeek-V3 and a toy, and tokens from a decode's to a prefill's."""
    shapes = ((8, 4096, 14336), (256, 7168, 2048), (4, 64, 48), (3, 33, 65))
    calls: list[dict[str, Any]] = [
        {
            "kernel": "grouped",
            "dtype": dtype,
            "queries": queries,
            "experts": count,
            "size": size,
            "inner": inner,
            "summed": count == 256,
        }
        for (count, size, inner), queries, dtype in itertools.product(
            shapes, (1, 512, 8192), ("bfloat16", "float32")
        )
    ]
    found = zip(calls, taken(calls, capability), strict=True)
    assert [fault for call, launched in found for fault in faults(call, launched, capability)] == []


@BOTH
def test_compressed_keys_and_values(capability: int, quick: dict[int, Any]) -> None:
    begin = len(MODEL) + len(VOCABULARIES) + len(MIXTURES)
    found = quick[capability][begin:][: len(LATENTS)]
    names = [[kernel["name"] for kernel in launched] for launched in found]
    assert names == [["_latent", "_merge", "_compress"], ["_latent", "_compress"]]
    for call, launched in zip(LATENTS, found, strict=True):
        assert faults(call, launched, capability) == []
        assert launched[0]["products"] == ("wgmma" if capability == 90 else "mma.sync")


@pytest.mark.slow
@BOTH
def test_every_latent(capability: int) -> None:
    """From the heads of DeepSeek-V3 to those of its smaller kin and of toys."""
    widths = ((512, 64), (256, 32), (192, 24), (128, 32), (96, 16), (64, 16))
    shapes = [(*width, heads) for width in widths for heads in (4, 16, 128)]
    calls = [
        {**DEEPSEEK, "rank": rank, "rope": rope, "heads": heads, "chunks": chunks, "dtype": dtype}
        for (rank, rope, heads), chunks, dtype in itertools.product(
            shapes, (False, True), ("bfloat16", "float32")
        )
    ]
    found = zip(calls, taken(calls, capability), strict=True)
    assert [fault for call, launched in found for fault in faults(call, launched, capability)] == []


def test_a_spill_is_seen(quick: dict[int, Any]) -> None:
    (fault,) = (f for f in faults(SPILLS, quick[80][-1], 80) if f.startswith("spills"))
    assert fault


@pytest.mark.slow
@BOTH
@pytest.mark.parametrize("kernel", ["attention", "decode"])
@pytest.mark.parametrize(
    ("dtype", "cache"),
    [
        *(("bfloat16", "auto"), ("float32", "auto"), ("float32", "fp8_e4m3")),
        *(("bfloat16", cache) for cache in FORMATS),
    ],
)
def test_every_shape(kernel: str, dtype: str, cache: str, capability: int) -> None:
    half = dtype == "bfloat16"
    dims = (16, 64, 80, 128, 256) if half else (64, 128)
    lengths = (8,) if kernel == "decode" else (1, 16, 512) if half else (1, 512)
    masks = [(1, None, None), (7, None, None), (4, 128, None), (4, None, 50.0)]
    calls = [
        {
            "kernel": kernel,
            "dtype": dtype,
            "cache": cache,
            "head_dim": dim,
            "group": group,
            "queries": queries,
            "window": window,
            "softcap": softcap,
        }
        for dim, queries, (group, window, softcap) in itertools.product(dims, lengths, masks)
    ]
    found = zip(calls, taken(calls, capability), strict=True)
    assert [fault for call, launched in found for fault in faults(call, launched, capability)] == []


@pytest.mark.slow
@BOTH
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_every_shape_around_attention(dtype: str, capability: int) -> None:
    """Widths from a toy's to the largest Llama's; nothing spills in 32 bits either."""
    sizes = (64, 896, 1024, 3584, 4096, 5120, 8192, 16384)
    calls: list[dict[str, Any]] = [
        *(
            {"kernel": "norm", "size": size, "summed": summed}
            for size, summed in itertools.product(sizes, (True, False))
        ),
        *(
            {"kernel": "rotary", "head_dim": dim, "group": group, "normed": normed}
            for dim, group, normed in itertools.product(
                (16, 64, 80, 128, 256), (1, 4, 7, 8, 16), (True, False)
            )
        ),
        *(
            {"kernel": kernel, "head_dim": dim, "cache": cache}
            for kernel, dim, cache in itertools.product(
                ("rotary", "write"), (16, 80, 128, 256), FORMATS
            )
        ),
        *({"kernel": "gate", "size": size} for size in (688, 4864, 14336, 53248)),
    ]
    calls = [{"dtype": dtype, **call} for call in calls]
    for call, (kernel,) in zip(calls, taken(calls, capability), strict=True):
        assert kernel["spilled"] == 0, (call, kernel)
        assert kernel["shared"] <= CHOSEN[capability], (call, kernel)


@pytest.mark.slow
@BOTH
def test_every_depth_of_the_pipeline(capability: int) -> None:
    """The depths that a sweep on a GPU tries, on Llama-3-8B's shape, fit."""
    calls = [
        {"kernel": kernel, "dtype": "bfloat16", "cache": cache, "tiles": tiles | {"stages": stages}}
        # Tiles of 128 keys have room for three of them; the tuner screens what has none.
        for kernel, tiles in (("attention", {"keys": 64}), ("decode", {}))
        for cache in ("auto", "fp8_e4m3")
        for stages in (2, 3, 5, 7)
    ]
    for call, launched in zip(calls, taken(calls, capability), strict=True):
        for kernel in launched:
            assert kernel["shared"] <= SHARED[capability], (call, kernel)
