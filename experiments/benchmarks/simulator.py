"""How fast the simulator is: event loop with records of every step and request.

    python -m experiments.benchmarks.simulator [--trace conv_poisson_4.5rps_10000.csv]

Times are the processor's, in rounds in which all cases take turns, beside one plain SimPy timeout
measured before and after. Without the trace its place is taken by drawn requests of the same mean
lengths and rate.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from statistics import median
from typing import Any

from hydra.utils import instantiate
from omegaconf import OmegaConf

import conf
from experiments.benchmarks.words import Parser, at_least_one, existing
from experiments.benchmarks.yardstick import Cost, add
from pagedsim.build import make_memory, make_scheduler
from pagedsim.core import Policy
from pagedsim.metrics.recorder import Recorder
from pagedsim.run.compilation import built
from pagedsim.sim.cost import Roofline
from pagedsim.sim.replica import Replica
from pagedsim.sim.simulate import simulate
from pagedsim.workload import Workload, chat_sessions, synthetic, trace
from policies.fcfs import FCFS
from policies.priority import Priority


@dataclass(frozen=True)
class Case:
    """A workload on a server."""

    name: str
    workload: Callable[[], Workload]
    max_seqs: int = 128
    blocks: int = 7424
    batching: str = "prefill_first"
    fast_forward: bool = True
    ahead: bool = False
    """Whether each step is planned while the one before runs."""
    memory: str = "paged"
    policy: Callable[[], Policy] = FCFS


@cache
def replica() -> Replica:
    """Llama-2-7B on an A100 with 80 GB, blocks of 16 tokens."""
    folder = Path(conf.__file__).parent
    return Replica(
        model=instantiate(OmegaConf.load(folder / "model" / "llama-2-7b.yaml")),
        hardware=instantiate(OmegaConf.load(folder / "hardware" / "a100-80gb.yaml")),
    )


def run(case: Case, workload: Workload) -> Recorder:
    """Serve the workload and record it."""
    scheduler = make_scheduler(
        memory=make_memory(case.memory, blocks=case.blocks, block_size=16),
        policy=case.policy(),
        batching=case.batching,
        max_seqs=case.max_seqs,
        max_model_len=4096,
        async_scheduling=case.ahead,
    )
    recorder = Recorder()
    simulate(scheduler, workload, Roofline(replica()), recorder, fast_forward=case.fast_forward)
    return recorder


LENGTHS = {
    "shape": "lognormal",
    "prompt_mean": 1000.0,
    "prompt_cv": 0.9,
    "output_mean": 211.0,
    "output_cv": 0.8,
}
URGENT = {0.0: 0.2, 1.0: 0.8}
"""How many requests have which priority."""


def conversation(path: str | None, requests: int | None, **labels: Any) -> Case:
    """The case that the budget is stated for."""
    if path:
        return Case("conversation trace", lambda: trace(path=path, requests=requests, **labels))
    drawn = partial(synthetic, requests=requests, rate=4.5, lengths=LENGTHS, max_len=4096)
    return Case("conversation, drawn", lambda: drawn(**labels))


def sessions(requests: int) -> Case:
    """Conversations whose prompts have contents, so that a prefix cache finds some of them."""
    few = {"shape": "geometric", "mean": 4}
    own = LENGTHS | {"prompt_mean": 250.0}
    talk = partial(chat_sessions, rate=1.1, turns=few, think=15.0, lengths=own, max_len=4096)
    return Case(
        "conversations, prefix cache",
        lambda: talk(sessions=max(1, requests // 4)),
        memory="prefix",
    )


def short(requests: int, prompt: int, output: int, rate: float, **labels: Any) -> Case:
    """Requests of one length, at random times."""
    lengths = {"shape": "fixed", "prompt": prompt, "output": output}
    return Case(
        f"{prompt} in, {output} out, {rate:g}/s",
        lambda: synthetic(requests=requests, rate=rate, lengths=lengths, **labels),
        max_seqs=256,
    )


def cases(path: str | None, requests: int) -> list[Case]:
    """What the budget is stated for, and what it must not cost much more for."""
    talk = conversation(path, requests)
    urgent = conversation(path, requests, priority=URGENT)
    return [
        talk,
        replace(talk, name=f"{talk.name}, step by step", fast_forward=False),
        replace(talk, name=f"{talk.name}, a step ahead", ahead=True),
        replace(
            urgent,
            name=f"{talk.name}, priority displaces",
            policy=partial(Priority, displace=True),
        ),
        sessions(requests),
        short(requests, 154, 312, rate=1000.0),
    ]


def row(case: Case, workload: Workload, cost: Cost, steps: int) -> str:
    """A line of the table."""
    took, requests = median(cost.seconds), len(workload)
    tokens = int(workload.output_len.sum() + workload.prompt_len.sum())
    rates = [f"{requests / took:,.0f}", f"{tokens / took / 1e6:.1f} M", f"{steps / took:,.0f}"]
    return f"| {' | '.join([case.name, *cost.cells(3, requests), *rates])} |"


def main() -> None:
    """Print the table."""
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--trace", type=existing, help="CSV: arrived_at, num_prefill_tokens, num_decode_tokens"
    )
    parser.add_argument("--requests", type=at_least_one, default=10_000, help="of each workload")
    parser.add_argument("--rounds", type=at_least_one, default=5)
    options = parser.parse_args()
    served = [
        (case, case.workload(), Cost([], [])) for case in cases(options.trace, options.requests)
    ]
    found = [run(case, workload).steps_table().num_rows for case, workload, _ in served]
    for _ in range(options.rounds):
        for case, workload, cost in served:
            add(cost, partial(run, case, workload))
    print(f"Llama-2-7B, A100-80GB, 7,424 blocks of 16; {built()}; timeouts a request\n")
    print(
        "| workload | seconds | lowest | timeouts | lowest | requests/s | tokens/s | iterations/s |"
    )
    print("|---" * 8 + "|")
    for (case, workload, cost), steps in zip(served, found, strict=True):
        print(row(case, workload, cost, steps))


if __name__ == "__main__":
    main()
