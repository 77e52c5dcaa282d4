"""Random runs, each as words of a command line, and what the second accountant says of each.

    python -m tests.metrics.random_runs --runs 500 --seed 7
    python -m tests.metrics.random_runs --words "policy=sjf predictor=oracle workload.rate=80"

`Case` is plain data: its words are all that is needed to run it again.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import pyarrow as pa

from pagedsim.backends.base import StoppableRecorder
from pagedsim.build import POLICIES
from pagedsim.cluster.prefix_fetch import FETCHES
from pagedsim.core import PrefillFirst, StepPlan
from pagedsim.core.queues import Queues
from pagedsim.metrics.arms import Run
from pagedsim.metrics.files import read_summary
from pagedsim.policies.victims import VICTIMS
from pagedsim.run.job import Failure, Job, run_job
from pagedsim.spec.conf import Conf
from pagedsim.spec.study import StudySpec
from tests.metrics.accountant import differences, summary_of
from tests.metrics.accounts import Books, request_rows, step_rows
from tests.metrics.ledger import Recording, watch

WORDS = ("experiment=single", "model=llama-3.2-3b", "server.max_model_len=192", "slo.ttft=0.1")
"""What all runs have in common."""
LENGTHS = (
    "{shape: fixed, prompt: 24, output: 9}",
    "{shape: uniform, prompt_min: 1, prompt_max: 60, output_min: 1, output_max: 30}",
    "{shape: lognormal, prompt_mean: 40, prompt_cv: 1.0, output_mean: 12, output_cv: 1.0}",
)
HELD = "tests.metrics.random_runs.Alternating"
DISPLACING = ("ltr", "mlfq", "plas", "skip_join", "srpt")
"""Policies that displace running requests unless a setting says otherwise."""
MEASURED = ("partial", "notices", "transfers", "backlogs", "outages", "host_blocks")
"""Entries of a summary that say something else than a metric of the accounts."""
OTHER_COLUMNS = (
    *("reason", "session", "turn", "replica", "came_from", "left", "boarded", "retries"),
    *("tokens_before", "resumed", "resumed_on", "working_set", "fetched_tokens"),
)
"""Columns of requests that say what the workload or the fleet has said."""


class Alternating(PrefillFirst):
    """Half of the batch decodes in a step, and the other half is held until the next."""

    def _decode(self, queues: Queues, plan: StepPlan) -> None:
        first = plan.number % 2
        served = queues.decoding()[first::2] or queues.decoding()
        for needy in served:
            while needy in queues.running and self._lacks(queues, needy):
                others = [one for one in queues.running if one is not needy]
                victim = queues.choose_victim(others, needy) if others else needy
                queues.preempt(plan, victim, needy)
            if needy in queues.running:
                queues.extend(plan, needy)
        plan.hold([one for one in queues.decoding() if one not in served])


class Case(NamedTuple):
    """A run."""

    words: Sequence[str]
    stop_after: int | None = None
    """Steps after which it is stopped; None: it is served to its end."""

    def __str__(self) -> str:
        stopped = f" --stop-after {self.stop_after}" if self.stop_after else ""
        return f"--words {shlex.quote(shlex.join(self.words))}{stopped}"


def draw(dice: Random) -> Case:
    """A run; a few of them are refused."""
    fleet = dice.random() < 0.4
    apart = fleet and dice.random() < 0.4
    workload = dice.choice(["synthetic"] * 4 + ["chat_sessions", "agents", "four_clients"])
    talks = workload in ("chat_sessions", "agents")
    words = _load(dice, workload, wide=not apart) + _server(dice, fleet, talks)
    if fleet:
        words += _fleet(dice, apart)
        if "memory=prefix" in words:
            words += [f"fleet.fetch={dice.choice(FETCHES)}"]
    predicted = dice.choice(["oracle", "noisy", "rank", "bucket"])
    words += [f"predictor={predicted}", f"seed={dice.randrange(100)}"]
    stops = not fleet and dice.random() < 0.15
    stop_after = dice.randint(2, 40) if stops else None
    words += _objective(dice, workload) + _hardware(dice)
    return Case(words, stop_after)


def _objective(dice: Random, workload: str) -> list[str]:
    bounds = {"tpot": [0.01, 0.02], "e2e": [0.1, 0.5]}
    own = dice.sample(sorted(bounds), dice.randint(0, 2))
    words = [f"slo.{key}={dice.choice(bounds[key])}" for key in own]
    if workload in ("synthetic", "chat_sessions") and dice.random() < 0.5:
        words += [f"+slo.clients.a.e2e={dice.choice(bounds['e2e'])}"]
    return words


def _hardware(dice: Random) -> list[str]:
    """Weights of which a step reads those of its experts; GPUs at their TDP in some steps."""
    words = [f"backend.power.compute={dice.choice([0.5, 20])}"]
    if dice.random() < 0.3:
        words += ["model=mixtral-8x7b", "hardware=h200", f"tensor_parallel={dice.choice([1, 2])}"]
    return words


def _load(dice: Random, workload: str, wide: bool) -> list[str]:
    few = dice.randint(4, 24)
    words = [f"workload={workload}"] if workload != "synthetic" else []
    if workload == "four_clients":
        words += [f"workload.requests={few}", f"workload.rate={dice.choice([20, 80, 300])}"]
        for part in ("interactive", "batch"):
            words += [f"++workload.classes.{part}.lengths={LENGTHS[-1]}"]
            words += [f"workload.classes.{part}.prefixes.tokens=16"]
        return words
    if workload == "agents":
        words += ["~workload.programs.thoughts", "workload.programs.map_reduce.share=0.4"]
        words += ["++workload.programs.react.turns=3", "++workload.programs.react.tool=0.02"]
        words += ["++workload.programs.map_reduce.width=3", "workload.max_len=180"]
        for part in ("react", "map_reduce"):
            words += [f"++workload.programs.{part}.lengths={LENGTHS[-1]}"]
            words += [f"workload.programs.{part}.prefixes.tokens=16"]
    else:
        words += [f"workload.deadline={dice.choice([0.02, 0.2, 2])}"]
        words += [f"workload.max_len={dice.choice([120, 250])}"]
        words += [dice.choice(["workload.priority=1", "workload.priority={0: 0.5, 1: 0.5}"])]
        clients = dice.choice(["a", "{a: 0.7, b: 0.3}", "{a: 0.4, b: 0.3, c: 0.3}"])
        words += [f"workload.client={clients}"]
        words += [f"workload.prefixes={{tokens: {dice.choice([20, 40])}, count: 3}}"]
    if workload == "synthetic":
        if wide and dice.random() < 0.3:
            words += [dice.choice(["workload.n=2", "workload.n=3", "workload.beam=3"])]
        words += [f"workload.requests={few}", f"++workload.lengths={dice.choice(LENGTHS)}"]
        return words + _arrivals(dice, 1)
    words += [f"workload.sessions={few // 4 + 1}"]
    if workload == "chat_sessions":
        words += [f"++workload.lengths={LENGTHS[-1]}", "workload.think=0.05"]
    return words + _arrivals(dice, 4)


def _arrivals(dice: Random, fewer: int) -> list[str]:
    kind = dice.choice(["poisson", "poisson", "poisson", "gamma", "burst", "closed"])
    words = [f"workload.arrivals={kind}"]
    if kind in ("poisson", "gamma"):
        words += [f"workload.rate={dice.choice([10, 50, 200, 1000]) / fewer:g}"]
    if kind == "gamma":
        words += ["workload.cv=3"]
    if kind == "closed":
        words += [f"workload.users={dice.randint(1, 6)}"]
        words += [f"workload.think_time={dice.choice([0, 0.01])}"]
    return words


def _server(dice: Random, movable: bool, talks: bool) -> list[str]:
    options = Conf()
    words = [f"server.max_seqs={dice.choice([3, 8, 64])}"]
    if dice.random() < 0.4:
        words += ["server.async_scheduling=true"]
    if not movable and dice.random() < 0.15:
        server = dice.choice(options.options_of("server"))
        size = 1 if server.startswith("sglang") else 16
        return [f"server={server}", f"memory.blocks={dice.choice([260, 600]) // size}", *words]
    memory = dice.choice(["paged", "prefix"] if movable else options.options_of("memory"))
    batchings = [*options.options_of("batching"), HELD, HELD]
    if movable:
        batchings = [name for name in batchings if name not in ("static", "sglang")]
    elif memory.startswith("reserved"):
        batchings.remove("sglang")
    batching = dice.choice(batchings)
    key = "batching._target_" if batching == HELD else "batching"
    words += [f"{key}={batching}", f"memory={memory}"]
    paged = memory in ("paged", "prefix")
    size = dice.choice([2, 4, 16] if paged else [1, 4, 8])
    blocks = dice.choice([260, 260, 600]) // size
    words += [f"memory.block_size={size}", f"memory.blocks={blocks}"]
    if paged and batching != "sglang" and dice.random() < 0.5:
        words += [f"preemption={dice.choice(['swap', 'cheapest'])}"]
        words += [f"memory.cpu_blocks={dice.choice([2, blocks])}"]
    elif paged and batching == "unified" and not movable:
        words += ["offload=vllm", f"offload.chunks={blocks}", "offload.protect_promoted=true"]
        words += [f"offload.tiers.disk.gib={dice.choice([0, 'null'])}"]
    return words + _policy(dice, memory, batching, talks)


def _policy(dice: Random, memory: str, batching: str, talks: bool) -> list[str]:
    policies = set(Conf().options_of("policy"))
    policies -= {"dfs_weight"} if memory != "radix" else set()
    policies -= {"continuum"} if memory != "prefix" else set()
    policies -= {name for name, kind in POLICIES.items() if "session" in kind.needs and not talks}
    policy = dice.choice(sorted(policies))
    words = [f"policy={policy}"]
    if policy in DISPLACING and batching == "static":
        words += ["policy.displace=false"]
    if dice.random() < 0.2:
        words += [f"policy.victim={dice.choice(sorted(VICTIMS))}"]
    return words


def _fleet(dice: Random, apart: bool) -> list[str]:
    if apart:
        words = ["fleet=prefill_decode", f"fleet.pools.prefill.replicas={dice.randint(1, 2)}"]
        words += [f"fleet.pools.decode.replicas={dice.randint(1, 2)}"]
        words += [f"fleet.link.bandwidth_gb_s={dice.choice([1, 50])}"]
        words += [
            f"fleet.link.failure_rate={dice.choice([0, 0, 0.3])}",
            "fleet.link.timeout_s=0.02",
        ]
        words += [f"fleet.on_receiver_death={dice.choice(['resend', 'recompute'])}"]
        count = 2
    else:
        count = dice.randint(2, 3)
        words = [f"fleet.replicas={count}"]
    words += [f"router={dice.choice(Conf().options_of('router'))}"]
    words += [f"fleet.staleness={dice.choice([0, 0, 0.05])}"]
    if dice.random() < 0.4:
        at = [f"{{replica: {dice.randrange(count)}, at: {dice.random() / 2:.3f}, for: 0.05}}"]
        words += [
            dice.choice(
                [
                    f"fleet.failures=[{at[0]}]",
                    "fleet.failures={mean_between: 0.2, mean_repair: 0.05}",
                ]
            )
        ]
        words += [f"fleet.max_retries={dice.choice([0, 2, 100])}"]
    elif dice.random() < 0.3:
        words += ["fleet.autoscale={rule: queue, up: 2, down: 1, interval_s: 0.05, startup_s: 0.1}"]
    return words


@cache
def _base() -> StudySpec:
    return StudySpec.of(WORDS, Path())


def configured(words: Sequence[str]) -> dict[str, Any]:
    """The configuration of a run."""
    return _base().configured("", words)


def check(case: Case, folder: Path) -> list[str] | None:
    """Where what a command would print is not what is true, a line each; None: it is refused.

    What is printed is that of a run as ever; of one that is stopped, of the run that was watched.
    """
    config = configured(case.words)
    seed = config["seed"]
    recording = watch(config, folder, seed, case.stop_after)
    if isinstance(recording, Failure):
        assert recording.expected and recording.error is None, f"{case}\n{recording.trace}"
        return None
    assert isinstance(recording, Recording), case
    if case.stop_after is None:
        run_job(Job("", seed, config, folder), StoppableRecorder())
    run, books = Run("", seed, folder, config, read_summary(folder)), Books(recording)
    wrong = differences(request_rows(books), _rows(run.requests(), OTHER_COLUMNS), "requests")
    wrong += differences(step_rows(books), _rows(run.steps()), "steps")
    printed = {name: value for name, value in run.summary.items() if name not in MEASURED}
    wrong += differences(summary_of(books), printed)
    cut_off = config["fleet"]["failures"] is not None or case.stop_after is not None
    unsure: list[str] = []
    if config["server"]["async_scheduling"] and cut_off:
        # What a step in flight had computed by then is not known: the scheduler takes it for all.
        unsure += ["recomputed_tokens", "prefill_tokens"]
    if config["offload"]["_target_"].endswith("VLLMOffload"):
        # Plans say what was found, and not where; all of it is in cached_tokens.
        unsure += ["gpu_hit_tokens", "host_hit_tokens", "storage_hit_tokens"]
    return [line for line in wrong if not any(f".{name}:" in f".{line}" for name in unsure)]


def _rows(table: pa.Table, without: Sequence[str] = ()) -> list[dict[str, Any]]:
    kept = [name for name in table.column_names if name not in without]
    rows: list[dict[str, Any]] = table.select(kept).to_pylist()
    return rows


# -- from the command line -------------------------------------------------------------------------


def search(runs: int, first: int) -> int:
    """Check so many random runs, from that seed on; how many of them were not refused."""
    done = 0
    with TemporaryDirectory() as folder:
        for number in range(first, first + runs):
            case = draw(Random(number))
            wrong = check(case, Path(folder))
            done += wrong is not None
            assert not wrong, f"run {number}: {case}\n  " + "\n  ".join(wrong)
    return done


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.metrics.random_runs", description=__doc__
    )
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0, help="of the first run")
    parser.add_argument("--words", help="those of one run, in place of random ones")
    parser.add_argument("--stop-after", type=int, help="steps after which that run is stopped")
    given = parser.parse_args()
    if given.words is None:
        print(
            f"{search(given.runs, given.seed)} of {given.runs} runs agree, the others are refused"
        )
        return 0
    with TemporaryDirectory() as folder:
        wrong = check(Case(shlex.split(given.words), given.stop_after), Path(folder))
    print("refused" if wrong is None else "\n".join(wrong) or "agrees")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
