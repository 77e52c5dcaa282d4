"""Cases for sampling, and the definitions in plain Python: top-p sets, tokens, noise.

A set is sorted and summed in whole numbers; a token is the first maximum of every score.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from pagedsim.kernels import ops as kernels
from pagedsim.kernels.batch import SamplingTensors
from pagedsim.kernels.reference.sampling import gumbel, hashed, keep_top_p, token_hashes, weights

# -- sets ------------------------------------------------------------------------------------------

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


def check_set(logits: Tensor, p: Sequence[float], keep: Keep = keep_top_p) -> None:
    """The sets of some rows, to the token; what is kept is as it was."""
    before = logits.clone()
    found = keep(logits, column(p, str(logits.device)))
    rows = weights(logits).tolist()
    assert kept(found) == [smallest(row, one) for row, one in zip(rows, p, strict=True)]
    assert torch.equal(found, before.masked_fill(found == -torch.inf, -torch.inf))
    assert torch.equal(logits, before)


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


# -- tokens ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Settings:
    """Of one row; `min_p` is a probability."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


PLAIN = Settings()
GREEDY = Settings(temperature=0.0)
HOT, COLD = Settings(temperature=1e6), Settings(temperature=1e-5)
EVERY = Settings(0.8, 40, 0.9, 0.01)
MIXED = [
    PLAIN,
    GREEDY,
    Settings(0.6, top_k=5),
    Settings(1.7, top_p=0.9),
    Settings(min_p=0.05),
    EVERY,
]


