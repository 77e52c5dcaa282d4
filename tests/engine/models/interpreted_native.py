"""The native decoder over the Triton kernels, in Triton's interpreter, against transformers.

Run with the interpreted kernels, by `tests/kernels/test_interpreter.py`.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from pagedsim.engine.models import load_model
from pagedsim.kernels import ops as kernels
from tests.engine.models.architectures import CONFIGS, VOCAB, build
from tests.engine.models.serving import alone, chunked, served, texts

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
    config: Any = CONFIGS[name]()
    config.num_hidden_layers = 2
    theirs = build(config)
    sequences = texts(LENGTHS, VOCAB)
    wanted = alone(theirs, sequences)
    monkeypatch.setattr(kernels, "on_gpu", lambda tensor: True)
    model = load_model(copy.deepcopy(theirs), model_impl="native")
    for one, other in zip(served(model, sequences, chunked(LENGTHS, 6)), wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4 * float(other.abs().max()))
