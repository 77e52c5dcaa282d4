"""What block tables cost a step: bytes that are sent, and the host's time.

    python -m experiments.benchmarks.tables

A full batch decodes greedily, with a model that computes nothing (`host.py`): with ordinary
contexts, and then with one among them that is very long. Bytes are the mean over the steps of a
round, since tables grow every now and then; times are medians, of the best round.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch

from experiments.benchmarks import host
from experiments.benchmarks.device import Plain, require_gpu, table
from experiments.benchmarks.words import Parser, at_least_one, at_least_zero
from pagedsim.core import SamplingParams
from pagedsim.engine.engine import LLMEngine
from pagedsim.engine.inputs import Crossing
from pagedsim.engine.models import LoadedModel

BLOCK = 16
PROMPT = 300
"""Tokens of an ordinary prompt."""


class Sent:
    """Counts the bytes that go to the device."""

    def __init__(self) -> None:
        self.bytes = 0

    @contextmanager
    def counting(self) -> Iterator[None]:
        """While this lasts."""
        send = Crossing.send

        def counted(crossing: Crossing, size: int) -> None:
            self.bytes += size
            send(crossing, size)

        with patch.object(Crossing, "send", counted):
            yield


def full_batch(model: LoadedModel, running: int, blocks: int, steps: int) -> LLMEngine:
    """An engine whose requests decode for longer than `steps` steps; the last has a context of
    `blocks` blocks, if any."""
    longest = max(blocks * BLOCK, PROMPT + steps + 64)
    engine = LLMEngine(
        model=model,
        device=model.device.type,
        block_size=BLOCK,
        max_seqs=running,
        max_model_len=longest,
        blocks=running * (-(-(PROMPT + steps + 64) // BLOCK)) + blocks + 64,
        preemption="recompute",
    )
    params = SamplingParams(temperature=0, max_tokens=steps + 32, ignore_eos=True)
    for number in range(running):
        long = blocks and number == running - 1
        length = longest - steps - 32 if long else PROMPT + number % BLOCK
        engine.add_request(number, [7] * length, params)
    while engine.scheduler.clock.riders < running:
        engine.step()
    return engine


def measure(
    model: LoadedModel, running: int, blocks: int, steps: int, rounds: int
) -> dict[str, Any]:
    """Bytes and seconds of a step."""
    engine = full_batch(model, running, blocks, steps * (rounds + 1))
    host.round_of(engine, steps)
    sent = Sent()
    with sent.counting():
        times = [host.round_of(engine, steps) for _ in range(rounds)]
    best = min(times, key=lambda one: one.launch)
    return {
        "requests": running,
        "blocks": blocks,
        "bytes": sent.bytes / (steps * rounds),
        "launch": best.launch,
        "seconds": sum(getattr(best, part) for part in host.PARTS),
    }


def main(words: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = Parser(description=__doc__, formatter_class=Plain)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--running", type=at_least_one, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--blocks", type=at_least_zero, default=8193, help="of the long context")
    parser.add_argument("--steps", type=at_least_one, default=64, help="decode steps a round")
    parser.add_argument("--rounds", type=at_least_one, default=3)
    asked = parser.parse_args(sys.argv[1:] if words is None else words)
    if asked.device == "cuda":
        require_gpu()
    torch.set_num_threads(1)
    model = host.idle_model(torch.device(asked.device))
    model = replace(model, max_model_len=(asked.blocks + 64) * BLOCK)  # what computes nothing can
    rows = []
    for running in asked.running:
        for blocks in (0, asked.blocks):
            one = measure(model, running, blocks, asked.steps, asked.rounds)
            rows.append([
                str(running), f"{blocks:,}" if blocks else "–", f"{one['bytes']:,.0f}",
                f"{one['launch'] * 1e6:,.0f}", f"{one['seconds'] * 1e6:,.0f}",
            ])  # fmt: skip
    head = ["requests", "blocks of a long one", "bytes a step", "inputs and launch, µs"]
    print(f"a step of decodes, blocks of {BLOCK}, on {asked.device}")
    print(table([*head, "µs in all"], rows))


if __name__ == "__main__":
    main()
