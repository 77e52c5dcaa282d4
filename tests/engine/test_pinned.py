"""Pinned memory takes what was asked for, and is given back; CUDA is a stand-in."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from pagedsim.core import ConfigError
from pagedsim.engine import cache, runtime
from pagedsim.engine.cache import Cache, CacheShape

CUDA = torch.device("cuda")
SHAPE = CacheShape(layers=3, block_size=4, kv_heads=1, head_dim=8, dtype=torch.float32)
NEEDED = 5 * SHAPE.block_bytes


class Owner:
    """Its owner."""


class Cudart:
    """Registers memory, or does not."""

    def __init__(self, code: int) -> None:
        self.code = code
        self.calls: list[Any] = []

    def cudaHostRegister(self, place: int, size: int, flags: int) -> int:
        self.calls.append(("register", place, size))
        return self.code

    def cudaHostUnregister(self, place: int) -> int:
        self.calls.append(("unregister", place))
        return 0


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cudart]:
    cudart = Cudart(0)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    monkeypatch.setattr(
        torch.cuda, "synchronize", lambda device: cudart.calls.append(("wait", device))
    )
    yield cudart


def test_memory_is_registered_as_it_is_and_given_back(cuda: Cudart) -> None:
    owner = Owner()
    tensor = cache.pinned((5, *SHAPE.block), SHAPE.dtype, CUDA, owner)
    place = tensor.data_ptr()
    assert (tensor.nbytes, tensor.dtype) == (NEEDED, SHAPE.dtype)
    assert cuda.calls == [("register", place, NEEDED)]
    del owner
    gc.collect()
    assert cuda.calls[1:] == [("wait", CUDA), ("unregister", place)]


def test_nothing_is_not_registered(cuda: Cudart) -> None:
    assert cache.pinned((0, 3), SHAPE.dtype, CUDA, Owner()).shape == (0, 3)
    assert not cuda.calls


def test_what_cannot_be_registered_is_torch_s_if_the_next_power_of_two_is_there(
    cuda: Cudart, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda.code = 2
    asked: list[Any] = []

    def of_torch(*what: Any) -> torch.Tensor:
        asked.append(what)
        return torch.zeros(1)

    monkeypatch.setattr(cache, "_of_torch", of_torch)
    monkeypatch.setattr(cache, "_forget", lambda device: cuda.calls.append(("forget", device)))
    rounded = 4096
    assert NEEDED < rounded < 2 * NEEDED
    monkeypatch.setattr(runtime, "host_bytes", lambda: rounded)
    owner = Owner()
    cache.pinned((5, *SHAPE.block), SHAPE.dtype, CUDA, owner)
    assert asked == [((5, *SHAPE.block), SHAPE.dtype)]
    monkeypatch.setattr(runtime, "host_bytes", lambda: rounded - 1)
    with pytest.raises(ConfigError, match=r"power of two.*lower swap_space_gib or cpu_blocks"):
        cache.pinned((5, *SHAPE.block), SHAPE.dtype, CUDA, owner)
    assert len(asked) == 1
    del owner
    assert [call[0] for call in cuda.calls] == ["register", "forget"] * 2


def test_a_cache_on_a_gpu_has_its_pool_for_as_long_as_it_lives(
    cuda: Cudart, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CacheShape, "blank", lambda shape, blocks, device: torch.zeros(1))
    cache = Cache(SHAPE, 1, 5, CUDA)
    assert cuda.calls == [("register", cache.cpu.data_ptr(), NEEDED)]
    del cache
    gc.collect()
    assert [call[0] for call in cuda.calls] == ["register", "wait", "unregister"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_copies_of_registered_memory_are_not_waited_for() -> None:
    owner = Owner()
    host = cache.pinned((3, 1 << 20), torch.float32, torch.device("cuda"), owner)
    assert host.is_pinned()
    there = torch.rand(3, 1 << 20, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        host.copy_(there, non_blocking=True)
        back = torch.empty_like(there).copy_(host, non_blocking=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(back, there) and torch.equal(host, there.cpu())
    del owner
    assert not host.is_pinned()
