"""What a policy costs in a decode step, beside first come, first served.

    python -m experiments.benchmarks.policies

A batch of 256 decodes while 1,000 requests of four clients wait. Of two states the first has no
free seat, so that nobody could be admitted; in the second there are seats, and memory is what
lacks, so that the policy is asked for an order in every step. Who displaces by what was served
(`mlfq`) does so meanwhile. Each figure is the median of several rounds, all policies in turn, and
stands beside that of `fcfs` in the same round.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Iterator
from statistics import median
from typing import Any, NamedTuple

from experiments.benchmarks.yardstick import seconds
from pagedsim.build import POLICIES, make_memory, make_policy, make_scheduler
from pagedsim.core import Request, SamplingParams, Scheduler

BLOCK = 16
BASE = "fcfs"


class Crowd(NamedTuple):
    """How many run and wait, and the steps that the former decode for at least."""

    running: int
    waiting: int
    steps: int


def crowded(policy: str, crowd: Crowd, spare: int) -> Scheduler:
    """A scheduler with so many requests, and `spare` free seats."""
    prompts = [384 + number % 128 for number in range(crowd.running)]
    output = crowd.steps + 2 * BLOCK
    # Room for those that run, to their ends, and to spare; who waits would take all of it.
    blocks = int(1.2 * sum((prompt + output) // BLOCK + 2 for prompt in prompts))
    settings: dict[str, Any] = {"most": crowd.running} if policy == "cap" else {}
    scheduler = make_scheduler(
        memory=make_memory("prefix" if policy == "longest_prefix" else "paged", blocks=blocks),
        policy=make_policy(policy, **settings),
        batching="unified",
        max_seqs=crowd.running + spare,
        max_batched_tokens=crowd.running * 512,
    )
    for number, prompt in enumerate(prompts):
        scheduler.add(_request(number, prompt, output, False), now=0.0)
    for _ in range(4):
        scheduler.commit(scheduler.plan(0.0), 0.0)
    assert scheduler.clock.riders == crowd.running, f"{policy}: not all run"
    for number in range(crowd.running, crowd.running + crowd.waiting):
        scheduler.add(_request(number, (blocks - 1) * BLOCK - output, output, True), now=0.0)
    return scheduler


def _request(number: int, prompt: int, output: int, late: bool) -> Request:
    return Request(
        number,
        prompt,
        SamplingParams(max_tokens=output, temperature=0.0),
        priority=int(late),
        client="abcd"[number % 4],
        predicted_len=float(output + late),
        deadline=1e6 + number,
    )


def rounds_of(crowd: Crowd, spare: int, rounds: int) -> Iterator[dict[str, float]]:
    """Microseconds a step, by policy, in each round."""
    for _ in range(rounds):
        found = {}
        gc.collect()
        for policy in POLICIES:
            scheduler = crowded(policy, crowd, spare)
            found[policy] = 1e6 * seconds(lambda: _decode(scheduler, crowd.steps)) / crowd.steps  # noqa: B023
        yield found


def _decode(scheduler: Scheduler, steps: int) -> None:
    for number in range(steps):
        now = number * 0.02
        scheduler.commit(scheduler.plan(now), now + 0.02)


def main() -> None:
    """Print a line for each policy."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--running", type=int, default=256, help="requests that decode")
    parser.add_argument("--waiting", type=int, default=1000, help="requests that wait")
    parser.add_argument("--steps", type=int, default=300, help="decode steps a round")
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args()
    crowd = Crowd(asked.running, asked.waiting, asked.steps)
    states = {"seats full": 0, "memory full": 64}
    found = {name: list(rounds_of(crowd, spare, asked.rounds)) for name, spare in states.items()}
    print(f"{crowd.running} running, {crowd.waiting} waiting: µs a step, and × that of {BASE}\n")
    print(f"| policy | {' | '.join(f'{name}: µs | × {BASE}' for name in states)} |")
    print("|---" * (1 + 2 * len(states)) + "|")
    for policy in POLICIES:
        cells = [f"`{policy}`"]
        for name in states:
            cells.append(f"{median(one[policy] for one in found[name]):.1f}")
            cells.append(f"{median(one[policy] / one[BASE] for one in found[name]):.2f}")
        print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
