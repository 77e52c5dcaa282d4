"""What 8-bit caches hold of numbers: the nearest there is, worked out by looking at all of them."""

from __future__ import annotations

import torch

from pagedsim.kernels import ops as kernels
from pagedsim.kernels.batch import AttentionBatch
from pagedsim.kernels.float8 import FORMATS

HEADS, DIM, BLOCK = 4, 128, 4


def check_stored(cache: str, dtype: torch.dtype, device: str = "cpu") -> None:
    """Fail unless `write_kv` and `rotate` round to the nearest, ties to even, and saturate."""
    values = _values(FORMATS[cache], dtype)
    k, v = values.view(-1, HEADS, DIM).to(device), -values.view(-1, HEADS, DIM).to(device)
    tokens = len(k)
    slots = torch.arange(tokens, device=device)
    nothing = torch.zeros(0, dtype=torch.int32, device=device)
    batch = AttentionBatch(nothing.view(0, 0), nothing, nothing, slots, 0)
    still, nowhere = torch.ones(tokens, DIM).to(k), torch.zeros(tokens, DIM).to(k)
    kv = torch.zeros(2, -(-tokens // BLOCK), 2, BLOCK, HEADS, DIM, dtype=torch.uint8, device=device)
    kv = kv.view(FORMATS[cache])
    kernels.write_kv(k, v, kv[0, :, 0], kv[0, :, 1], slots)
    qkv = torch.cat((k, k, v), 1).flatten(1)
    finite = qkv.isfinite().all(1)  # what is infinite, times the sine's 0, is no number
    kernels.rotate(qkv, still, nowhere, kv[1, :, 0], kv[1, :, 1], batch)
    for side, given in enumerate((k, v)):
        expected = _nearest(given.cpu(), FORMATS[cache])
        assert not expected.isnan().any()
        written, rotated = (
            one.transpose(0, 1)[side].flatten(0, 1)[:tokens].cpu().double()
            for one in (kv[0], kv[1])
        )
        assert torch.equal(written, expected)
        assert torch.equal(rotated[finite.cpu()], expected[finite.cpu()])


def check_no_number(cache: str, dtype: torch.dtype, device: str = "cpu") -> None:
    """Fail unless NaN stays NaN, so that it is not taken for a large number."""
    k = torch.full((1, HEADS, DIM), torch.nan, dtype=dtype, device=device)
    kv = torch.zeros(1, 2, BLOCK, HEADS, DIM, dtype=torch.uint8, device=device)
    kv = kv.view(FORMATS[cache])
    kernels.write_kv(k, k, kv[:, 0], kv[:, 1], torch.zeros(1, dtype=torch.int64, device=device))
    assert kv[:, :, 0].double().isnan().all()
    assert (kv[:, :, 1:].double() == 0).all()


def half_a_step(values: torch.Tensor, held: torch.dtype) -> torch.Tensor:
    """How far what a cache holds may be from the value that was given, inside its range."""
    info = torch.finfo(held)
    return values.abs().clamp(min=info.smallest_normal) * (info.eps / 2)


def _values(held: torch.dtype, dtype: torch.dtype) -> torch.Tensor:
    """All that it holds, what lies between two of them and beside that, the vast and the tiny."""
    there = torch.arange(256, dtype=torch.uint8).view(held).float()
    there = there[there.isfinite()].sort().values
    middle = (there[1:] + there[:-1]) / 2
    far = torch.tensor(torch.inf)
    torch.manual_seed(0)
    spread = torch.randn(600) * 10 ** torch.linspace(-9, 9, 600)
    edge = torch.finfo(held).max * torch.tensor([1.01, 1.1, 2, 1e3, 1e30, torch.inf])
    beside = torch.nextafter(middle, far), torch.nextafter(middle, -far)
    values = torch.cat((there, middle, *beside, spread, edge, -edge)).to(dtype)
    return torch.nn.functional.pad(values, (0, -len(values) % (HEADS * DIM)))


def _nearest(values: torch.Tensor, held: torch.dtype) -> torch.Tensor:
    """The nearest number for each value; of two the one with the even code."""
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[codes.view(held).double().isfinite()]
    there, most = codes.view(held).double(), torch.finfo(held).max
    apart = (values.double().clamp(-most, most).unsqueeze(-1) - there).abs()
    nearest = apart == apart.amin(-1, keepdim=True)
    return there[torch.where(nearest, codes & 1, 2).argmin(-1)]
