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
from typing import Any

from experiments.benchmarks.yardstick import seconds
from pagedsim.build import POLICIES, make_memory, make_policy, make_scheduler
from pagedsim.core import Request, SamplingParams, Scheduler

RUNNING, WAITING = 256, 1000
BLOCK = 16
BASE = "fcfs"


def crowded(policy: str, seats: int, steps: int) -> Scheduler:
    """A scheduler with `RUNNING` requests that will decode for longer than `steps` steps."""
    prompts = [384 + number % 128 for number in range(RUNNING)]
    output = steps + 2 * BLOCK
    # Room for those that run, to their ends, and to spare; who waits would take all of it.
    blocks = int(1.2 * sum((prompt + output) // BLOCK + 2 for prompt in prompts))
    scheduler = make_scheduler(
        memory=make_memory("prefix" if policy == "longest_prefix" else "paged", blocks=blocks),
        policy=make_policy(policy, **_settings(policy)),
        batching="unified",
        max_seqs=seats,
        max_batched_tokens=RUNNING * 512,
    )
    for number, prompt in enumerate(prompts):
        scheduler.add(_request(number, prompt, output), now=0.0)
    for _ in range(4):
        scheduler.commit(scheduler.plan(0.0), 0.0)
    assert scheduler.clock.riders == RUNNING, f"{policy}: not all run"
    for number in range(RUNNING, RUNNING + WAITING):
        scheduler.add(_request(number, (blocks - 1) * BLOCK - output, output), now=0.0)
    return scheduler


def _settings(policy: str) -> dict[str, Any]:
    return {"most": RUNNING} if policy == "cap" else {}


def _request(number: int, prompt: int, output: int) -> Request:
    return Request(
        number,
        prompt,
        SamplingParams(max_tokens=output, temperature=0.0),
        priority=0 if number < RUNNING else 1,
        client="abcd"[number % 4],
        predicted_len=float(output + number // RUNNING),
        deadline=1e6 + number,
    )


def rounds_of(seats: int, steps: int, rounds: int) -> Iterator[dict[str, float]]:
    """Microseconds a step, by policy, in each round."""
    for _ in range(rounds):
        found = {}
        for policy in POLICIES:
            scheduler = crowded(policy, seats, steps)
            gc.collect()
            found[policy] = 1e6 * seconds(lambda: _decode(scheduler, steps)) / steps  # noqa: B023
        yield found


def _decode(scheduler: Scheduler, steps: int) -> None:
    for number in range(steps):
        now = number * 0.02
        scheduler.commit(scheduler.plan(now), now + 0.02)


def main() -> None:
    """Print a line for each policy."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300, help="decode steps a round")
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args()
    states = {"seats full": RUNNING, "memory full": RUNNING + 64}
    found = {
        name: list(rounds_of(seats, asked.steps, asked.rounds)) for name, seats in states.items()
    }
    print(f"{RUNNING} running, {WAITING} waiting: µs a step, and times that of {BASE}\n")
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
