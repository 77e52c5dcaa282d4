"""Costs of the scheduler and of its policies.

    python -m experiments.benchmarks.scheduler                  plan and commit one decode step
    python -m experiments.benchmarks.scheduler policies         the same under every policy
    python -m experiments.benchmarks.scheduler policy_runs      whole simulations under every policy

The first plans and commits steps of a full batch, without a simulator or an engine.

`policies` decodes a batch of 256 requests while 1,000 requests of four clients wait. In the state
"seats full" the batch has no free seat; in "memory full" it has seats, but no waiting request fits
the free memory, so that the policy chooses the first waiting request in every step. Steps that only
decode are averaged apart from steps that admit or preempt a request. Policies that wrap another
one, and `victim=rank`, are combined with every policy. Each round serves the same requests, so a
step counts with the least of its times.

`policy_runs` simulates conversations and short requests on the server of `simulator.py`, with four
clients, two priorities, deadlines, and true lengths as predictions. With `--compositions` it runs
all arms of `policies`. A policy that pins blocks of the prefix cache, or ranks by them, has one.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from statistics import fmean
from typing import Any, NamedTuple

from experiments.benchmarks.harness import (
    Cost,
    Parser,
    cpu_seconds,
    existing_file,
    non_negative_int,
    positive_int,
    row,
    run_command,
    table,
)
from experiments.benchmarks.simulator import COLUMNS, URGENT, Case, conversation, serve, short
from pagedsim.build import POLICIES, accepts, make_memory, make_policy, make_scheduler
from pagedsim.core import Policy, Request, SamplingParams, Scheduler, StepPlan
from pagedsim.core.policy import overrides
from pagedsim.metrics.recorder import Recorder
from pagedsim.run.compilation import built

# -- one step --------------------------------------------------------------------------------------

CASES = (
    ("prefill_first", "paged"),
    ("unified", "paged"),
    ("prefill_first", "prefix"),
    ("unified", "prefix"),
    ("prefill_first", "reserved_oracle"),
)


def steps(words: Sequence[str]) -> None:
    """Print the cost of a decode step by batching, memory and size of the batch."""
    parser = Parser(__doc__)
    parser.add_argument("--running", type=positive_int, nargs="+", default=[16, 256, 1024])
    parser.add_argument("--steps", type=positive_int, default=2000, help="decode steps a round")
    parser.add_argument("--rounds", type=positive_int, default=5)
    options = parser.parse_args(words)
    print(f"plan and commit one decode step; {built()}\n")
    head = ["batching", "memory", "running", "µs a step", "lowest", "timeouts a step", "lowest"]
    print(table(head, []))
    for batching, memory in CASES:
        for running in options.running:
            cost = step_cost(batching, memory, running, options.steps, options.rounds)
            print(row([batching, memory, f"{running:,}", *cost.cells(2)]), flush=True)


def step_cost(batching: str, memory: str, running: int, steps: int, rounds: int) -> Cost:
    """The cost of a step: microseconds in the place of seconds."""
    cost = Cost()
    for _ in range(rounds):
        scheduler = full_batch(batching, memory, running, steps)
        gc.collect()
        cost.add(partial(cpu_seconds, partial(decode, scheduler, range(steps))))
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
        tokens = range(prompt) if memory == "prefix" else prompt
        scheduler.add(Request(number, tokens), now=0.0)
    while scheduler.clock.requests < running:
        scheduler.commit(scheduler.plan(0.0), 0.0)
    return scheduler


def decode(scheduler: Scheduler, steps: Iterable[int]) -> None:
    """Plan and commit a step at each of these times."""
    for now in steps:
        scheduler.commit(scheduler.plan(now), now)


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


class StepTimes(NamedTuple):
    """Microseconds of each timed step, and whether the step only decoded."""

    micros: list[float]
    plain: list[bool]

    def mean(self, plain: bool) -> float | None:
        """The mean of the steps that only decode, or of the others; None if there are none."""
        some = [one for one, only in zip(self.micros, self.plain, strict=True) if only is plain]
        return fmean(some) if some else None

    def least(self, other: StepTimes) -> StepTimes:
        """The smaller of both times of each step."""
        micros = [min(pair) for pair in zip(self.micros, other.micros, strict=True)]
        return StepTimes(micros, self.plain)


def policies(words: Sequence[str]) -> None:
    """Print a line for each policy, and the most expensive of all."""
    parser = Parser(__doc__)
    parser.add_argument("--running", type=positive_int, default=256, help="requests that decode")
    parser.add_argument("--waiting", type=non_negative_int, default=1000, help="requests that wait")
    parser.add_argument("--steps", type=positive_int, default=64, help="steps a round")
    parser.add_argument("--rounds", type=positive_int, default=7)
    asked = parser.parse_args(words)
    crowd = Crowd(asked.running, asked.waiting, asked.steps)
    gc.freeze()  # so that collections before each policy skip imported modules
    found = {name: times_by_policy(crowd, spare, asked.rounds) for name, spare in STATES.items()}
    print(f"{crowd.running} running, {crowd.waiting} waiting: a step that only decodes\n")
    print(policy_table(found))
    ratios = [
        (times, policy, state)
        for state, costs in found.items()
        for policy in costs
        if (times := ratio(costs, policy)) is not None
    ]
    times, policy, state = max(ratios)
    print(f"\nthe most expensive: `{policy}`, {state}: {times:.2f} × {BASE}")


def arms(crowd: Crowd) -> dict[str, Callable[[], Policy]]:
    """Factories of every policy, and of every wrapper around each of the other policies."""
    wrappers = [name for name, kind in POLICIES.items() if accepts(kind, "of")]
    inner = [name for name in POLICIES if name not in wrappers]
    made: dict[str, Callable[[], Policy]] = {name: partial(_policy, name, crowd) for name in inner}
    for name, displace in product(inner, (False, True)):
        if accepts(POLICIES[name], "displace"):
            arm = f"{name} displace={str(displace).lower()}"
            made[arm] = partial(_policy, name, crowd, displace=displace)
    for outer, of in product(wrappers, inner):
        made[outer if of == BASE else f"{outer} of={of}"] = partial(_policy, outer, crowd, of=of)
    for of in inner:
        made[f"{of} victim=rank"] = partial(_policy, of, crowd, victim="rank")
    return made


def _policy(name: str, crowd: Crowd, **settings: Any) -> Policy:
    if accepts(POLICIES[name], "most") and accepts(POLICIES[name], "of"):
        settings["most"] = crowd.running
    return make_policy(name, **settings)


def uses_prefix_cache(name: str, policy: Policy) -> bool:
    """Whether the policy needs a prefix cache to have any effect."""
    return "longest_prefix" in name or overrides(policy, "pin_prefix_for")


def crowded(policy: Policy, crowd: Crowd, spare: int, prefix: bool) -> Scheduler:
    """A scheduler with running requests of all ages, waiting ones, and `spare` free seats."""
    prompts = [384 + number % 128 for number in range(crowd.running)]
    rounds = min(16, crowd.running)
    steps = WARM_UP + crowd.steps + rounds + 2
    # Blocks for all output of the running requests, and a tenth more; a waiting request needs more.
    longest = sum((prompt + steps) // BLOCK + 2 for prompt in prompts)
    blocks = int(1.1 * longest)
    free = blocks - sum(prompt // BLOCK for prompt in prompts)
    scheduler = make_scheduler(
        memory=make_memory("prefix" if prefix else "paged", blocks=blocks, block_size=BLOCK),
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


def timed_steps(scheduler: Scheduler, steps: int) -> StepTimes:
    """Plan and commit so many steps."""
    times, now = StepTimes([], []), scheduler.now + STEP_SECONDS
    for _ in range(steps):
        begun = time.perf_counter()
        plan = scheduler.plan(now)
        scheduler.commit(plan, now + STEP_SECONDS)
        times.micros.append(1e6 * (time.perf_counter() - begun))
        times.plain.append(_only_decodes(plan))
        now += STEP_SECONDS
    return times


def _only_decodes(plan: StepPlan) -> bool:
    return not (plan.chunks or plan.preempted or plan.displaced or plan.rejected)


def times_by_policy(crowd: Crowd, spare: int, rounds: int) -> dict[str, StepTimes]:
    """The times of steps under each policy; policies take turns in each round."""
    found: dict[str, StepTimes] = {}
    for _ in range(rounds):
        for name, make in arms(crowd).items():
            policy = make()
            scheduler = crowded(policy, crowd, spare, uses_prefix_cache(name, policy))
            gc.collect()
            gc.disable()
            timed_steps(scheduler, WARM_UP)
            times = timed_steps(scheduler, crowd.steps)
            gc.enable()
            found[name] = found[name].least(times) if name in found else times
    return found


def policy_table(found: Mapping[str, Mapping[str, StepTimes]]) -> str:
    """A line for each policy."""
    head = ["policy"]
    for name in found:
        head += [f"{name}: µs", f"× {BASE}", "with moves: µs"]
    rows = []
    for policy in found[next(iter(found))]:
        cells = [f"`{policy}`"]
        for costs in found.values():
            times = ratio(costs, policy)
            cells += [_cell(costs[policy].mean(True), 1), _cell(times, 2)]
            cells.append(_cell(costs[policy].mean(False), 1))
        rows.append(cells)
    return table(head, rows)


def ratio(costs: Mapping[str, StepTimes], policy: str) -> float | None:
    """The time of a step that only decodes, as a multiple of first come, first served."""
    base, own = costs[BASE].mean(True), costs[policy].mean(True)
    return own / base if own and base else None


def _cell(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


# -- simulations under every policy ----------------------------------------------------------------

NAMED = 5
"""Compositions named below the table."""
LABELS = {"client": dict.fromkeys("abcd", 0.25), "priority": URGENT, "deadline": 60.0}


class RunCost(NamedTuple):
    """Work and cost of a simulation, for each request."""

    steps: float
    """A policy that moves requests, or runs few at a time, takes more of them."""
    preempted: float
    """Preemptions, after each of which lost tokens are computed again."""
    timeouts: float
    """The lowest of all rounds."""


def policy_runs(words: Sequence[str]) -> None:
    """Print a line for each policy, and the most expensive compositions."""
    parser = Parser(__doc__)
    parser.add_argument("--trace", type=existing_file, help=COLUMNS)
    parser.add_argument("--requests", type=positive_int, default=2000, help="of each workload")
    parser.add_argument("--rounds", type=positive_int, default=3)
    parser.add_argument("--only", nargs="+", help="of the policies and compositions")
    parser.add_argument("--compositions", action="store_true", help="all arms of `policies`")
    asked = parser.parse_args(words)
    cases = {
        "conversations": conversation(asked.trace, asked.requests, **LABELS),
        "short": short(asked.requests, 154, 312, 1000.0, **LABELS),
    }
    every = arms(Crowd(max(case.max_seqs for case in cases.values()), 0, 0))
    alone = [name for name in POLICIES if name in every]
    if unknown := set(asked.only or ()) - set(every):
        parser.error(f"--only {min(unknown)}: no such policy; there are {', '.join(every)}")
    names = asked.only or (every if asked.compositions else alone)
    chosen = {name: every[name] for name in [BASE, *names]}
    found = {load: run_costs(case, chosen, asked.rounds) for load, case in cases.items()}
    print(f"{asked.requests:,} requests of each workload; {built()}; all but × for a request\n")
    dearest = sorted(chosen, key=lambda name: -max(times(of, name) for of in found.values()))
    print(run_table(found, [name for name in dearest if name in alone]))
    for load, costs in found.items():
        composed = sorted(set(costs) - set(alone), key=lambda name: -times(costs, name))
        if worst := [f"`{name}` {times(costs, name):.2f} × {BASE}" for name in composed[:NAMED]]:
            print(f"\nthe most expensive compositions, {load}: {', '.join(worst)}")


def run_costs(
    case: Case, chosen: Mapping[str, Callable[[], Policy]], rounds: int
) -> dict[str, RunCost]:
    """The cost of the case under each policy; policies take turns in each round."""
    workload = case.workload()
    workload = replace(workload, predicted_len=workload.output_len.astype(float))
    costs = {name: Cost() for name in chosen}
    recorders: dict[str, Recorder] = {}
    for _ in range(rounds):
        for name, make in chosen.items():
            memory = "prefix" if uses_prefix_cache(name, make()) else "paged"
            here = replace(case, policy=make, memory=memory)

            def run(name: str = name, here: Case = here) -> None:
                recorders[name] = serve(here, workload)

            costs[name].add(partial(cpu_seconds, run))
    return {name: _run_cost(recorders[name], cost) for name, cost in costs.items()}


def _run_cost(recorder: Recorder, cost: Cost) -> RunCost:
    requests = recorder.requests_table()
    preempted = sum(requests["preemptions"].to_pylist())
    each = (recorder.steps_table().num_rows, preempted, min(cost.timeouts))
    return RunCost(*(all / requests.num_rows for all in each))


def run_table(found: Mapping[str, Mapping[str, RunCost]], names: Sequence[str]) -> str:
    """A line for each policy."""
    head = ["policy"]
    for load in found:
        head += [f"{load}: steps", "preempted", "timeouts", f"× {BASE}"]
    return table(head, [[f"`{name}`", *_run_cells(found, name)] for name in names])


def _run_cells(found: Mapping[str, Mapping[str, RunCost]], name: str) -> Iterator[str]:
    for costs in found.values():
        one = costs[name]
        yield from (f"{one.steps:.1f}", f"{one.preempted:.2f}", f"{one.timeouts:.1f}")
        yield f"{times(costs, name):.2f}"


def times(costs: Mapping[str, RunCost], name: str) -> float:
    """The cost of a request, as a multiple of first come, first served."""
    return costs[name].timeouts / costs[BASE].timeouts


COMMANDS = {"steps": steps, "policies": policies, "policy_runs": policy_runs}


def main(words: Sequence[str] | None = None) -> None:
    """Run one of the commands."""
    run_command(COMMANDS, words)


if __name__ == "__main__":
    main()
