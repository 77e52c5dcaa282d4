"""What the scheduler's own bookkeeping costs, without a simulator or an engine around it.

    python -m experiments.benchmarks.scheduler

A full batch decodes; every step is planned and committed. Each figure is the best of several
rounds, and stands beside the cost of one plain SimPy timeout measured in the same round.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Iterable
from itertools import count
from statistics import median

from experiments.benchmarks.yardstick import seconds, timeout_seconds
from pagedsim.build import make_memory, make_scheduler
from pagedsim.core import Request, Scheduler

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
    """Print one line: what a step costs in the median round, and in timeouts."""
    costs, ratios = [], []
    for _ in range(rounds):
        scheduler = full_batch(batching, memory, running, steps)
        clock = count()
        gc.collect()
        yardstick = timeout_seconds()
        cost = seconds(lambda: decode(scheduler, (next(clock) for _ in range(steps)))) / steps  # noqa: B023
        costs.append(cost)
        ratios.append(cost / yardstick)
        scheduler.check()
    print(
        f"{batching:14} {memory:16} {running:8} {median(costs) * 1e6:9.2f} "
        f"{median(ratios):10.1f} {min(ratios):8.1f} {max(ratios):8.1f}"
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--running", type=int, nargs="+", default=[16, 256, 1024])
    parser.add_argument("--steps", type=int, default=2000, help="decode steps a round")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    print("one decode step = plan + commit; timeouts: cost / one plain SimPy timeout, same round")
    print(
        f"{'batching':14} {'memory':16} {'running':>8} {'µs/step':>9} "
        f"{'timeouts':>10} {'lowest':>8} {'highest':>8}"
    )
    for batching, memory in CASES:
        for running in options.running:
            measure(batching, memory, running, options.steps, options.rounds)


if __name__ == "__main__":
    main()