def asked_of(rows: Sequence[Settings], device: str = "cpu") -> SamplingTensors:
    def column(values: list[Any], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    return SamplingTensors(
        column([row.temperature for row in rows], torch.float32),
        column([row.top_k for row in rows], torch.int32),
        column([row.top_p for row in rows], torch.float64),
        column([math.log(row.min_p) if row.min_p else -math.inf for row in rows], torch.float32),
        some_top_k=any(row.top_k for row in rows),
        some_top_p=any(row.top_p < 1 for row in rows),
        some_min_p=any(row.min_p for row in rows),
    )


def words_for(rows: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(1 << 31), 1 << 31, (rows, 2), generator=generator).int()


def check(logits: Tensor, settings: Sequence[Settings], seed: int = 0) -> None:
    """The tokens of some rows are those that the definition gives; the logits stay."""
    device = str(logits.device)
    before, words = logits.clone(), words_for(len(logits), seed)
    picked = kernels.pick(logits, asked_of(settings, device), words.to(device))
    wanted = [
        defined(row, one, mine)
        for row, one, mine in zip(logits.cpu(), settings, words, strict=True)
    ]
    assert picked.tolist() == wanted
    assert picked.dtype == torch.int64
    assert torch.equal(logits.nan_to_num(7.0), before.nan_to_num(7.0))


def defined(logits: Tensor, settings: Settings, words: Tensor) -> int:
    """One row's token."""
    if settings.temperature == 0:
        return int(logits.argmax())
    x = logits / torch.tensor(settings.temperature)
    if settings.top_k:
        x[x < x.sort(descending=True).values[settings.top_k - 1]] = -torch.inf
    if settings.top_p < 1:
        inside = torch.tensor(smallest(weights(x[None])[0].tolist(), settings.top_p))
        x = torch.full_like(x, -torch.inf).index_copy(0, inside, x[inside])
    if settings.min_p:
        x[x < x.max() + torch.tensor(math.log(settings.min_p))] = -torch.inf
    bits = hashed(token_hashes(len(x), x.device), words[0], words[1])
    return int((x + gumbel(bits)).argmax())


def hard(vocab: int) -> list[tuple[Tensor, Settings]]:
    """Rows on which a maximum is hard to find, each with its settings."""
    flat = torch.zeros(vocab)
    model = flat.clone().random_(generator=torch.Generator().manual_seed(vocab)) % 23 / 4
    holes = model.masked_fill(torch.arange(vocab) % 3 > 0, -torch.inf)
    alone = torch.full((vocab,), -torch.inf)
    alone[-1] = -3e38
    return [
        (flat, PLAIN),  # the noise decides
        (flat, COLD),
        (flat + 1e4, COLD),  # every score is the same number
        (-flat, GREEDY),
        (torch.where(model > 3, -0.0, 0.0) * 1, GREEDY),  # two zeros, equally large
        (model, HOT),
        (model, COLD),  # ties of the largest
        (model * 1e30, PLAIN),  # the noise is lost
        (model * 1e38, COLD),  # infinite
        (-model * 1e38, COLD),
        (holes, PLAIN),
        (holes, EVERY),
        (holes.neg(), PLAIN),  # +inf
        (alone, HOT),
        (alone, PLAIN),
        (torch.full((vocab,), -torch.inf), PLAIN),
        (torch.full((vocab,), -torch.inf), GREEDY),
        (model.masked_fill(model > 5, torch.nan), PLAIN),
        (model.masked_fill(model > 5, torch.nan), GREEDY),
    ]


@st.composite
def draws(draw: st.DrawFn) -> tuple[Tensor, list[Settings], int]:
    """A few rows of anything that logits may be, settings and a seed of the words."""
    vocab = draw(st.integers(1, 60))
    few = draw(st.lists(st.floats(-50, 50, width=32), min_size=1, max_size=4))
    token = st.one_of(st.sampled_from([*few, 0.0, -0.0, -math.inf]), st.floats(-50, 50, width=32))
    row = st.lists(token, min_size=vocab, max_size=vocab).filter(lambda x: max(x) > -math.inf)
    settings = st.builds(
        Settings,
        temperature=st.sampled_from([0.0, 1e-5, 0.3, 1.0, 1.9, 1e6]),
        top_k=st.sampled_from([0, 0, 1, min(7, vocab)]),
        top_p=st.sampled_from([1.0, 1.0, 0.5, 0.97]),
        min_p=st.sampled_from([0.0, 0.0, 0.1, 1.0]),
    )
    logits = torch.tensor(draw(st.lists(row, min_size=3, max_size=3)))
    asked = draw(st.lists(settings, min_size=3, max_size=3))
    asked = [GREEDY if one.temperature == 0 else one for one in asked]
    return logits, asked, draw(st.integers(0, 1 << 30))


# -- noise -----------------------------------------------------------------------------------------


def middles() -> Tensor:
    """Where a rounding decides: noise that in float64 lies almost between two float32.

    Of the 2^32 values of the bits these are all whose noise is within 8 roundings of float64 of
    such a middle. Everywhere else two logarithms that are right to a few roundings give the same
    float32.
    """
    return torch.tensor(ALL, dtype=torch.int32)


_MIDDLES = """
-2133696796 -2059685342 -2015242419 -1963779199 -1916076369 -1885515721 -1764022605 -1659531346
-1614659211 -1613371227 -1604440592 -1479697548 -1443314914 -1432430945 -1365266861 -1304433873
-1295166492 -1280818911 -1214221203 -1193703752 -1192642319 -1123170927 -1109984289 -1104705686
-1042867918 -1010375867 -965025619 -949361814 -935161317 -932426217 -923716151 -909903447
-894575739 -681330493 -677973814 -620083993 -587997882 -579180923 -568815645 -536802370 -491997424
-478931060 -365219806 -352735836 -334638484 -319169145 -296307466 -284923569 -274023865 -269135204
-235339055 -227625574 -220734635 -220394736 -200935407 -194760977 -183710663 -88516361 -64063422
-63336689 -3646429 -1536141 35928251 170851136 207944676 249808739 253332386 254203710 264039459
311700217 353070388 380477148 382135443 412811218 446041706 465959938 523239051 561136092
608450235 621184677 636059779 674884784 678583221 684857950 691646825 692982587 695713309
750557782 840446851 864982627 936207827 958245107 958286996 976157887 976395617 1072819898
1084646614 1100287982 1103130825 1115335835 1115605209 1120218401 1126195111 1131841387 1151251305
1154774390 1244416562 1284811917 1317046797 1383406043 1392836695 1428589168 1487957019 1520894728
1567003769 1630436611 1654643834 1779743144 1794366044 1796611116 1822970733 1825840944 1831195755
1849731706 1877390671 1961095431 2005660230 2006713942 2078648418 2095616111 2100198173 2123333331
"""
ALL = [int(bits) for bits in _MIDDLES.split()]
