"""The roofline plot of an estimate."""

from __future__ import annotations

from typing import Any

import numpy as np

from pagedsim.report.roofline import draw_roofline
from pagedsim.report.style import drawing


def product(name: str, flop: float, read: float) -> dict[str, Any]:
    return {
        "name": name,
        "flop": flop,
        "bytes": read,
        "computing_s": flop / 300e12,
        "reading_s": read / 1e12,
    }


DATA: dict[str, Any] = {
    "prompt": 2048,
    "batches": {"one": 1, "full": 64},
    "peak": {"bandwidth": 2e12, "flop_rates": {"fp16": 400e12, "fp8": 800e12, "int8": 800e12}},
    "reached": {"bandwidth": 1e12, "flop_rate": 300e12},
    "products": {
        "prefill": [product("QKV", 4e12, 1e9), product("scores", 1e12, 0.0)],
        "decode_one": [product("QKV", 2e9, 1e9), product("up", 4e9, 2e9)],
        "decode_full": [product("QKV", 128e9, 1e9)],
    },
    "steps": {
        "prefill": {"flop": 5e12, "bytes": 1e9, "seconds": 0.02},
        "decode_one": {"flop": 6e9, "bytes": 3e9, "seconds": 0.004},
        "decode_full": {"flop": 128e9, "bytes": 1e9, "seconds": 0.002},
    },
}


def test_each_product_and_each_step_is_a_point_under_its_roof() -> None:
    with drawing():
        figure = draw_roofline(DATA)
    (axes,) = figure.axes
    points = [line for line in axes.get_lines() if line.get_marker() not in ("None", "")]
    roofs = [line for line in axes.get_lines() if line.get_marker() in ("None", "")]
    # QKV and up of one decode lie at one point; each step has one more, filled.
    assert len(points) == 4 + 3
    assert len(roofs) == 3  # fp16; fp8 and int8, which are one; what is reached
    right = axes.get_xlim()[1]
    for line in points:
        x, y = np.asarray(line.get_xydata(), float)[0]
        assert x < right
        assert y <= 1.001 * min(300e12, x * 1e12)
    texts = {text.get_text() for text in axes.texts}
    assert {"fp16", "fp8, int8", "reached", "QKV, up", "scores"} <= texts
    (legend,) = figure.legends
    labels = [text.get_text() for text in legend.get_texts()]
    assert labels == ["prefill of 2,048 tokens", "decode of 1", "decode of 64"]


def test_of_many_products_at_one_point_the_first_are_named() -> None:
    many = [product(name, 2e9, 1e9) for name in ("QKV", "output", "up", "down")]
    with drawing():
        figure = draw_roofline({**DATA, "products": {"decode_one": many}})
    assert "QKV, output and 2 more" in {text.get_text() for text in figure.axes[0].texts}
