"""What a policy costs in a decode step, beside first come, first served.

    python -m experiments.benchmarks.policies

A batch of 256 decodes while 1,000 requests of four clients wait. In the first state no seat is
free; in the second there are seats, and the memory that is free is less than anybody needs who
waits, so that the policy is asked for the first of them in every step. Steps that only decode are
counted apart from those in which somebody is let in or loses a place, which is the policy's doing
where first come, first served has none. What stands around another policy, and another choice of
victims, is tried around every policy.

Each round serves the same requests, so that a step does the same in all of them: it counts with
the least of its times.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from statistics import fmean
from typing import Any, NamedTuple

from experiments.benchmarks.words import Parser, at_least_one, at_least_zero
from pagedsim.build import POLICIES, accepts, make_memory, make_policy, make_scheduler
from pagedsim.core import Policy, Request, SamplingParams, Scheduler, StepPlan
from pagedsim.core.policy import overrides

BLOCK = 16
BASE = "fcfs"
SECONDS = 0.02
"""How long a step takes, as the policy is told."""
WARM_UP = 2
"""Steps before those that are timed, in which the queue is put in order."""
STATES = {"seats full": 0, "memory full": 64}
"""The free seats of each."""


class Crowd(NamedTuple):
    """How many run and wait, and the steps that are timed."""

    running: int
    waiting: int
    steps: int


class Cost(NamedTuple):
    """Microseconds of each timed step, and whether it did nothing but decode."""

    micros: list[float]
    plain: list[bool]

    def mean(self, plain: bool) -> float | None:
        """Of the steps that only decode, or of the others; None if there are none."""
        some = [one for one, only in zip(self.micros, self.plain, strict=True) if only is plain]
        return fmean(some) if some else None

    def least(self, other: Cost) -> Cost:
        """Step by step, the smaller of both."""
        return Cost([min(pair) for pair in zip(self.micros, other.micros, strict=True)], self.plain)


def arms(crowd: Crowd) -> dict[str, Any]:
    """How to make every policy, and what stands around another, around each of the others."""
    around = [name for name, kind in POLICIES.items() if accepts(kind, "of")]
    inner = [name for name in POLICIES if name not in around]
    made: dict[str, Any] = {name: partial(_policy, name, crowd) for name in inner}
    for name, displace in product(inner, (False, True)):
        if accepts(POLICIES[name], "displace"):
            word = f"{name} displace={str(displace).lower()}"
            made[word] = partial(_policy, name, crowd, displace=displace)
    for outer, of in product(around, inner):
        made[outer if of == BASE else f"{outer} of={of}"] = partial(_policy, outer, crowd, of=of)
    for of in inner:
        made[f"{of} victim=rank"] = partial(_policy, of, crowd, victim="rank")
    return made


def _policy(name: str, crowd: Crowd, **settings: Any) -> Policy:
    if accepts(POLICIES[name], "most") and accepts(POLICIES[name], "of"):
        settings["most"] = crowd.running
    return make_policy(name, **settings)


def crowded(policy: Policy, crowd: Crowd, spare: int, prefix: bool) -> Scheduler:
    """A scheduler with so many requests, `spare` free seats, and a batch of all ages."""
    prompts = [384 + number % 128 for number in range(crowd.running)]
    rounds = min(16, crowd.running)
    steps = WARM_UP + crowd.steps + rounds + 2
    # Room for what those that run will say, and to spare; who waits asks for all that at once.
    longest = sum((prompt + steps) // BLOCK + 2 for prompt in prompts)
    blocks = int(1.1 * longest)
    free = blocks - sum(prompt // BLOCK for prompt in prompts)
    kind = "prefix" if prefix or overrides(policy, "pin_prefix_for") else "paged"
    scheduler = make_scheduler(
        memory=make_memory(kind, blocks=blocks, block_size=BLOCK),
        policy=policy,
        batching="unified",
        max_seqs=crowd.running + spare,
        max_batched_tokens=crowd.running * 512,
    )
    now = 0.0
    for turn in range(rounds):
        for number in range(turn, crowd.running, rounds):
            scheduler.add(_request(number, prompts[number], steps, now), now)
        scheduler.commit(scheduler.plan(now), now + SECONDS)
        now += 0.5
    scheduler.commit(scheduler.plan(now), now + SECONDS)
    assert scheduler.clock.riders == crowd.running, f"{policy}: not all run"
    for index in range(crowd.waiting):
        prompt = BLOCK * (free + index * 7919 % free) if spare else prompts[0] + index % 128
        arrival = now + 10.0 * index / crowd.waiting
        scheduler.add(_request(crowd.running + index, prompt, steps, arrival), now + 10.0)
    return scheduler


def _request(number: int, prompt: int, steps: int, arrival: float) -> Request:
    return Request(
        number,
        prompt,
        SamplingParams(max_tokens=steps, temperature=0.0),
        arrival=arrival,
        priority=arrival > 8,
        client="abcd"[number % 4],
        predicted_len=steps + (number % 64) * (arrival > 8),
        deadline=1e6 + number,
    )


def timed(scheduler: Scheduler, steps: int) -> Cost:
    """Plan and commit so many steps."""
    cost, now = Cost([], []), scheduler.now + SECONDS
    for _ in range(steps):
        begun = time.perf_counter()
        plan = scheduler.plan(now)
        scheduler.commit(plan, now + SECONDS)
        cost.micros.append(1e6 * (time.perf_counter() - begun))
        cost.plain.append(_plain(plan))
        now += SECONDS
    return cost


def _plain(plan: StepPlan) -> bool:
    return not (plan.chunks or plan.preempted or plan.displaced or plan.rejected)


def measured(crowd: Crowd, spare: int, rounds: int) -> dict[str, Cost]:
    """What steps cost under each policy, all of them in turn in each round."""
    found: dict[str, Cost] = {}
    for _ in range(rounds):
        for name, make in arms(crowd).items():
            scheduler = crowded(make(), crowd, spare, "longest_prefix" in name)
            gc.collect()
            gc.disable()
            timed(scheduler, WARM_UP)
            cost = timed(scheduler, crowd.steps)
            gc.enable()
            found[name] = found[name].least(cost) if name in found else cost
    return found


def table(found: dict[str, dict[str, Cost]]) -> Iterator[str]:
    """A line for each policy."""
    yield f"| policy | {' | '.join(f'{name}: µs | × {BASE} | with moves: µs' for name in found)} |"
    yield "|---" * (1 + 3 * len(found)) + "|"
    for policy in found[next(iter(found))]:
        cells = [f"`{policy}`"]
        for costs in found.values():
            times = ratio(costs, policy)
            cells += [_cell(costs[policy].mean(True), 1), _cell(times, 2)]
            cells.append(_cell(costs[policy].mean(False), 1))
        yield f"| {' | '.join(cells)} |"


def ratio(costs: dict[str, Cost], policy: str) -> float | None:
    """What a step that only decodes costs, as a multiple of first come, first served."""
    base, own = costs[BASE].mean(True), costs[policy].mean(True)
    return own / base if own and base else None


def _cell(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def worst(found: dict[str, dict[str, Cost]]) -> str:
    """The most expensive policy in the most expensive state."""
    ratios = [
        (times, policy, state)
        for state, costs in found.items()
        for policy in costs
        if (times := ratio(costs, policy)) is not None
    ]
    times, policy, state = max(ratios)
    return f"the most expensive: `{policy}`, {state}: {times:.2f} × {BASE}"


def main(words: Sequence[str] | None = None) -> None:
    """Print a line for each policy, and the worst of all."""
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("--running", type=at_least_one, default=256, help="requests that decode")
    parser.add_argument("--waiting", type=at_least_zero, default=1000, help="requests that wait")
    parser.add_argument("--steps", type=at_least_one, default=64, help="steps a round")
    parser.add_argument("--rounds", type=at_least_one, default=7)
    asked = parser.parse_args(words)
    crowd = Crowd(asked.running, asked.waiting, asked.steps)
    gc.freeze()  # what was imported is not gone through again before each policy
    found = {name: measured(crowd, spare, asked.rounds) for name, spare in STATES.items()}
    print(f"{crowd.running} running, {crowd.waiting} waiting: a step that only decodes\n")
    print("\n".join(table(found)))
    print(f"\n{worst(found)}")


if __name__ == "__main__":
    main()
