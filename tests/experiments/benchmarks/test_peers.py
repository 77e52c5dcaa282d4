"""Peers that are not installed here, as stand-in modules that check their arguments and attend."""

from __future__ import annotations

import importlib.machinery
import sys
from types import ModuleType
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from experiments.benchmarks import kernels as peers  # noqa: E402
from experiments.benchmarks.shapes import Case, Problem  # noqa: E402
from pagedsim.kernels import reference  # noqa: E402

CPU = torch.device("cpu")
CASES = [
    Case("tiny", 3, 1, 40),
    Case("tiny", 2, 24, 24),
    Case("tiny", 2, 8, 24),
    Case("tiny", 3, 1, 20, 8, beside=300),
]


def attention(q: Any, runs: list[tuple[Any, Any]], scale: float) -> Any:
    """Causal from the end of each context, [batch, queries, heads, dim]."""
    found = []
    for own, (k, v) in zip(q, runs, strict=True):
        batch = reference.batch_of(
            torch.zeros(1, 1, dtype=torch.int32),
            torch.tensor([0, len(own)], dtype=torch.int32),
            torch.tensor([len(k)], dtype=torch.int32),
        )
        found.append(reference.attention(own, k[None], v[None], batch, scale=scale))
    return torch.stack(found)


def unpaged(cache: Any, table: Any, length: int) -> Any:
    return cache[table.long()].flatten(0, 1)[:length]


def with_kvcache(
    q: Any, k: Any, v: Any, *, table: Any, cache_seqlens: Any, softmax_scale: float, causal: bool
) -> Any:
    assert causal and table.dtype == cache_seqlens.dtype == torch.int32
    lengths = cache_seqlens.tolist()
    runs = [
        (unpaged(k, own, length), unpaged(v, own, length))
        for own, length in zip(table, lengths, strict=True)
    ]
    return attention(q, runs, softmax_scale)


def second(q: Any, k: Any, v: Any, *, block_table: Any, **settings: Any) -> Any:
    assert k.shape[1] % 256 == 0, "Paged KV cache block size must be divisible by 256"
    return with_kvcache(q, k, v, table=block_table, **settings)


def third(q: Any, k: Any, v: Any, *, page_table: Any, **settings: Any) -> Any:
    return with_kvcache(q, k, v, table=page_table, **settings), "and the log-sum-exp"


def varlen_attn(
    query: Any,
    key: Any,
    value: Any,
    cu_seq_q: Any,
    cu_seq_k: Any,
    max_q: int,
    max_k: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
) -> Any:
    assert enable_gqa and window_size == (-1, 0)
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
    assert max_q == cu_seq_q.diff().max() and max_k == cu_seq_k.diff().max()
    sizes = cu_seq_k.diff().tolist()
    runs = list(zip(key.split(sizes), value.split(sizes), strict=True))
    rows = query.unflatten(0, (len(sizes), max_q))
    assert scale is not None
    return attention(rows, runs, scale).flatten(0, 1)


def older(
    query: Any,
    key: Any,
    value: Any,
    cu_seq_q: Any,
    cu_seq_k: Any,
    max_q: int,
    max_k: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
) -> Any:
    """The version without enable_gqa."""
    places = (cu_seq_q, cu_seq_k, max_q, max_k)
    named: dict[str, Any] = {"scale": scale, "window_size": window_size, "enable_gqa": True}
    return varlen_attn(query, key, value, *places, **named)


@pytest.fixture
def as_if_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "_sixteen_on_a_gpu", lambda problem: True)


def install(monkeypatch: pytest.MonkeyPatch, name: str, **functions: Any) -> None:
    module = ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    for own, function in functions.items():
        setattr(module, own, function)
    monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.usefixtures("as_if_on_a_gpu")
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize(
    ("peer", "name", "functions"),
    [
        ("flash", "flash_attn", {"flash_attn_with_kvcache": second}),
        ("flash", "flash_attn_interface", {"flash_attn_with_kvcache": third}),
        ("varlen", "torch.nn.attention.varlen", {"varlen_attn": varlen_attn}),
        ("varlen", "torch.nn.attention.varlen", {"varlen_attn": older}),
    ],
    ids=["flash 2", "flash 3", "varlen", "older varlen"],
)
def test_a_peer_computes_the_problem(
    peer: str,
    name: str,
    functions: dict[str, Any],
    case: Case,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install(monkeypatch, name, **functions)
    problem = Problem(case, torch.float32, CPU)
    contender = peers.PEERS[peer](problem)
    assert contender is not None
    assert problem.error(contender.rows(contender.call())) <= problem.allowed
    problem.batch.context_lens[0] -= 1  # the tables are shared; another result is seen
    off = peers.PEERS["flash"](problem) if peer == "flash" else None
    if off is not None:
        assert problem.error(off.rows(off.call())) > problem.allowed


@pytest.mark.parametrize("peer", ["flash", "varlen", "flashinfer"])
def test_a_cpu_has_none_of_them(peer: str) -> None:
    assert peers.PEERS[peer](Problem(CASES[0], torch.float32, CPU)) is None
