"""Products compiled for an A100 and an H100, without either: nothing spills, everything fits."""

from __future__ import annotations

import importlib.util
import itertools
from typing import Any

import pytest

from tests.kernels.products import WEIGHTS
from tests.kernels.test_compile import BOTH, CHOSEN, FEW, taken

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed"
)

LAYERS: list[dict[str, Any]] = [  # of Llama-3.1-8B
    {"size": 4096, "outputs": 6144, "around": "normed"},
    {"size": 4096, "outputs": 4096, "around": "added"},
    {"size": 4096, "outputs": 14336, "around": "normed, gated"},
    {"size": 14336, "outputs": 4096, "around": "added"},
]


def faults(calls: list[dict[str, Any]], capability: int) -> list[str]:
    """What is wrong with each call's kernel once it is compiled."""
    found = []
    calls = [{"kernel": "product", "dtype": "bfloat16", "queries": 8} | call for call in calls]
    for call, (kernel,) in zip(calls, taken(calls, capability), strict=True):
        half = call["dtype"] != "float32"
        assert kernel["name"] == "_product"
        if kernel["spilled"] > (0 if half else FEW):
            found.append(f"spills: {call}: {kernel}")
        if kernel["shared"] > CHOSEN[capability]:
            found.append(f"too much shared memory: {call}: {kernel}")
        if half == (kernel["products"] == "none"):
            found.append(f"the wrong units: {call}: {kernel}")
    return found


@BOTH
def test_what_a_layer_runs(capability: int) -> None:
    eights = [{**LAYERS[2], "weights": weights} for weights in WEIGHTS]
    prefill = {"size": 4096, "outputs": 4096, "queries": 512, "weights": "int8"}
    assert faults([*LAYERS, *eights, prefill], capability) == []


@pytest.mark.slow
@BOTH
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_every_shape(dtype: str, capability: int) -> None:
    """Widths from a small model's to the largest Llama's, for all tiles of tokens."""
    shapes = [(896, 1152), (16384, 53248)]
    calls = [
        {"dtype": dtype, "size": size, "outputs": outputs, "queries": queries, "around": around,
         "weights": weights}
        for size, outputs in shapes
        for weights in ("auto", *WEIGHTS)
        for queries, around in [
            *itertools.product((1, 32), ("normed, gated", "bias, normed", "added")),
            *(() if weights == "auto" else ((64, ""), (512, ""))),
        ]
    ]  # fmt: skip
    assert faults(calls, capability) == []
