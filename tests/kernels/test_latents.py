"""Compressed keys and values, against answers in fp64.

Every slot of the cache that no token of the case lives in holds NaN, and so do the other layers.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch

from pagedsim.kernels import ops as kernels
from pagedsim.kernels.batch import AttentionBatch
from tests.kernels.cases import for_a_graph
from tests.kernels.harness import GPU, HALF, INTERPRETED, everywhere, near

LAYERS, LAYER = 3, 1


@dataclass(frozen=True)
class Latent:
    """A batch: (query tokens, context length) a sequence, decodes first."""

    sequences: tuple[tuple[int, int], ...]
    heads: int = 4
    rank: int = 32
    rope: int = 8
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    tail: int = 0
    """Tokens after the last sequence, which are padding."""
    stored: bool = False
    """Whether block tables stand in rows of their own, as on a device."""
    spread: float = 1.0
    device: str = "cpu"

    @property
    def tokens(self) -> int:
        return sum(length for length, _ in self.sequences) + self.tail


@dataclass(frozen=True)
class Pressed:
    """Tokens of which the last is padding, before they are compressed."""

    tokens: int = 5
    heads: int = 3
    rank: int = 32
    rope: int = 8
    block_size: int = 4
    interleaved: bool = True
    dtype: torch.dtype = torch.float32
    device: str = "cpu"


DEEPSEEK: dict[str, Any] = {"heads": 128, "rank": 512, "rope": 64}
MIXED = ((1, 21), (1, 0), (1, 1), (7, 20), (9, 9), (2, 40))
LATENTS = [
    Latent(MIXED),
    Latent(MIXED, tail=3, stored=True, **HALF),
    Latent(MIXED, heads=1, block_size=1),
    Latent(((1, 30), (5, 33)), heads=20, block_size=12, **HALF),  # more heads than rows
    Latent(((1, 30), (5, 33)), heads=5, rank=24, rope=6),  # nothing is a power of two
    Latent(((1, 600), (1, 40), (1, 512)), heads=2, rank=16, rope=4, stored=True),  # parts
    Latent(((1, 1100), (3, 530)), heads=2, rank=16, rope=4, block_size=64, spread=8.0),
    Latent(((4, 4),)),
    Latent(((1, 0), (1, 0)), tail=1, **HALF),
]
LARGE = [
    Latent(((1, 700), (1, 0), (1, 2000), (30, 90), (200, 200)), tail=3, stored=True, **DEEPSEEK)
]
ALONE = (
    Latent(((1, 600), (1, 0), (1, 40)), heads=2, rank=16, rope=4, block_size=64)
    if INTERPRETED
    else pytest.param(
        Latent(
            ((1, 700), (1, 0), (1, 2000), (1, 512), (1, 33)),
            dtype=torch.bfloat16, device="cuda", **DEEPSEEK,
        ),
        marks=GPU,
    )
)  # fmt: skip
PRESSED = [
    *(Pressed(interleaved=interleaved) for interleaved in (True, False)),
    Pressed(heads=1, rank=24, rope=6, block_size=3),
    Pressed(heads=16, rank=128, rope=64, block_size=16, **HALF),
    Pressed(tokens=1),
    Pressed(tokens=0),
]


class Inputs(NamedTuple):
    q: torch.Tensor
    kept: torch.Tensor
    batch: AttentionBatch
    answer: torch.Tensor
    magnitude: torch.Tensor
    largest: float
    """Of the products that scores are sums of."""


@everywhere(LATENTS, large=LARGE)
def test_attention(case: Latent) -> None:
    inputs = _inputs(case)
    cache = inputs.kept[:, LAYER, 0]
    times = 1 + 4 * torch.finfo(torch.float32).eps / torch.finfo(case.dtype).eps * (
        2 + inputs.largest
    )
    for batch in (inputs.batch, for_a_graph(inputs.batch, case.tokens)):
        out = kernels.attend_latent(inputs.q, cache, batch, rank=case.rank, scale=_scale(case))
        near(out, inputs.answer, inputs.magnitude, times)


@pytest.mark.parametrize("case", [ALONE])
def test_a_result_is_independent_of_the_batch(case: Latent) -> None:
    """Each decode alone, to the bit."""
    inputs = _inputs(case)
    cache, batch = inputs.kept[:, LAYER, 0], inputs.batch
    given: dict[str, Any] = {"rank": case.rank, "scale": _scale(case)}
    whole = kernels.attend_latent(inputs.q, cache, batch, **given)
    for i in range(batch.num_decodes):
        tables, rows = batch.tables(slice(i, i + 1))
        one = AttentionBatch(
            tables, batch.query_start[:2], batch.context_lens[i : i + 1],
            batch.slots[i : i + 1], 1, rows=rows,
        )  # fmt: skip
        assert torch.equal(
            kernels.attend_latent(inputs.q[i : i + 1], cache, one, **given)[0], whole[i]
        )


@everywhere(PRESSED, large=[Pressed(tokens=300, **DEEPSEEK)])
def test_compress(case: Pressed) -> None:
    torch.manual_seed(0)
    to: dict[str, Any] = {"device": case.device, "dtype": case.dtype}
    width, size = case.rank + case.rope, case.block_size
    # Views into something wider, as products and absorbed queries are.
    q = torch.randn(case.tokens, case.heads, case.rope + 5).to(**to)[..., 5:]
    compressed = torch.randn(case.tokens, width + 3).to(**to)[:, 3:]
    angles = torch.rand(case.tokens, case.rope // 2, device=case.device) * 6
    cos, sin = angles.cos().to(case.dtype), angles.sin().to(case.dtype)
    weight = torch.randn(case.rank).to(**to)
    blocks = -(-(2 * case.tokens + 1) // size)
    slots = [blocks * size - 1 - 2 * token for token in range(case.tokens)]
    slots[-1:] = [-1] * min(1, case.tokens)
    nothing = torch.zeros(0, dtype=torch.int32, device=case.device)
    there = torch.tensor(slots, dtype=torch.int64, device=case.device)
    batch = AttentionBatch(nothing.view(0, 0), nothing, nothing, there, 0)
    kept = torch.full((blocks, LAYERS, 1, size, 1, width), torch.nan).to(**to)
    wide = torch.full((case.tokens, case.heads, width), torch.nan).to(**to)

    kernels.compress(
        q, compressed, torch.cat((cos, cos), 1), torch.cat((-sin, sin), 1), kept[:, LAYER, 0],
        batch, weight=weight, eps=1e-5, interleaved=case.interleaved, out=wide[..., case.rank :],
    )  # fmt: skip
    assert wide[..., : case.rank].isnan().all()
    near(wide[..., case.rank :], *_turned(case, q.double(), cos, sin), 3)
    latent = compressed[:, : case.rank].double()
    latent = latent * torch.rsqrt(latent.square().mean(1, keepdim=True) + 1e-5) * weight.double()
    key = _turned(case, compressed[:, None, case.rank :].double(), cos, sin)
    written = torch.zeros(kept.shape, dtype=torch.bool, device=case.device)
    for token, slot in enumerate(slots):
        if slot >= 0:
            at = slot // size, LAYER, 0, slot % size, 0
            written[at] = True
            near(kept[at][: case.rank], latent[token], latent[token].abs(), 3)
            near(kept[at][case.rank :], key[0][token, 0], key[1][token, 0], 3)
    assert torch.equal(kept.isnan(), ~written)


def _turned(
    case: Pressed, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each pair rotated, and how large the terms of the sums are."""
    low, high = (x[..., ::2], x[..., 1::2]) if case.interleaved else x.chunk(2, -1)
    c, s = cos[:, None].double(), sin[:, None].double()
    turned = torch.cat((low * c - high * s, high * c + low * s), -1)
    terms = torch.cat(((low * c).abs() + (high * s).abs(), (high * c).abs() + (low * s).abs()), -1)
    return turned, terms


