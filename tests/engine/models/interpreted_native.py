"""The native decoder and its products over the Triton kernels, in Triton's interpreter.

Run with the interpreted kernels, by `tests/kernels/test_interpreter.py`.
"""

from __future__ import annotations

import copy

import pytest
import torch

from pagedsim.engine.models import load_model
from pagedsim.kernels import ops as kernels
from tests.engine.architectures import CONFIGS, VOCAB, build
from tests.engine.models.serving import alone, chunked, equal, served, texts
from tests.engine.models.test_products import WEIGHTS, check
from tests.kernels.harness import mend

mend()

LENGTHS = (7, 12)
NAMES = ("qwen2", "qwen3", "qwen3-moe", "deepseek-v3")
"""Between them they have all that is fused: biases, windows, a tied head; norms of each head;
experts; compressed keys and values."""


@pytest.mark.parametrize(
    "name", [NAMES[0], *(pytest.param(name, marks=pytest.mark.slow) for name in NAMES[1:])]
)
def test_logits_are_those_of_each_sequence_alone(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = build(CONFIGS[name]())
    sequences = texts(LENGTHS, VOCAB)
    wanted = alone(theirs, sequences)
    monkeypatch.setattr(kernels, "on_gpu", lambda tensor: True)
    model = load_model(copy.deepcopy(theirs), model_impl="native")
    equal(served(model, sequences, chunked(LENGTHS, 6)), wanted)


@pytest.mark.parametrize("few", [False, True])
@pytest.mark.parametrize("weights", WEIGHTS, ids=str)
def test_what_a_layer_calls(
    weights: torch.dtype, few: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "on_gpu", lambda tensor: True)
    monkeypatch.setattr(kernels, "FEW", 32 if few else 0)
    check(weights, bias=True)
