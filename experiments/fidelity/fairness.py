"""Fairness among clients, validated against logs of a real server under two policies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from signal import SIG_DFL, SIGINT, signal
from typing import Any, ClassVar

from experiments.fidelity import fairness_report as words
from experiments.fidelity.fairness_pair import Pair, Paired, Rules
from experiments.fidelity.fairness_report import draw_gaps, gaps_of, notes
from pagedsim.build import inner_policy
from pagedsim.core import ConfigError
from pagedsim.core.errors import require_flag, require_number, require_whole
from pagedsim.fidelity.external_log import Log, read_log
from pagedsim.metrics.result import PUBLISHED
from pagedsim.report.figures import FigureSpec
from pagedsim.run.backend import Settings
from pagedsim.run.job import Arm
from pagedsim.run.objects import require_kinds
from pagedsim.run.pool import inside_a_worker
from pagedsim.run.runs import Runs, cores
from pagedsim.run.study import Analysis, Study

DATA = Path(__file__).parents[1] / "data"
"""Folder of the logs that come with pagedsim."""
FEWEST = 20
"""Minimum number of requests to fit four coefficients to."""


@dataclass(frozen=True, kw_only=True)
class Fairness(Study):
    """Step times are fitted to a log under FCFS; then another policy is predicted and compared with
    its own log. `fcfs` and `other` replace the listed pairs by the user's own.
    """

    backends = ("sim",)
    why = "the logs are of a server elsewhere"
    asks = False
    idle: ClassVar[Mapping[str, str]] = {
        "workload": "the requests are those of the logs",
        "seeds": "the logs are served once",
    }

    title: str
    question: str
    source: str
    fcfs: str | None
    other: str | None
    policy: str
    more: Sequence[str]
    pairs: Mapping[str, Mapping[str, Any]]
    machines: Mapping[str, Sequence[str]]
    known: float
    least: int
    moves: int
    more_prompt: int
    adapter: int
    prompts: int
    cold: bool
    within: float

    def __post_init__(self) -> None:
        require_kinds(self)
        require_number("known", self.known, above=0)
        for key, at_least in {"least": FEWEST, "moves": 1, "prompts": 1}.items():
            require_whole(key, getattr(self, key), at_least)
        for key in ("more_prompt", "adapter"):
            require_whole(key, getattr(self, key), 0)
        require_flag("cold", self.cold)
        require_number("within", self.within, above=0)
        for key, names in {"policy": [self.policy], "more": self.more}.items():
            for name in names:
                try:
                    inner_policy(name)
                except ConfigError as error:
                    said = str(error).replace("unknown of", f"unknown {key}", 1)
                    raise ConfigError(said) from error
        if "fcfs" in (self.policy, *self.more) or self.policy in self.more:
            raise ConfigError(
                f"policy={self.policy}, more={self.more}: must be different policies, none of them "
                "fcfs, under which the first log is"
            )
        if (self.fcfs is None) != (self.other is None):
            raise ConfigError("fcfs, other: two logs make a pair: give both or neither")
        if not self.pairs and self.fcfs is None:
            raise ConfigError("pairs: none is listed: give fcfs= and other=, the logs of one")

    def next_runs(self, runs: Runs) -> Sequence[Arm]:
        self._pairs(runs)  # refused at once, if any is wrong
        return ()

    def analyse(self, runs: Runs) -> Analysis:
        pairs = list(self._pairs(runs))
        done = _studied(pairs, runs)
        rows = [row for pair in done for row in words.rows(pair, self.within)]
        gaps = {pair.name: gaps_of(pair) for pair in done}
        return Analysis(
            finding=words.finding(done, rows, self.within),
            rows=rows,
            beside=PUBLISHED if self.fcfs is None else ("measured", "simulated"),
            listings=[words.clients(done), words.elsewise(done), words.others(done)],
            notes=list(notes(done, self.cold)),
            data={"pairs": {pair.name: words.data(pair) for pair in done}, "gaps": gaps},
            drawings={
                "gaps": FigureSpec(
                    "How far apart clients are",
                    "The largest difference in service between two clients since the beginning, "
                    "1 for a token of a prompt and 2 for one of an answer. Lines are measured, "
                    "dashes simulated with step times that are fitted to the log under FCFS.",
                    partial(draw_gaps, gaps),
                )
            },
            table=words.table(done),
        )

    # -- the logs ----------------------------------------------------------------------------------

    def _pairs(self, runs: Runs) -> list[Pair]:
        if self.fcfs is not None and self.other is not None:
            return [self._pair("your logs", "study", runs.config, self.fcfs, self.other)]
        return [self._listed(name, of, runs) for name, of in self.pairs.items()]

    def _listed(self, name: str, of: Mapping[str, Any], runs: Runs) -> Pair:
        where = f"study.pairs.{name}"
        if set(of) != {"machine", "fcfs", "other"}:
            raise ConfigError(f"{where}: has {', '.join(of)}: must have machine, fcfs, other")
        if of["machine"] not in self.machines:
            known = ", ".join(self.machines)
            raise ConfigError(f"{where}.machine={of['machine']}: must be one of {known}")
        config = runs.command.configured(where, self.machines[of["machine"]])
        return self._pair(name, where, config, str(of["fcfs"]), str(of["other"]))

    def _pair(self, name: str, where: str, config: Settings, fcfs: str, other: str) -> Pair:
        if "of" not in config["policy"]:
            raise ConfigError(
                "policy: must be one that wraps another, such as past_future: it decides "
                "admission, and the logs' policies the order"
            )
        if config["memory"].get("blocks") is None:
            raise ConfigError("memory.blocks: must be given: the server's pool, in blocks")
        rules = Rules(**{one.name: getattr(self, one.name) for one in fields(Rules)})
        first, second = _log(f"{where}.fcfs", fcfs), _log(f"{where}.other", other)
        return Pair(name, config, first, second, self.policy, self.more, rules)


def _log(where: str, path: str) -> Log:
    """Read a log from a path, or from those that come with pagedsim."""
    file = Path(path).expanduser()
    if not file.exists() and (DATA / path).exists():
        file = DATA / path
    try:
        log = read_log(file)
    except ConfigError as error:
        raise ConfigError(str(error).replace("requests=", f"{where}=")) from error
    for place, client in zip(log.places, log.client, strict=True):
        if not client and any(log.client):
            raise ConfigError(f"{place}: client is empty: must be a name, as in other rows")
    if len(set(log.client)) < 2:
        raise ConfigError(
            f"{where}={path}: names fewer than two clients: needs a column client, and two at least"
        )
    if len(log) < FEWEST or not log.arrived[-1]:
        raise ConfigError(
            f"{where}={path}: {len(log)} requests within {log.arrived[-1]:g} s: must be at least "
            f"{FEWEST}, that come one after another"
        )
    if log.output.max() < 2:
        raise ConfigError(
            f"{where}={path}: has no answer of two tokens or more: nothing tells how long a decode "
            "takes"
        )
    return log


def _studied(pairs: Sequence[Pair], runs: Runs) -> list[Paired]:
    """Study all pairs in parallel, the longest first."""
    workers = min(runs.config["jobs"] or cores(), len(pairs))
    if workers == 1 or inside_a_worker():
        return [pair.studied() for pair in pairs]
    # Ctrl-C reaches all processes; workers exit silently.
    with ProcessPoolExecutor(workers, None, signal, (SIGINT, SIG_DFL)) as pool:
        longest = sorted(pairs, key=lambda pair: len(pair.first), reverse=True)
        done = {pair.name: pool.submit(pair.studied) for pair in longest}
        return [done[pair.name].result() for pair in pairs]
