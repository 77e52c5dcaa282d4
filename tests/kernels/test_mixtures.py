"""Mixtures of experts, against answers in fp64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from pagedsim.kernels import ops as kernels
from tests.kernels.harness import GPU, HALF, INTERPRETED, REFERENCE, everywhere, near


@dataclass(frozen=True)
class Mixture:
    """Tokens that choose `each` of so many experts."""

    tokens: int = 9
    count: int = 5
    each: int = 2
    size: int = 48
    inner: int = 40
    dtype: torch.dtype = torch.float32
    shared: bool = False
    crowded: bool = False
    """All tokens choose the same experts, the last ones."""
    device: str = "cpu"


MIXTURES = [
    Mixture(),
    Mixture(shared=True, **HALF),
    Mixture(tokens=1, count=8, each=3, **HALF),
    Mixture(tokens=0),
    Mixture(count=1, each=1, shared=True),
    Mixture(tokens=40, crowded=True, **HALF),  # tiles that are full, and experts without any
    Mixture(tokens=300, count=3, size=33, inner=65),  # choices that are counted beforehand
    Mixture(size=160, inner=136, **HALF),  # more than one tile of columns and of depth
]


def drawn(case: Mixture) -> dict[str, torch.Tensor]:
    """The arguments of `ops.experts`; x is a view into something wider."""
    torch.manual_seed(0)
    to: dict[str, Any] = {"device": case.device, "dtype": case.dtype}
    x = torch.randn(case.tokens, case.size + 3).to(**to)[:, : case.size]
    gate_up = (torch.randn(case.count, 2 * case.inner, case.size) * case.size**-0.5).to(**to)
    down = (torch.randn(case.count, case.size, case.inner) * case.inner**-0.5).to(**to)
    scores = torch.rand(case.tokens, case.count)
    if case.crowded:
        scores += torch.arange(case.count)
    weights, chosen = scores.topk(case.each)
    found = {"x": x, "gate_up": gate_up, "down": down}
    found |= {"chosen": chosen.to(case.device), "weights": weights.to(case.device)}
    return found | ({"shared": torch.randn_like(x)} if case.shared else {})


@everywhere(MIXTURES, large=[Mixture(tokens, 64, 8, 512, 256) for tokens in (3, 700)])
def test_mixture(case: Mixture) -> None:
    given = drawn(case)
    answer, magnitude = _answer(**given)
    near(kernels.experts(**given), answer, magnitude, 3)


@dataclass(frozen=True)
class Route:
    """Tokens and so many experts of which each passes some."""

    tokens: int = 9
    count: int = 8
    each: int = 2
    groups: int = 1
    kept: int = 1
    sigmoid: bool = False
    sums_to_one: bool = True
    dtype: torch.dtype = torch.float32
    spread: float = 2.0
    device: str = "cpu"


ROUTES = [
    Route(),
    Route(sums_to_one=False, **HALF),
    Route(count=60, each=4, spread=30.0),
    Route(tokens=1, count=1, each=1),
    Route(tokens=0),
    Route(sigmoid=True),
    Route(count=24, each=5, groups=4, kept=2, sigmoid=True),
    Route(count=256, each=8, groups=8, kept=4, sigmoid=True, sums_to_one=False, **HALF),
    Route(count=9, each=3, groups=3, kept=2, sigmoid=True),
]


@everywhere(ROUTES, plain=[None], gpu=[None])
def test_route(case: Route) -> None:
    """The best experts, worked out one by one, with their weights."""
    torch.manual_seed(0)
    # Whole multiples apart, so that no two scores are equal and rounding changes no order.
    steps = torch.rand(case.tokens, case.count).argsort(1).double() / case.count - 0.5
    logits = (case.spread * steps).to(case.dtype)
    bias = torch.randn(case.count) if case.sigmoid else None
    wide = torch.zeros(case.tokens, case.count + 3, dtype=case.dtype, device=case.device)
    wide[:, : case.count] = logits
    chosen, weights = kernels.route(
        wide[:, : case.count], case.each, sums_to_one=case.sums_to_one,
        bias=None if bias is None else bias.to(case.device), groups=case.groups, kept=case.kept,
        scale=1.5, dtype=case.dtype,
    )  # fmt: skip
    answer, expected = [], []
    for row in logits.double():
        scores = row.softmax(0) if bias is None else row.sigmoid()
        ranked = (scores if bias is None else scores + bias.double()).tolist()
        width = case.count // case.groups
        best = sorted(
            range(case.groups),
            key=lambda group: -sum(sorted(ranked[group * width : (group + 1) * width])[-2:]),
        )[: case.kept]
        allowed = [expert for expert in range(case.count) if expert // width in best]
        order = sorted(allowed, key=lambda expert: -ranked[expert])[: case.each]
        share = scores[order] / (scores[order].sum() if case.sums_to_one else 1)
        answer.append(order)
        expected.append((1.5 * share).tolist())
    assert chosen.tolist() == answer
    if answer:
        exact = torch.tensor(expected, dtype=torch.float64)
        near(weights.cpu(), exact, exact * (1 + case.spread / 16), 2)
    assert weights.dtype == case.dtype and weights.shape == (case.tokens, case.each)


@pytest.mark.parametrize(
    ("case", "others"),
    [(Mixture(tokens=12, shared=True, dtype=torch.float16), 5)]
    if INTERPRETED
    else [
        pytest.param(Mixture(300, 16, 4, 256, 128, torch.bfloat16, device="cuda"), 37, marks=GPU)
    ],
)
def test_a_result_is_independent_of_the_batch(case: Mixture, others: int) -> None:
    """Bit for bit.

    The same number of tokens, as many as make the same tiles.
    """
    given = drawn(case)
    whole = kernels.experts(**given)
    for token in range(0, case.tokens, others):
        moved = given | {
            name: given[name].roll(-token, 0)
            for name in ("x", "chosen", "weights", "shared")
            if name in given
        }
        moved["x"] = moved["x"].clone()
        moved["x"][1:] = 7.0
        assert torch.equal(kernels.experts(**moved)[0], whole[token])


@REFERENCE
@pytest.mark.parametrize("wrong", ["choices", "weights", "experts"])
def test_what_does_not_fit_is_refused(wrong: str) -> None:
    given = drawn(Mixture())
    if wrong == "experts":
        given["down"] = given["down"].transpose(1, 2)
    else:
        name = {"choices": "chosen", "weights": "weights"}[wrong]
        given[name] = given[name][:-1]
    with pytest.raises(ValueError):
        kernels.experts(**given)


def _answer(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    shared: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token by token, and how large the terms of each sum are that were rounded."""
    answer = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    magnitude = answer.clone()
    if shared is not None:
        answer += shared.double()
        magnitude += shared.double().abs()
    for token in range(len(x)):
        row = x[token].double()
        for expert, weight in zip(chosen[token].tolist(), weights[token].tolist(), strict=True):
            matrix, back = gate_up[expert].double(), down[expert].double()
            gate, up = (matrix @ row).chunk(2)
            sizes, more = (matrix.abs() @ row.abs()).chunk(2)
            inside = gate * gate.sigmoid() * up
            answer[token] += weight * (back @ inside)
            # SiLU's slope is less than 1.1.
            error = inside.abs() + 1.1 * sizes * up.abs() + gate.abs() * more
            magnitude[token] += weight * (back.abs() @ error)
    return answer, magnitude
