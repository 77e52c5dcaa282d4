"""Attention by other packages: the arguments that they get, without a GPU, by stand-ins; their
results, on a GPU where they are installed; and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from pagedsim.core import ConfigError
from pagedsim.engine import attention as setting
from pagedsim.kernels import others
from pagedsim.kernels.batch import Attention, AttentionBatch
from pagedsim.kernels.float8 import FORMATS
from tests.kernels import other_packages
from tests.kernels.cases import Case, check, for_a_graph
from tests.kernels.harness import GPU, REFERENCE

CHUNKS = Case(((1, 40), (1, 7), (5, 30), (23, 23), (1, 9)))
DECODES = Case(((1, 70), (1, 1), (1, 16), (1, 17), (1, 32)))
CHANGES: list[dict[str, Any]] = [
    {},
    {"group": 1, "seats": True},
    {"block_size": 1},
    {"block_size": 12, "seats": True},
    {"window": 1},
    {"window": 17, "softcap": 2.0, "spread": 20.0},
    {"head_dim": 128, "window": 1000},
]
CASES = [replace(case, **change) for case in (CHUNKS, DECODES) for change in CHANGES]
PADDED = [replace(CHUNKS, sequences=(*CHUNKS.sequences, (0, 0)), tail=2), replace(DECODES, tail=2)]


def answer(attention: Attention, case: Case, batch: AttentionBatch | None = None) -> torch.Tensor:
    i = case.inputs
    masks: Any = {"scale": case.scale, "window": case.window, "softcap": case.softcap}
    return attention(i.q, i.k_cache, i.v_cache, batch or case.batch, **masks)


@REFERENCE
@pytest.mark.parametrize("name", other_packages.PACKAGES)
def test_what_packages_are_given(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    attention = other_packages.installed(name, monkeypatch)
    for case in [*CASES, *PADDED]:
        check(answer(attention, case), case)


@REFERENCE
@pytest.mark.parametrize("cache", FORMATS)
def test_flashinfer_reads_a_cache_of_8_bits(cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    attention = other_packages.installed("flashinfer", monkeypatch)
    for case in (CHUNKS, DECODES):
        check(answer(attention, replace(case, cache=cache)), replace(case, cache=cache))


@REFERENCE
@pytest.mark.parametrize("name", other_packages.PACKAGES)
def test_layers_with_different_masks_share_a_step(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    attention = other_packages.installed(name, monkeypatch)
    batch = CHUNKS.batch
    for window in (None, 5, None, 5, 9):
        case = replace(CHUNKS, window=window)
        check(answer(attention, case, batch), case)


@REFERENCE
@pytest.mark.parametrize("name", ["fa2", "fa3"])
def test_places_that_a_graph_has(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    attention = other_packages.installed(name, monkeypatch)
    for case in (CHUNKS, DECODES, replace(CHUNKS, tail=3), replace(CHUNKS, seats=True, window=8)):
        check(answer(attention, case, for_a_graph(case.batch, len(case.inputs.q))), case)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", [pytest.param(name, marks=GPU) for name in setting.PACKAGES])
def test_results(name: str, dtype: torch.dtype) -> None:
    """Those of the package itself, for the sizes that it has."""
    ran = 0
    for case in (CHUNKS, DECODES):
        for change in [*CHANGES, {"block_size": 256}, {"cache": "fp8_e4m3"}]:
            each = replace(case, dtype=dtype, device="cuda", **change)
            sizes = {"head_dim": each.head_dim, "block_size": each.block_size}
            try:
                attention = setting.attention_of(
                    name, torch.device("cuda"), dtype=dtype, held=each.held, **sizes
                )
            except ConfigError as error:
                refusal = str(error)
                continue
            check(answer(attention, each), each)
            ran += 1
    if not ran:
        pytest.skip(refusal)


SIZES: dict[str, Any] = {
    "dtype": torch.bfloat16, "held": torch.bfloat16, "head_dim": 128, "block_size": 16,
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "there", "change", "refusal"),
    [
        ("flashinfer", [], {}, "attention=flashinfer: needs flashinfer-python, which is not inst"),
        ("fa", [], {}, "attention=fa: needs flash-attn, which is not installed: pip install"),
        ("flashinfer", ["flashinfer-python"], {"head_dim": 80}, "heads of 64, 128, 256"),
        ("flashinfer", ["flashinfer-python"], {"dtype": torch.float32}, "^dtype=float32: "),
        (
            "flashinfer",
            ["flashinfer-python"],
            {},
            "=flashinfer: cannot be imported: No module",
        ),
        ("fa", ["flash-attn"], {}, "^block_size=16: attention=fa needs a multiple of 256"),
        (
            "fa",
            ["flash-attn"],
            {"block_size": 512},
            "imported: No module named .flash_attn.$",
        ),
        ("fa", ["flash-attn-3"], {}, "No module named .flash_attn_interface."),
        ("fa", ["flash-attn"], {"head_dim": 320}, "attention=fa: must be triton for heads of 320"),
        ("fa", ["flash-attn"], {"held": FORMATS["fp8_e5m2"]}, "^kv_cache_dtype=fp8_e5m2: "),
    ],
)
def test_what_is_refused(
    name: str, there: list[str], change: Any, refusal: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a Hopper GPU, with some packages."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(setting, "_installed", lambda package: package in there)
    monkeypatch.setattr(others, "import_module", missing)
    with pytest.raises(ConfigError, match=refusal):
        setting.attention_of(name, torch.device("cuda"), **{**SIZES, **change})


def missing(module: str) -> Any:
    raise ModuleNotFoundError(f"No module named {module!r}")


def test_an_old_gpu_and_a_cpu_have_ours_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    with pytest.raises(ConfigError, match=r"must be triton on a GPU of capability 7\.5, below"):
        setting.require("fa", torch.device("cuda"))
    with pytest.raises(ConfigError, match="attention=fa: must be triton on device=cpu"):
        setting.require("fa", torch.device("cpu"))
    setting.require("triton", torch.device("cpu"))
