"""What the scheduler's own bookkeeping costs, without a simulator or an engine around it.

    python -m experiments.benchmarks.scheduler

A full batch decodes; every step is planned and committed. Times are the processor's, in several
rounds, beside one plain SimPy timeout measured before and after.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable
from functools import partial

from experiments.benchmarks.words import Parser, at_least_one
from experiments.benchmarks.yardstick import Cost, add
from pagedsim.build import make_memory, make_scheduler
from pagedsim.core import Request, Scheduler
from pagedsim.run.compilation import built

CASES = (
    ("prefill_first", "paged"),
    ("unified", "paged"),
    ("prefill_first", "prefix"),
    ("unified", "prefix"),
    ("prefill_first", "reserved_oracle"),
)


def full_batch(batching: str, memory: str, running: int, steps: int) -> Scheduler:
    """A scheduler whose `running` requests will all decode for longer than `steps` steps."""
    length = 512 + steps + 16
    settings = {"max_model_len": length} if memory.startswith("reserved") else {"block_size": 16}
    blocks = running * length * 2 if memory.startswith("reserved") else running * (length // 16 + 2)
    scheduler = make_scheduler(
        memory=make_memory(memory, blocks=blocks, **settings),
        batching=batching,
        max_seqs=running,
        max_batched_tokens=running * 512,
        max_model_len=length,
    )
    for number in range(running):
        prompt = 384 + number % 128  # so that blocks fill at different steps
        tokens = range(prompt) if memory == "prefix" else prompt
        scheduler.add(Request(number, tokens), now=0.0)
    while scheduler.clock.riders < running:
        scheduler.commit(scheduler.plan(0.0), 0.0)
    return scheduler


def decode(scheduler: Scheduler, steps: Iterable[int]) -> None:
    """Plan and commit `steps` steps."""
    for now in steps:
        scheduler.commit(scheduler.plan(now), now)


def measure(batching: str, memory: str, running: int, steps: int, rounds: int) -> None:
    """Print one line: what a step costs."""
    cost = Cost([], [])
    for _ in range(rounds):
        scheduler = full_batch(batching, memory, running, steps)
        gc.collect()
        add(cost, partial(decode, scheduler, range(steps)))
        scheduler.check()
    micros = Cost([each / steps * 1e6 for each in cost.seconds], [n / steps for n in cost.timeouts])
    print(f"| {' | '.join([batching, memory, f'{running:,}', *micros.cells(2)])} |", flush=True)


def main() -> None:
    """Print the table."""
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("--running", type=at_least_one, nargs="+", default=[16, 256, 1024])
    parser.add_argument("--steps", type=at_least_one, default=2000, help="decode steps a round")
    parser.add_argument("--rounds", type=at_least_one, default=5)
    options = parser.parse_args()
    print(f"plan and commit one decode step; {built()}\n")
    print("| batching | memory | running | µs a step | lowest | timeouts a step | lowest |")
    print("|---" * 7 + "|")
    for batching, memory in CASES:
        for running in options.running:
            measure(batching, memory, running, options.steps, options.rounds)


if __name__ == "__main__":
    main()
