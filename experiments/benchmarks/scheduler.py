"""Costs of the scheduler and of its policies.

    python -m pagedsim.experiments.benchmarks.scheduler  plan and commit one decode step
    python -m pagedsim.experiments.benchmarks.scheduler policies  the same under every policy

The first plans and commits steps of a full batch, without a simulator or an engine. `policies` does
so for a batch of 256 requests while 1,000 requests of four clients wait that do not fit, with the
policy's own settings. A policy that displaces exchanges requests in such a step, and is charged for
it; one that pins blocks of the prefix cache, or ranks by them, has one.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from functools import partial
from itertools import product
from statistics import median

from pagedsim.build import POLICIES, accepts, make_memory, make_scheduler
from pagedsim.core import Policy, Request, SamplingParams, Scheduler
from pagedsim.core.policy import overrides
from pagedsim.experiments.benchmarks.harness import (
    Cost,
    cost_cells,
    cost_of,
    in_turns,
    main_of,
    parse,
    table,
)
from pagedsim.experiments.benchmarks.simulator import composed
from pagedsim.run.provenance import built
from pagedsim.spec.run import policy_of

CASES = (
    ("prefill_first", "paged"),
    ("unified", "paged"),
    ("prefill_first", "prefix"),
    ("unified", "prefix"),
    ("sglang", "radix"),
    ("prefill_first", "reserved_oracle"),
)
BASE = "fcfs"
LAST = 10
"""When the last request arrives, in seconds; a step takes one."""
COSTS = ["µs a step", "lowest", "timeouts a step", "lowest"]


def steps(words: Sequence[str]) -> None:
    """Print the cost of a decode step by batching, memory and size of the batch."""
    asked = parse(__doc__, words, {"--running": [16, 256, 1024], "--steps": 2000, "--rounds": 5})
    rows = []
    for (batching, memory), running in product(CASES, asked.running):
        costs = [
            step_cost(full_batch(batching, memory, running, asked.steps), asked.steps)
            for _ in range(asked.rounds)
        ]
        rows.append([batching, memory, f"{running:,}", *cost_cells(costs, 2)])
    print(f"plan and commit one decode step; {built()}\n")
    print(table(["batching", "memory", "running", *COSTS], rows))


def step_cost(scheduler: Scheduler, steps: int) -> Cost:
    """The cost of a step: microseconds in the place of seconds."""

    def decode() -> None:
        for now in range(LAST, LAST + steps):
            scheduler.commit(scheduler.plan(now), now)

    gc.collect()
    seconds, timeouts = cost_of(decode)
    scheduler.check()
    return Cost(seconds / steps * 1e6, timeouts / steps)


def full_batch(
    batching: str, memory: str, running: int, steps: int, policy: Policy | None = None
) -> Scheduler:
    """A scheduler whose `running` requests all decode for longer than `steps` steps."""
    length = 512 + steps + 16
    settings = {"max_model_len": length} if memory.startswith("reserved") else {"block_size": 16}
    blocks = running * length * 2 if memory.startswith("reserved") else running * (length // 16 + 2)
    scheduler = make_scheduler(
        memory=make_memory(memory, blocks=blocks, **settings),
        batching=batching,
        policy=policy or BASE,
        max_seqs=running,
        max_batched_tokens=running * 512,
        max_model_len=length,
    )
    for number in range(running):
        prompt = 384 + number % 128  # so that blocks fill at different steps
        tokens = range(prompt) if memory in ("prefix", "radix") else prompt
        scheduler.add(_request(number, tokens, steps, 0.0), now=0.0)
    while scheduler.clock.requests < running:
        scheduler.commit(scheduler.plan(0.0), 0.0)
    return scheduler


def _request(number: int, tokens: range | int, steps: int, arrival: float) -> Request:
    return Request(
        number,
        tokens,
        SamplingParams(max_tokens=steps + 16, temperature=0.0),
        arrival=arrival,
        priority=arrival > 8,
        client="abcd"[number % 4],
        predicted_len=steps + (number % 64) * (arrival > 8),
        deadline=1e6 + number,
    )


# -- under every policy ----------------------------------------------------------------------------


def policies(words: Sequence[str]) -> None:
    """Print a line for each policy."""
    options = {"--running": 256, "--waiting": 1000, "--steps": 500, "--rounds": 5}
    asked = parse(__doc__, words, options)

    def cost(name: str) -> Cost:
        scheduler = crowded(name, asked.running, asked.waiting, asked.steps)
        return step_cost(scheduler, asked.steps)

    costs = in_turns({name: partial(cost, name) for name in POLICIES}, asked.rounds)
    base = median(cost.timeouts for cost in costs[BASE])
    print(f"{asked.running} running, {asked.waiting} waiting; {built()}\n")
    rows = []
    for name, rounds in costs.items():
        times = median(cost.timeouts for cost in rounds) / base
        rows.append([f"`{name}`", *cost_cells(rounds, 2), f"{times:.2f}"])
    print(table(["policy", *COSTS, f"× {BASE}"], rows))


def crowded(name: str, running: int, waiting: int, steps: int) -> Scheduler:
    """A full batch under a policy, and more requests that wait."""
    words = [f"policy={name}"]
    if accepts(POLICIES[name], "most") and accepts(POLICIES[name], "of"):
        words.append(f"++policy.most={running}")
    policy = policy_of(composed(tuple(words))["policy"])
    memory = "paged"
    if policy.walks_tree:
        memory = "radix"
    elif "lpm" in name or overrides(policy, "pin_prefix_for"):
        memory = "prefix"
    scheduler = full_batch("unified", memory, running, steps, policy)
    for number in range(waiting):
        arrival = LAST * number / waiting
        request = _request(running + number, 384 + number % 128, steps, arrival)
        scheduler.add(request, now=LAST)
    return scheduler


main = main_of(__name__, steps, policies)
