"""The Triton kernels of compressed keys and values, interpreted, held against fp64.

Run by `test_interpreter.py`.
"""

from __future__ import annotations

import pytest

from pagedsim.kernels import ops as kernels
from tests.kernels.interpreter import mend
from tests.kernels.latents import (
    LATENTS,
    PRESSED,
    Latent,
    Pressed,
    check_alone,
    check_latent,
    check_pressed,
)

mend()


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "on_gpu", lambda tensor: True)


@pytest.mark.parametrize("case", LATENTS, ids=str)
def test_attention(case: Latent) -> None:
    check_latent(case)


@pytest.mark.parametrize("case", PRESSED, ids=str)
def test_compress(case: Pressed) -> None:
    check_pressed(case)


def test_a_sequence_does_not_feel_its_neighbours() -> None:
    check_alone(Latent(((1, 600), (1, 0), (1, 40)), heads=2, rank=16, rope=4, block_size=64))
