"""What is compiled after the warm-up: nothing, whatever is asked for.

A program of its own (`test_nothing_waits.py` runs it), because it puts a stand-in in the place of
Triton's driver. Kernels are asked for as a GPU's engine asks; where Triton would compile one, its
name is noted.

    python -m tests.engine.sampling.rehearsed
"""

from __future__ import annotations

import json
import sys
from typing import Any
from unittest.mock import patch

import torch
from triton.runtime.jit import JITFunction

from experiments.benchmarks.fake_gpu import FAKE, FakeGPU, use_target
from pagedsim.engine.sampler import Draw, Sampler, rehearse_sampling
from tests.engine.sampling.test_nothing_waits import FEW, params_of, rows_of

VOCABULARIES = (97, 50257, 128256)
COUNTS = (1, 2, 3, 8, 16, 17, 64)
"""Of rows."""


def noted(names: list[str]) -> Any:
    """In the place of JITFunction._do_compile."""

    def note(self: Any, key: Any, signature: Any, device: Any, *rest: Any, **other: Any) -> None:
        names.append(self.fn.__name__)
        self.device_caches[device][0][key] = self

    return note


def asked(self: Any, grid: Any) -> Any:
    """In the place of a launch: the kernel is looked up, and compiled if it is not there."""
    return lambda *args, **kwargs: self.run(*args, grid=grid, warmup=True, **kwargs)


def serve(vocab: int) -> None:
    """Draw for every setting alone and for all of them in one batch, of few rows and of many."""
    batches = [rows_of(params_of({"temperature": 1.0, **given})) for given in FEW]
    batches.append([row for rows in batches for row in rows])
    for rows in batches:
        for count in COUNTS:
            some = (rows * count)[:count]
            Sampler().draw(torch.empty(len(some), vocab, device=FAKE), some)


def main() -> None:
    """The kernels that the warm-up compiles for each vocabulary, and those that serving does."""
    use_target(90)
    names: list[str] = []
    found = []
    with FakeGPU(), patch.object(JITFunction, "_do_compile", noted(names)):
        for vocab in VOCABULARIES:
            with patch.object(JITFunction, "__getitem__", asked):
                # What is there has no values to look at.
                with patch.object(Draw, "samples", lambda self: []):
                    rehearse_sampling(vocab, FAKE)
                before = sorted(names)
                names.clear()
                serve(vocab)
            found.append((before, sorted(names)))
            names.clear()
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
