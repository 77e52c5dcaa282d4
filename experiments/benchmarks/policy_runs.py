"""What a whole simulation costs under every policy, and under compositions of two.

    python -m experiments.benchmarks.policy_runs [--trace conv_poisson_4.5rps_10000.csv]

Conversations and short requests on the server of `simulator.py`, from four clients and of two
priorities, with deadlines and with their true lengths as predictions, so that every policy has what
it goes by. Policies are all that have a name, the most expensive first, and with `--compositions`
all arms of `policies.py`, the most expensive of which are named. They take turns; a policy that
keeps the prefix cache's blocks, or ranks by them, has one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from experiments.benchmarks.policies import BASE, Crowd, arms
from experiments.benchmarks.simulator import URGENT, Case, conversation, run, short
from experiments.benchmarks.words import Parser, at_least_one, existing
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
    prefix = "longest_prefix" in name or overrides(make(), "pin_prefix_for")
    return replace(case, policy=make, memory="prefix" if prefix else "paged")


class Found(NamedTuple):
    """What a simulation does and costs, for each request."""

    steps: float
    """A policy that moves requests, or runs few at a time, takes more of them."""
    preempted: float
    """How often: each time the request is admitted again, and computes again what it lost."""
    timeouts: float
    """The least of several rounds."""


def measured(
    case: Case, policies: Mapping[str, Callable[[], Policy]], rounds: int
) -> dict[str, Found]:
    """What each costs."""
    workload = case.workload()
    workload = replace(workload, predicted_len=workload.output_len.astype(float))
    costs = {name: Cost([], []) for name in policies}
    recorders: dict[str, Recorder] = {}
    for _ in range(rounds):
        for name, make in policies.items():
            here = under(case, name, make)
            add(costs[name], lambda: recorders.update({name: run(here, workload)}))  # noqa: B023
    return {name: _found(recorders[name], cost) for name, cost in costs.items()}


def _found(recorder: Recorder, cost: Cost) -> Found:
    requests = recorder.requests_table()
    preempted = sum(requests["preemptions"].to_pylist())
    each = (recorder.steps_table().num_rows, preempted, min(cost.timeouts))
    return Found(*(all / requests.num_rows for all in each))


def table(found: Mapping[str, Mapping[str, Found]], names: Sequence[str]) -> Iterator[str]:
    """A line for each policy."""
    heads = [f"{load}: steps | preempted | timeouts | × {BASE}" for load in found]
    yield f"| policy | {' | '.join(heads)} |"
    yield "|---" * (1 + 4 * len(found)) + "|"
    for name in names:
        cells = [f"`{name}`"]
        for costs in found.values():
            cells += [f"{costs[name].steps:.1f}", f"{costs[name].preempted:.2f}"]
            cells += [f"{costs[name].timeouts:.1f}", f"{times(costs, name):.2f}"]
        yield f"| {' | '.join(cells)} |"


def times(costs: Mapping[str, Found], name: str) -> float:
    """The cost of a request, as a multiple of first come, first served."""
    return costs[name].timeouts / costs[BASE].timeouts


def main(words: Sequence[str] | None = None) -> None:
    """Print a line for each policy, and the most expensive compositions."""
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--trace", type=existing, help="CSV: arrived_at, num_prefill_tokens, num_decode_tokens"
    )
    parser.add_argument("--requests", type=at_least_one, default=2000, help="of each workload")
    parser.add_argument("--rounds", type=at_least_one, default=3)
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
    print(f"{asked.requests:,} requests of each workload; {built()}; all but × for a request\n")
    dearest = sorted(policies, key=lambda name: -max(times(of, name) for of in found.values()))
    print("\n".join(table(found, [name for name in dearest if name in alone])))
    for load, costs in found.items():
        composed = sorted(set(costs) - set(alone), key=lambda name: -times(costs, name))
        told = [f"`{name}` {times(costs, name):.2f} × {BASE}" for name in composed[:MOST]]
        if told:
            print(f"\nthe most expensive compositions, {load}: {', '.join(told)}")


if __name__ == "__main__":
    main()