def _scale(case: Latent) -> float:
    return float(case.spread * (case.rank + case.rope) ** -0.5)


def _inputs(case: Latent) -> Inputs:
    torch.manual_seed(0)
    rng, size, width = random.Random(0), case.block_size, case.rank + case.rope
    to: dict[str, Any] = {"device": case.device, "dtype": case.dtype}
    needs = [-(-context // size) for _, context in case.sequences]
    ids = rng.sample(range(sum(needs) + 3), sum(needs))
    kept = torch.full((sum(needs) + 3, LAYERS, 1, size, 1, width), torch.nan).to(case.dtype)
    q = torch.randn(case.tokens, case.heads + 1, width).to(case.dtype)[:, :-1]
    answer = torch.zeros(case.tokens, case.heads, case.rank, dtype=torch.float64)
    magnitude, largest, token, tables = answer.clone(), 0.0, 0, []
    for (length, context), need in zip(case.sequences, needs, strict=True):
        table, ids = ids[:need], ids[need:]
        tables.append(table)
        keys = torch.randn(context, width).to(case.dtype)
        for position, key in enumerate(keys):
            kept[table[position // size], LAYER, 0, position % size, 0] = key
        exact = keys.double()
        for i in range(length):
            seen = exact[: context - length + i + 1]
            if context:
                products = q[token + i].double() @ seen.T * _scale(case)
                sizes = q[token + i].double().abs() @ seen.abs().T * _scale(case)
                largest = max(largest, float(sizes.max()))
                weights = products.softmax(-1)
                answer[token + i] = weights @ seen[:, : case.rank]
                magnitude[token + i] = weights @ seen[:, : case.rank].abs()
        token += length
    batch = _batch(case, tables)
    return Inputs(
        q.to(**to), kept.to(**to), batch, answer.to(case.device), magnitude.to(case.device), largest
    )


def _batch(case: Latent, tables: list[list[int]]) -> AttentionBatch:
    """Tables in the order of the sequences, or in any other, with unused rows among them."""
    lengths = [length for length, _ in case.sequences]
    decodes = next((n for n, length in enumerate(lengths) if length != 1), len(lengths))
    order = list(range(len(tables) + 2))
    if case.stored:
        random.Random(1).shuffle(order)
    width = 1 + max(map(len, tables))
    store = torch.full((len(order), width), 2**30, dtype=torch.int32)
    for table, row in zip(tables, order, strict=False):
        store[row, : len(table)] = torch.tensor(table, dtype=torch.int32)
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    contexts = torch.tensor([context for _, context in case.sequences], dtype=torch.int32)
    rows = torch.tensor(order[: len(tables)], dtype=torch.int32)
    slots = torch.full((case.tokens,), -1)
    return AttentionBatch(
        store.to(case.device),
        starts.to(case.device),
        contexts.to(case.device),
        slots.to(case.device),
        decodes,
        case.sequences[decodes:],
        rows.to(case.device) if case.stored else None,
    )
