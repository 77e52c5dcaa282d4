"""The few instructions of PTX that kernels are written in, for Triton's interpreter."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


class Results(list[Any]):
    """As the interpreter's caller takes them."""

    get_result = list.__getitem__


def inline_asm(
    builder: Any, text: str, constraints: str, values: list[Any], types: list[Any], *_: object
) -> Results:
    """Carry out `text` for words of two elements of 16 bits, two results each."""
    from triton.runtime.interpreter import TensorHandle

    assert constraints == "=r,=r,r", "not a way that the kernels go"
    (given,) = (value.data for value in values)
    held = {"$2": np.ascontiguousarray(given).view(np.uint32)}
    for line in text.strip("{} ").split(";"):
        if line.strip() and not line.strip().startswith(".reg"):
            _instruction(line.strip(), held)
    halves = (held[name].view(np.float16).reshape(given.shape) for name in ("$0", "$1"))
    return Results(
        TensorHandle(half, kind.scalar) for half, kind in zip(halves, types, strict=True)
    )


def _instruction(line: str, held: dict[str, Any]) -> None:
    name, rest = line.split(" ", 1)
    if name == "mov.b32":  # {l, h}, a
        low, high, source = (word.strip("{} ") for word in rest.split(","))
        held[low], held[high] = held[source] & 0xFFFF, held[source] >> 16
        return
    to, *words = (word.strip() for word in rest.split(","))
    a, *more = (held[word] if word in held else np.uint32(int(word, 0)) for word in words)
    match name:
        case "and.b32":
            held[to] = a & more[0]
        case "or.b32":
            held[to] = a | more[0]
        case "shl.b32":
            held[to] = a << more[0]
        case "shr.b32":
            held[to] = a >> more[0]
        case "prmt.b32":  # bytes 0 to 3 are those of a, 4 to 7 of the next
            places = [int(more[1]) >> 4 * i & 7 for i in range(4)]
            chosen = [((a, more[0])[p // 4] >> np.uint32(8 * (p % 4))) & 0xFF for p in places]
            held[to] = sum(byte << np.uint32(8 * i) for i, byte in enumerate(chosen))
        case "cvt.rn.f16x2.e4m3x2":
            pairs = torch.from_numpy(np.stack([a & 0xFF, a >> 8], -1).astype(np.uint8))
            wide = pairs.view(torch.float8_e4m3fn).half().numpy()
            held[to] = wide.view(np.uint32)[..., 0]
        case other:
            raise NotImplementedError(other)
