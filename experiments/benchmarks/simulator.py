"""How fast the simulator is: event loop with records of every step and request.

    python -m experiments.benchmarks.simulator [--trace conv_poisson_4.5rps_10000.csv]

Times are the median of several rounds, beside one plain SimPy timeout measured in the same round.
Without the trace its place is taken by drawn requests of the same mean lengths and rate.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import median

from hydra.utils import instantiate
from omegaconf import OmegaConf

import conf
from experiments.benchmarks.yardstick import seconds, timeout_seconds
from pagedsim.build import make_memory, make_scheduler
from pagedsim.metrics.recorder import Recorder
from pagedsim.sim.cost import Roofline
from pagedsim.sim.replica import Replica
from pagedsim.sim.simulate import simulate
from pagedsim.workload import Workload, synthetic, trace


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
        memory=make_memory(blocks=case.blocks, block_size=16),
        batching=case.batching,
        max_seqs=case.max_seqs,
        max_model_len=4096,
        async_scheduling=case.ahead,
    )
    recorder = Recorder()
    simulate(scheduler, workload, Roofline(replica()), recorder, fast_forward=case.fast_forward)
    return recorder


def conversation(path: str | None, requests: int) -> Case:
    """The case that the budget is stated for."""
    if path:
        return Case("conversation trace", lambda: trace(path=path))
    lengths = {
        "shape": "lognormal",
        "prompt_mean": 1000.0,
        "prompt_cv": 0.9,
        "output_mean": 211.0,
        "output_cv": 0.8,
    }
    return Case(
        "conversation, drawn",
        lambda: synthetic(requests=requests, rate=4.5, lengths=lengths, max_len=4096),
    )


def short(requests: int, prompt: int, output: int, rate: float) -> Case:
    """Requests of one length, at random times."""
    lengths = {"shape": "fixed", "prompt": prompt, "output": output}
    return Case(
        f"{prompt} in, {output} out, {rate:g}/s",
        lambda: synthetic(requests=requests, rate=rate, lengths=lengths),
        max_seqs=256,
    )


def measure(case: Case, rounds: int) -> None:
    """Print one line."""
    times, ratios = [], []
    workload = case.workload()
    for _ in range(rounds):
        yardstick = timeout_seconds()
        found: list[Recorder] = []
        took = seconds(lambda: found.append(run(case, workload)))  # noqa: B023
        times.append(took)
        ratios.append(took / len(workload) / yardstick)
    took = median(times)
    steps, requests = found[0].steps_table(), len(workload)
    tokens = int(workload.output_len.sum() + workload.prompt_len.sum())
    print(
        f"{case.name:34} {took:8.3f} {min(times):8.3f} {median(ratios):10.1f} "
        f"{requests / took:12,.0f} {tokens / took:14,.0f} {steps.num_rows / took:12,.0f}",
        flush=True,
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trace", help="CSV: arrived_at, num_prefill_tokens, num_decode_tokens")
    parser.add_argument("--requests", type=int, default=10_000, help="of each drawn workload")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    print("Llama-2-7B, A100-80GB, block 16, 7,424 blocks; timeouts: plain SimPy timeouts a request")
    print(
        f"{'workload':34} {'median s':>8} {'best s':>8} {'timeouts':>10} "
        f"{'requests/s':>12} {'tokens/s':>14} {'iterations/s':>12}"
    )
    talk = conversation(options.trace, options.requests)
    step_by_step = Case(talk.name + ", step by step", talk.workload, fast_forward=False)
    ahead = Case(talk.name + ", a step ahead", talk.workload, ahead=True)
    saturated = short(options.requests, 154, 312, rate=1000.0)
    for case in (talk, step_by_step, ahead, saturated):
        measure(case, options.rounds)


if __name__ == "__main__":
    main()
