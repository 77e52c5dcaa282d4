"""Products on a CPU are those of a plain `Linear`, for any number of tokens."""

from __future__ import annotations

import os
import platform
from typing import Any

import pytest
import torch

from pagedsim.engine.models import load_model
from pagedsim.engine.models.native.linear import (
    COPY_SHARE,
    INT8_INPUTS,
    INT8_TOKENS,
    WEIGHTS_BEHIND,
    HostLinear,
    Linear,
    may_copy,
    on_host,
)

EDGES = (INT8_TOKENS, INT8_TOKENS + 1, WEIGHTS_BEHIND - 1, WEIGHTS_BEHIND)
ROWS = [0, 1, 2, *EDGES, WEIGHTS_BEHIND + 3]


def linear(
    weights: torch.dtype, dtype: torch.dtype, bias: bool = False, inputs: int = 40
) -> Linear:
    torch.manual_seed(0)
    weight = torch.randn(48, inputs) * 20
    scale = None if weights == dtype else torch.rand(48) / 100
    return Linear(weight.to(weights), torch.randn(48).to(dtype) if bias else None, scale)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("weights", [None, torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("inputs", [40, 2 * INT8_INPUTS])
def test_any_number_of_tokens(
    weights: torch.dtype | None, dtype: torch.dtype, bias: bool, inputs: int
) -> None:
    plain = linear(weights or dtype, dtype, bias, inputs)
    mine = on_host(plain, copies=True)
    assert type(mine) is HostLinear and mine.weight is plain.weight
    for rows in ROWS:
        x = torch.randn(rows, inputs).to(dtype)
        found, wanted = mine(x), plain(x)
        assert found.dtype == dtype and found.shape == wanted.shape and found.is_contiguous()
        off = 1e-5 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(
            found, wanted, rtol=off, atol=off * float(wanted.abs().amax()) if rows else 0.0
        )


def test_copies_are_of_float32_alone_and_where_there_is_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert on_host(linear(torch.float32, torch.float32), copies=False).tiles is None
    assert on_host(linear(torch.bfloat16, torch.bfloat16), copies=True).tiles is None
    module: Any = load_model("tiny").module
    size = sum(weight.nbytes for weight in module.parameters())
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    for room, copied in ((COPY_SHARE * size, True), (COPY_SHARE * size - 1, False)):
        monkeypatch.setattr(os, "sysconf", lambda name, room=room: room if "PAGES" in name else 1)
        assert may_copy(module) is copied
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert not may_copy(module)
