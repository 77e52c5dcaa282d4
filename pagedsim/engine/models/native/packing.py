"""Several weights as one, without a second copy of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def packed(parts: Sequence[torch.nn.Parameter]) -> torch.Tensor:
    """The parts as one tensor, row after row, of which each part is a view from then on.

    Parts that are so already, since another engine shares the model, are taken as they lie.
    """
    first, rows = parts[0].data, sum(len(part) for part in parts)
    end = first.data_ptr()
    for part in parts:
        if part.data_ptr() != end or part.untyped_storage().data_ptr() != _storage(first):
            break
        end += part.nbytes
    else:
        return first.as_strided((rows, *first.shape[1:]), first.stride())
    whole = torch.cat([part.data for part in parts])
    for part, rows_of_it in zip(parts, whole.split([len(part) for part in parts]), strict=True):
        part.data = rows_of_it
    return whole


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
