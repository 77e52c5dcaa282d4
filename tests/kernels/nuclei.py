"""Cases for top-p, and the set in plain Python: sorted, and summed in whole numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from hypothesis import strategies as st
from torch import Tensor

from pagedsim.kernels.reference.nucleus import keep_top_p, weights

Keep = Callable[[Tensor, Tensor], Tensor]
"""Rows and each one's p to rows with -inf outside of the set: the reference, or the kernels."""
NEAR_ONE = (1 - 1e-7, 1 - 1e-12, 1 - 2**-53)


def column(p: Sequence[float], device: str = "cpu") -> Tensor:
    return torch.tensor(p, dtype=torch.float64, device=device)[:, None]


def kept(logits: Tensor) -> list[list[int]]:
    """The tokens of each row that are not ruled out."""
    return [torch.nonzero(one > -torch.inf)[:, 0].tolist() for one in logits.cpu()]


def smallest(row: Sequence[float], p: float) -> list[int]:
    """The set, from the weights of one row."""
    steps = 2 ** (62 - (len(row) - 1).bit_length())
    whole = [int(weight * steps) for weight in row]
    needed = math.ceil(p * sum(whole))
    before, tokens = 0, []
    for token in sorted(range(len(row)), key=lambda i: (-row[i], i)):
        if before >= needed:
            break
        tokens.append(token)
        before += whole[token]
    return sorted(tokens)


def check(logits: Tensor, p: Sequence[float], keep: Keep = keep_top_p) -> None:
    """The sets of some rows, to the token; what is kept is as it was."""
    before = logits.clone()
    found = keep(logits, column(p, str(logits.device)))
    rows = weights(logits).tolist()
    assert kept(found) == [smallest(row, one) for row, one in zip(rows, p, strict=True)]
    assert torch.equal(found, before.masked_fill(found == -torch.inf, -torch.inf))
    assert torch.equal(logits, before)


def check_mass(logits: Tensor, p: float, keep: Keep = keep_top_p) -> None:
    """Against real arithmetic: the set reaches p, and without its last token it does not."""
    found = keep(logits, column([p] * len(logits), str(logits.device)))
    for one, mine in zip(logits.double().softmax(1).tolist(), kept(found), strict=True):
        inside = [one[token] for token in mine]
        assert math.fsum(inside) > p - 1e-6
        assert math.fsum(inside) - min(inside) < p + 1e-6


def likely(rows: int, vocab: int, device: str = "cpu", rounded: bool = True) -> Tensor:
    """Logits as a model in bfloat16 gives them: a few tokens stand out, and many tie."""
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(rows, vocab, generator=generator) * 2.5
    logits[:, : 10 * rows] += 8 * torch.rand(rows, min(vocab, 10 * rows), generator=generator)
    temperature = torch.linspace(0.5, 2, rows)[:, None]
    logits = (logits.bfloat16().float() if rounded else logits) / temperature
    return logits.to(device)


def met() -> tuple[Tensor, list[float]]:
    """Rows whose most probable tokens reach p by themselves; of some rows exactly."""
    logits = torch.tensor([[-i / 8, 0.0, -i / 4, 0.0] for i in range(1, 41)])
    return logits, [2 / sum(row) for row in weights(logits).tolist()]


def close() -> tuple[Tensor, list[float]]:
    """Rows of weights that are neighbours among the floats, some of them twice."""
    logits = -torch.arange(32).div(3, rounding_mode="floor").expand(31, -1) * 2.0**-24
    return logits.contiguous(), [i / 32 for i in range(1, 32)]


def edge(row: Sequence[float], count: int, side: int) -> float:
    """A p at the edge of the set of `count` tokens: what it sums to, or the next on a `side`."""
    best = sorted(row, reverse=True)
    p = sum(best[:count]) / sum(row)
    p = math.nextafter(p, math.inf * side) if side else p
    return min(max(p, 1e-9), 1 - 2**-53)


@st.composite
def rows_and_ps(draw: st.DrawFn) -> tuple[Tensor, list[float]]:
    """A few rows of anything that logits may be, and p where it is hard."""
    vocab = draw(st.integers(1, 60))
    few = draw(st.lists(st.floats(-50, 50, width=32), min_size=1, max_size=4))
    token = st.one_of(
        st.sampled_from([*few, 0.0, -0.0, -math.inf]),
        st.floats(-50, 50, width=32),
        st.floats(-(2.0**-99), 2.0**-99, width=32),
    )
    row = st.lists(token, min_size=vocab, max_size=vocab).filter(lambda x: max(x) > -math.inf)
    logits = torch.tensor(draw(st.lists(row, min_size=3, max_size=3)))
    ps = [
        draw(
            st.one_of(
                st.floats(1e-9, 1 - 1e-9),
                st.sampled_from([1e-300, *NEAR_ONE]),
                st.builds(edge, st.just(one), st.integers(1, vocab), st.sampled_from([-1, 0, 1])),
            )
        )
        for one in weights(logits).tolist()
    ]
    return logits, ps
