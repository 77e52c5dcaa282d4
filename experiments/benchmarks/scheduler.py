"""Costs of the scheduler and of its policies.

    python -m pagedsim.experiments.benchmarks.scheduler  plan and commit one decode step
    python -m pagedsim.experiments.benchmarks.scheduler policies  the same under every policy
    python -m pagedsim.experiments.benchmarks.scheduler policy_runs  simulations under every policy

The first plans and commits steps of a full batch, without a simulator or an engine.

`policies` decodes a batch of 256 requests while 1,000 requests of four clients wait. In the state
"seats full" the batch has no free seat; in "memory full" it has seats, but no waiting request fits
the free memory. Steps that only decode are averaged apart from steps that admit or preempt a
request. Policies that wrap another one, and `victim=rank`, are combined with every policy. Each
round serves the same requests, so a step counts with the least of its times.

`policy_runs` simulates conversations and short requests as simulator.py does, with four clients,
two priorities, deadlines, and true lengths as predictions. A policy that pins blocks of the prefix
cache, or ranks by them, has one. `--only` names policies, or arms of `policies`.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import product
from statistics import fmean
from typing import NamedTuple

from pagedsim.build import POLICIES, accepts, make_memory, make_scheduler
from pagedsim.core import Policy, Request, SamplingParams, Scheduler
from pagedsim.core.policy import overrides
from pagedsim.experiments.benchmarks import simulator
from pagedsim.experiments.benchmarks.harness import Cost, cpu_seconds, main_of, parse, row, table
from pagedsim.metrics.recorder import Recorder
from pagedsim.run.backend import BackendRun, policy_of
from pagedsim.run.provenance import built

# -- one step --------------------------------------------------------------------------------------

CASES = (
    ("prefill_first", "paged"),
    ("unified", "paged"),
    ("prefill_first", "prefix"),
    ("unified", "prefix"),
    ("sglang", "radix"),
    ("prefill_first", "reserved_oracle"),
)


def steps(words: Sequence[str]) -> None:
    """Print the cost of a decode step by batching, memory and size of the batch."""
    asked = parse(__doc__, words, {"--running": [16, 256, 1024], "--steps": 2000, "--rounds": 5})
    print(f"plan and commit one decode step; {built()}\n")
    head = ["batching", "memory", "running", "µs a step", "lowest", "timeouts a step", "lowest"]
    print(table(head, []))
    for batching, memory in CASES:
        for running in asked.running:
            cost = step_cost(batching, memory, running, asked.steps, asked.rounds)
            print(row([batching, memory, f"{running:,}", *cost.cells(2)]), flush=True)


def step_cost(batching: str, memory: str, running: int, steps: int, rounds: int) -> Cost:
    """The cost of a step: microseconds in the place of seconds."""
    cost = Cost()
    for _ in range(rounds):
        scheduler = full_batch(batching, memory, running, steps)

        def decode(scheduler: Scheduler = scheduler) -> None:
            for now in range(steps):
                scheduler.commit(scheduler.plan(now), now)

        gc.collect()
        cost.add(partial(cpu_seconds, decode))
        scheduler.check()
    return Cost([each / steps * 1e6 for each in cost.seconds], [n / steps for n in cost.timeouts])


def full_batch(batching: str, memory: str, running: int, steps: int) -> Scheduler:
    """A scheduler whose `running` requests all decode for longer than `steps` steps."""
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
        tokens = range(prompt) if memory in ("prefix", "radix") else prompt
        scheduler.add(Request(number, tokens), now=0.0)
    while scheduler.clock.requests < running:
        scheduler.commit(scheduler.plan(0.0), 0.0)
    return scheduler


# -- one step under every policy -------------------------------------------------------------------

BLOCK = 16
BASE = "fcfs"
STEP_SECONDS = 0.02
"""The simulated duration of a step."""
WARM_UP = 2
"""Steps before the timed ones, in which the policy sorts its queue."""
STATES = {"seats full": 0, "memory full": 64}
"""The free seats in each state."""


class Crowd(NamedTuple):
    """The numbers of running and waiting requests, and of timed steps."""

    running: int
    waiting: int
    steps: int


Steps = list[tuple[float, bool]]
"""Microseconds of each timed step, and whether the step only decoded."""


def policies(words: Sequence[str]) -> None:
    """Print a line for each policy, and the most expensive of all."""
    options = {"--running": 256, "--waiting": 1000, "--steps": 64, "--rounds": 7}
    asked = parse(__doc__, words, options)
    crowd = Crowd(asked.running, asked.waiting, asked.steps)
    gc.freeze()  # so that collections before each policy skip imported modules
    found = {name: times_by_policy(crowd, spare, asked.rounds) for name, spare in STATES.items()}
    print(f"{crowd.running} running, {crowd.waiting} waiting: a step that only decodes\n")
    print(policy_table(found))
    times, policy, state = max(
        (ratio(costs, policy) or 0.0, policy, state)
        for state, costs in found.items()
        for policy in costs
    )
    print(f"\nthe most expensive: `{policy}`, {state}: {times:.2f} × {BASE}")


def arms() -> list[str]:
    """Every policy, its variants, and every wrapper around each of the other policies: a name, and
    settings as one types them."""
    wrappers = [name for name, kind in POLICIES.items() if accepts(kind, "of")]
    inner = [name for name in POLICIES if name not in wrappers]
    displacing = [name for name in inner if accepts(POLICIES[name], "displace")]
    return [
        *inner,
        *(f"{name} displace={on}" for name, on in product(displacing, ("false", "true"))),
        *(outer if of == BASE else f"{outer} of={of}" for outer, of in product(wrappers, inner)),
        *(f"{name} victim=rank" for name in inner),
    ]


def policy_words(arm: str, running: int) -> simulator.Words:
    """The words that choose an arm for so many running requests."""
    name, *settings = arm.split()
    if accepts(POLICIES[name], "most") and accepts(POLICIES[name], "of"):
        settings.append(f"most={running}")
    return (f"policy={name}", *(f"++policy.{one}" for one in settings))


def memory_for(name: str, policy: Policy) -> str:
    """A memory under which the policy has an effect."""
    if policy.walks_tree:
        return "radix"
    return "prefix" if "lpm" in name or overrides(policy, "pin_prefix_for") else "paged"


def crowded(policy: Policy, crowd: Crowd, spare: int, memory: str) -> Scheduler:
    """A scheduler with running requests of all ages, waiting ones, and `spare` free seats."""
    prompts = [384 + number % 128 for number in range(crowd.running)]
    rounds = min(16, crowd.running)
    steps = WARM_UP + crowd.steps + rounds + 2
    # Blocks for all output of the running requests, and a tenth more; a waiting request needs more.
    longest = sum((prompt + steps) // BLOCK + 2 for prompt in prompts)
    blocks = int(1.1 * longest)
    free = blocks - sum(prompt // BLOCK for prompt in prompts)
    scheduler = make_scheduler(
        memory=make_memory(memory, blocks=blocks, block_size=BLOCK),
        policy=policy,
        batching="unified",
        max_seqs=crowd.running + spare,
        max_batched_tokens=crowd.running * 512,
    )
    now = 0.0
    for turn in range(rounds):
        for number in range(turn, crowd.running, rounds):
            scheduler.add(_request(number, prompts[number], steps, now), now)
        scheduler.commit(scheduler.plan(now), now + STEP_SECONDS)
        now += 0.5
    scheduler.commit(scheduler.plan(now), now + STEP_SECONDS)
    assert scheduler.clock.requests == crowd.running, f"{policy}: not all requests run"
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


def timed_steps(scheduler: Scheduler, steps: int) -> Steps:
    """Plan and commit so many steps."""
    times, now = Steps(), scheduler.now + STEP_SECONDS
    for _ in range(steps):
        begun = time.perf_counter()
        plan = scheduler.plan(now)
        scheduler.commit(plan, now + STEP_SECONDS)
        micros = 1e6 * (time.perf_counter() - begun)
        moves = plan.chunks or plan.preempted or plan.displaced or plan.rejected
        times.append((micros, not moves))
        now += STEP_SECONDS
    return times


def times_by_policy(crowd: Crowd, spare: int, rounds: int) -> dict[str, Steps]:
    """The least times of steps under each policy; policies take turns in each round."""
    found: dict[str, Steps] = {}
    for _ in range(rounds):
        for name in arms():
            policy = policy_of(simulator.composed(policy_words(name, crowd.running))["policy"])
            scheduler = crowded(policy, crowd, spare, memory_for(name, policy))
            gc.collect()
            gc.disable()
            timed_steps(scheduler, WARM_UP)
            times = timed_steps(scheduler, crowd.steps)
            gc.enable()
            before = found.get(name, times)
            found[name] = [
                (min(old, new), plain) for (old, plain), (new, _) in zip(before, times, strict=True)
            ]
    return found


def policy_table(found: Mapping[str, Mapping[str, Steps]]) -> str:
    """A line for each policy."""

    def cell(value: float | None, digits: int) -> str:
        return "" if value is None else f"{value:.{digits}f}"

    head = ["policy"]
    for name in found:
        head += [f"{name}: µs", f"× {BASE}", "with moves: µs"]
    rows = []
    for policy in next(iter(found.values())):
        cells = [f"`{policy}`"]
        for costs in found.values():
            cells += [cell(mean(costs[policy], True), 1), cell(ratio(costs, policy), 2)]
            cells.append(cell(mean(costs[policy], False), 1))
        rows.append(cells)
    return table(head, rows)


def mean(steps: Steps, plain: bool) -> float | None:
    """The mean of the steps that only decode, or of the others; None if there are none."""
    some = [micros for micros, only in steps if only is plain]
    return fmean(some) if some else None


def ratio(costs: Mapping[str, Steps], policy: str) -> float | None:
    """The time of a step that only decodes, as a multiple of first come, first served."""
    base, own = mean(costs[BASE], True), mean(costs[policy], True)
    return own / base if own and base else None


# -- simulations under every policy ----------------------------------------------------------------

MOST = 256
"""Requests that run at once, at most."""
LABELS = (
    *(simulator.URGENT, "workload.client={a:0.25,b:0.25,c:0.25,d:0.25}", "workload.deadline=60"),
    "predictor=oracle",
)


class RunCost(NamedTuple):
    """Work and cost of a simulation, for each request."""

    steps: float
    """A policy that moves requests, or runs few at a time, takes more of them."""
    preempted: float
    """Preemptions, after each of which lost tokens are computed again."""
    timeouts: float
    """The lowest of all rounds."""


def policy_runs(words: Sequence[str]) -> None:
    """Print a line for each policy, the most expensive first."""
    only = {"nargs": "+", "help": "of the policies and compositions"}
    options = {"--trace": simulator.TRACE, "--requests": 2000, "--rounds": 3, "--only": only}
    asked = parse(__doc__, words, options)
    cases = {
        "conversations": simulator.conversation(asked.trace, asked.requests),
        "short": simulator.short(asked.requests, 154, 312, 1000),
    }
    names = asked.only or [name for name in POLICIES if name in arms()]
    if unknown := set(names) - set(arms()):
        raise SystemExit(f"--only {min(unknown)}: no such policy; there are {', '.join(arms())}")
    chosen = list(dict.fromkeys([BASE, *names]))
    found = {load: run_costs(case, chosen, asked.rounds) for load, case in cases.items()}

    def times(costs: Mapping[str, RunCost], name: str) -> float:
        return costs[name].timeouts / costs[BASE].timeouts

    head, rows = ["policy"], []
    for load in found:
        head += [f"{load}: steps", "preempted", "timeouts", f"× {BASE}"]
    for name in sorted(chosen, key=lambda name: -max(times(of, name) for of in found.values())):
        cells = [f"`{name}`"]
        for costs in found.values():
            steps, preempted, timeouts = costs[name]
            cells += [f"{steps:.1f}", f"{preempted:.2f}", f"{timeouts:.1f}"]
            cells.append(f"{times(costs, name):.2f}")
        rows.append(cells)
    print(f"{asked.requests:,} requests of each workload; {built()}; all but × for a request\n")
    print(table(head, rows))


def run_costs(case: simulator.Words, chosen: Sequence[str], rounds: int) -> dict[str, RunCost]:
    """The cost of the case under each policy; policies take turns in each round."""
    costs = {name: Cost() for name in chosen}
    recorders: dict[str, Recorder] = {}
    workload = simulator.workload_of((*case, *LABELS))
    for _ in range(rounds):
        for name in chosen:
            words = (*case, *LABELS, *policy_words(name, MOST))
            memory = memory_for(name, policy_of(simulator.composed(words)["policy"]))
            if memory != "paged":
                words = (*words, f"memory={memory}")
            simulation = simulator.prepared(words)

            def run(name: str = name, simulation: BackendRun = simulation) -> None:
                recorders[name] = simulator.serve(simulation, workload)

            costs[name].add(partial(cpu_seconds, run))
    found = {}
    for name, recorder in recorders.items():
        requests = recorder.requests_table()
        preempted = sum(requests["preemptions"].to_pylist())
        each = (recorder.steps_table().num_rows, preempted, min(costs[name].timeouts))
        found[name] = RunCost(*(total / requests.num_rows for total in each))
    return found


main = main_of(__name__, steps, policies, policy_runs)
