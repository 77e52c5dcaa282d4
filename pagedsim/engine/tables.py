"""The block tables of all who run, where attention reads them."""

from __future__ import annotations

import torch


class Tables:
    """They stay on the device; a step sets what is new in them, before it is computed."""

    def __init__(self, device: torch.device, seqs: int, blocks: int) -> None:
        """For `seqs` sequences of `blocks` blocks at most."""
        self.store = torch.zeros(seqs, blocks, dtype=torch.int32, device=device)
        """[sequences, blocks]: a row a sequence, as `rows.py` deals them out."""
        self._flat = self.store.view(-1)

    def set(self, places: torch.Tensor, blocks: torch.Tensor) -> None:
        """Set some entries, which are on the device as well."""
        if len(places):
            self._flat.index_copy_(0, places, blocks)

    @property
    def nbytes(self) -> int:
        """What they take of the device's memory."""
        return self.store.nbytes
