"""What a whole simulation costs under every policy, and under compositions of two.

    python -m experiments.benchmarks.policy_runs [--trace conv_poisson_4.5rps_10000.csv]

Conversations and short requests on the server of `simulator.py`, from four clients and of two
priorities, with deadlines and with their true lengths as predictions, so that every policy has what
it goes by. Policies are all that have a name, and with `--compositions` all arms of `policies.py`,
the most expensive of which are named. They take turns; a policy that keeps the prefix cache's
blocks, or ranks by them, has one.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from experiments.benchmarks.policies import BASE, Crowd, arms
from experiments.benchmarks.simulator import URGENT, Case, conversation, run, short
from experiments.benchmarks.yardstick import Cost, add
from pagedsim.build import POLICIES
from pagedsim.core import Policy
from pagedsim.core.policy import overrides
from pagedsim.metrics.recorder import Recorder
from pagedsim.run.compilation import built

MOST = 5
"""Compositions that are named."""
LABELS = {"client": dict.fromkeys("abcd", 0.25), "priority": URGENT, "deadline": 60.0}


def loads(trace: str | None, requests: int) -> dict[str, Case]:
    """What is served."""
    return {
        "conversations": conversation(trace, requests, **LABELS),
        "short": short(requests, 154, 312, 1000.0, **LABELS),
    }


def under(case: Case, name: str, make: Callable[[], Policy]) -> Case:
    """The same under a policy."""
    prefix = "longest_prefix" in name or overrides(make(), "lingers")
    return replace(case, policy=make, memory="prefix" if prefix else "paged")


class Found(NamedTuple):
    """What a simulation costs, the least of several rounds."""

    timeouts: float
    """A request."""
    each: float
    """Timeouts a step: a policy that moves requests, or runs few at a time, takes more steps."""


def measured(
    case: Case, policies: Mapping[str, Callable[[], Policy]], rounds: int
) -> dict[str, Found]:
    """What each costs."""
    workload = case.workload()
    workload = replace(workload, predicted_len=workload.output_len.astype(float))
    costs, steps = {name: Cost([], []) for name in policies}, dict.fromkeys(policies, 0)
    for _ in range(rounds):
        for name, make in policies.items():
            recorders: list[Recorder] = []
            here = under(case, name, make)
            add(costs[name], lambda: recorders.append(run(here, workload)))  # noqa: B023
            steps[name] = recorders[0].steps_table().num_rows
    least = {name: min(cost.timeouts) for name, cost in costs.items()}
    return {name: Found(all / len(workload), all / steps[name]) for name, all in least.items()}


def table(found: Mapping[str, Mapping[str, Found]], names: Sequence[str]) -> Iterator[str]:
    """A line for each policy."""
    heads = [f"{load}: timeouts a request | × {BASE} | a step" for load in found]
    yield f"| policy | {' | '.join(heads)} |"
    yield "|---" * (1 + 3 * len(found)) + "|"
    for name in names:
        cells = [
            cell
            for costs in found.values()
            for cell in (
                f"{costs[name].timeouts:.1f}",
                times(costs, name),
                f"{costs[name].each:.1f}",
            )
        ]
        yield f"| `{name}` | {' | '.join(cells)} |"


def times(costs: Mapping[str, Found], name: str) -> str:
    """The cost of a request, as a multiple of first come, first served."""
    return f"{costs[name].timeouts / costs[BASE].timeouts:.2f}"


def main(words: Sequence[str] | None = None) -> None:
    """Print a line for each policy, and the most expensive compositions."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trace", help="CSV: arrived_at, num_prefill_tokens, num_decode_tokens")
    parser.add_argument("--requests", type=int, default=2000, help="of each workload")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="+", help="of the policies and compositions")
    parser.add_argument("--compositions", action="store_true", help="those of policies.py, too")
    asked = parser.parse_args(words)
    cases = loads(asked.trace, asked.requests)
    every = arms(Crowd(max(case.max_seqs for case in cases.values()), 0, 0))
    alone = [name for name in POLICIES if name in every]
    if unknown := set(asked.only or ()) - set(every):
        parser.error(f"--only {min(unknown)}: no such policy; there are {', '.join(every)}")
    names = asked.only or (every if asked.compositions else alone)
    policies = {name: every[name] for name in [BASE, *names]}
    found = {load: measured(case, policies, asked.rounds) for load, case in cases.items()}
    print(f"{asked.requests:,} requests of each workload; {built()}\n")
    print("\n".join(table(found, [name for name in policies if name in alone])))
    for load, costs in found.items():
        composed = sorted(set(costs) - set(alone), key=lambda name: -costs[name].timeouts)
        told = [f"`{name}` {times(costs, name)} × {BASE}" for name in composed[:MOST]]
        if told:
            print(f"\nthe most expensive compositions, {load}: {', '.join(told)}")


if __name__ == "__main__":
    main()
