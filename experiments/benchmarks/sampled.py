"""What a draw asks of a GPU that need not be there: launches, bytes, and its kernels compiled.

    python -m experiments.benchmarks.sampled [--rows 64] [--vocab 128256] [--capabilities 80 90]

First each kind of request in a batch of its own, in a step like the one before it: launches, bytes
that they read and write if each touches its tensors once (of the logits the last kernel touches a
tile a row), and bytes between host and GPU. "torch" is the same draw one operation after another,
as a CPU's definition has it. Then the kernels: instructions of a program, of them those in float64,
tokens that a thread has, registers, bytes that spill, and shared memory. No time is measured.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from experiments.benchmarks.ahead import disassembled, launched, stand_in, taken
from experiments.benchmarks.device import Plain, table
from experiments.benchmarks.pretended import THERE, Launch, Pretended, moved
from experiments.benchmarks.words import Parser, at_least_one
from pagedsim.core import SamplingParams
from pagedsim.engine.noise import stream_key, words_of
from pagedsim.engine.sampler import Row, Sampler
from pagedsim.kernels import draw
from pagedsim.kernels.asked import Asked
from pagedsim.kernels.cut import Shape
from pagedsim.kernels.reference.gumbel import gumbel, hashed, token_hashes

KINDS = {
    "greedy": SamplingParams(temperature=0),
    "random": SamplingParams(),
    "min-p": SamplingParams(min_p=0.05),
    "top-k": SamplingParams(top_k=50),
    "top-p": SamplingParams(top_p=0.9),
    "top-k, top-p, min-p": SamplingParams(top_k=50, top_p=0.9, min_p=0.05),
    "random, with penalties": SamplingParams(repetition_penalty=1.1, frequency_penalty=0.1),
    "random, with log-probabilities": SamplingParams(logprobs=5),
}
INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?(\w+)")
DOUBLE = re.compile(r"D(ADD|MUL|FMA|SETP)$|MUFU64|F2F64")


def main(words: Sequence[str] | None = None) -> None:
    """Count, compile and print."""
    words = sys.argv[1:] if words is None else words
    parser = Parser(description=__doc__, formatter_class=Plain)
    parser.add_argument("--rows", type=at_least_one, default=64)
    parser.add_argument("--vocab", type=at_least_one, default=128256)
    parser.add_argument("--capabilities", type=at_least_one, nargs="+", default=[80, 90])
    asked = parser.parse_args(words)
    head = [f"{asked.rows} × {asked.vocab:,}", "launches", "MB", "of logits", "bytes from the host"]
    print(table(head, list(steps(asked.rows, asked.vocab))), end="\n\n")
    head = ["GPU", "kernel", "instructions", "in float64", "tokens a thread", "registers"]
    print(table([*head, "spilled", "shared KiB"], list(kernels(asked.vocab, asked.capabilities))))


def steps(rows: int, vocab: int) -> Iterator[list[str]]:
    """A line for each kind of batch."""
    for name, params in KINDS.items():
        sampler = Sampler()
        with Pretended() as gpu:
            batch = [Row(params, stream_key(i), 9, [1, 2], [3]) for i in range(rows)]
            logits = torch.empty(rows, vocab, device=THERE)
            sampler.draw(logits, batch)
            yield counted(name, gpu, logits, partial(sampler.draw, logits, batch))
    with Pretended() as gpu:
        logits, temperature = (torch.empty(rows, n, device=THERE) for n in (vocab, 1))
        there = torch.empty(rows, 2, dtype=torch.int32, device=THERE)
        token_hashes(vocab, THERE)
        yield counted("random, torch", gpu, logits, partial(plain, logits, temperature, there))


def plain(logits: torch.Tensor, temperature: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    """A draw one operation after another."""
    bits = hashed(token_hashes(logits.shape[1], logits.device), words[:, :1], words[:, 1:])
    return gumbel(bits).add_(logits / temperature).argmax(1)


def counted(
    name: str, gpu: Pretended, logits: torch.Tensor, call: Callable[[], object]
) -> list[str]:
    """What `call` has the GPU do."""
    gpu.launches.clear()
    gpu.copied = 0
    call()
    total = sum(bytes_of(launch, logits) for launch in gpu.launches)
    whole = moved([logits])
    there = [str(len(gpu.launches)), f"{total / 1e6:.1f}", f"{total / whole:.1f} ×"]
    return [name, *there, f"{gpu.copied:,}"]


def bytes_of(launch: Launch, logits: torch.Tensor) -> int:
    """What a launch moves."""
    if launch.name != "_settle":
        return launch.moved
    tile = Shape.of(logits.shape[1]).block * len(logits) * logits.element_size()
    return launch.moved - moved([logits]) + tile


def kernels(vocab: int, capabilities: Sequence[int]) -> Iterator[list[str]]:
    """A line for each kernel that draws, for each GPU."""
    for capability in capabilities:
        stand_in(capability)
        for filtered in (False, True):
            found = {kernel.hash: kernel for kernel in launched(partial(drawn, vocab, filtered))}
            for kernel in found.values():
                one = taken(kernel)
                names = INSTRUCTION.findall(disassembled(kernel))
                threads = 32 * one.warps
                yield [
                    f"{capability / 10:.1f}",
                    one.name + (", of rows that are cut" if filtered else ""),
                    str(len(names)),
                    str(sum(bool(DOUBLE.match(name)) for name in names)),
                    str(Shape.of(vocab).block // threads),
                    str(one.registers),
                    str(one.spilled),
                    f"{one.shared / 1024:.1f}",
                ]


def drawn(vocab: int, filtered: bool) -> torch.Tensor:
    """A draw of two rows, on which a kernel's code does not depend."""
    floats = torch.ones(2)
    asked = Asked(floats, floats.int(), floats.double(), floats, *[filtered] * 3)
    return draw.pick(torch.zeros(2, vocab), asked, words_of([1, 2], [0, 0]))


if __name__ == "__main__":
    main()
