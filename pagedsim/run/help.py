"""The pages of `--help`, `policies` and `bench --help`."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from inspect import getdoc, isclass
from typing import Any, cast, get_type_hints

from omegaconf import DictConfig, OmegaConf

import pagedsim
from pagedsim.build import (
    BATCHINGS,
    POLICIES,
    PREEMPTIONS,
    accepts,
    make_batching,
    make_memory,
    make_policy,
    make_preemption,
    make_scheduler,
    plugin_policy,
    plugin_sources,
    plugins,
)
from pagedsim.core import ConfigError, Policy
from pagedsim.core.policy import Need
from pagedsim.options import Options
from pagedsim.policies.victims import VICTIMS
from pagedsim.run.objects import locate
from pagedsim.run.study import Study

WIDTH = 96
_INDENT = 18

GROUPS = {
    "experiment": "what is studied: which arms, under which workload",
    "server": "batching, memory, policy, limits and stack of a real server together",
    "policy": "which request goes first, which yields its memory",
    "preemption": "what becomes of the memory of a request that yields",
    "batching": "how a step is composed",
    "memory": "how keys and values are stored",
    "model": "what is served",
    "hardware": "the GPU, from its data sheet",
    "stack": "what software takes beside the kernels, where step times come from data sheets",
    "cost": "how long a step takes",
    "workload": "which requests arrive, and when",
    "predictor": "predicted lengths of answers, for policies",
    "fleet": "how many replicas there are, and how they differ",
    "router": "which replica gets a request",
    "backend": "what carries the steps out: simulated time, a real engine, or a server over HTTP",
    "scale": "how much of the study is run: backend=engine takes a part, unless scale=full",
    "tracking": "Weights & Biases",
}
"""The groups in the order of the page, and what each decides."""

Settings = Mapping[str, Sequence[tuple[str, str]]]
"""Keys with their meanings, under titles."""

SETTINGS: Settings = {
    "The study": (
        ("seeds", "runs of each arm, each with other requests (the same for every arm)"),
        ("seed", "the first of these seeds; the same seed gives the same bytes"),
        ("jobs", "processes; null: as many as there are cores, one for backend=engine"),
        ("report", "whether to draw plots and write report.html"),
        ("slo.ttft", "seconds; with any slo.* the table has goodput (also slo.tpot, slo.e2e)"),
        ("slo.clients", "bounds of single clients: +slo.clients.interactive.ttft=0.5"),
        ("qoe.ttft", "seconds that a reader waits gladly; qoe.tokens_per_s: how fast it reads"),
    ),
    "The load (workload=sharegpt; the others have their own, see --cfg job)": (
        ("workload.rate", "requests/s on average"),
        ("workload.requests", "how many; or workload.duration, in seconds"),
        ("workload.arrivals", "poisson | gamma | fixed | burst | closed"),
        ("workload.max_len", "tokens of prompt and answer together, at most"),
    ),
    "The server": (
        ("server.max_seqs", "sequences in a batch, at most"),
        ("server.max_batched_tokens", "tokens that one step computes; null: the batching's choice"),
        ("server.max_model_len", "tokens of a request; null: the model's, if memory holds as many"),
        ("server.async_scheduling", "true: a step is planned while the one before runs"),
        ("memory.block_size", "tokens"),
        ("memory.blocks", "GPU blocks; null: as many as fit beside the model"),
        ("memory.gpu_memory_utilization", "share of the GPU's memory that is used"),
        ("memory.swap_space_gib", "GiB of CPU memory a GPU, for preemption=swap"),
        ("memory.swap_bound", "true: never more blocks on the CPU than the GPU has"),
        ("tensor_parallel", "GPUs that share the model"),
        ("pipeline_parallel", "stages to which its layers are dealt (backend=sim)"),
        ("expert_parallel", "GPUs of a stage to which experts are dealt (backend=sim)"),
        ("quantization", "int8 or fp8: the layers hold their weights in 8 bits"),
        ("kv_cache_dtype", "auto: as the model has them; fp8 (fp8_e4m3), fp8_e5m2: half the bytes"),
        ("backend.overlap", "whether swapping out goes on beside the computation"),
    ),
    "What it leaves": (
        ("tracking.mode", "offline needs no account; online, or none"),
        ("plugins", "modules of your own whose metrics and plots it has, too: [my_metrics]"),
        ("hydra.run.dir", "where results go (default: outputs/<date>/<time>-<experiment>)"),
        ("hydra.verbose", "true: errors with their traceback"),
    ),
}

EXAMPLES = (
    ("the default: what priority buys the urgent, and what it costs the others", ""),
    ("one run, of what you choose", "experiment=single model=llama-3.1-8b hardware=h100"),
    (
        "what fits, how long a step takes and what binds it: worked out, nothing runs",
        "experiment=estimate model=llama-3.1-8b hardware=h100 prompt=2048 batch=32",
    ),
    ("another comparison, on another card", "experiment=preemption hardware=a10"),
    (
        "two arms of your own",
        "experiment=compare workload.rate=6 \\\n"
        """    'study.arms={v0: ["batching=prefill_first"], v1: ["batching=unified"]}'""",
    ),
    (
        "the same study on the real engine, with a tiny model on a CPU (needs the engine extra)",
        "experiment=fcfs_vs_priority backend=engine",
    ),
    (
        "and all of it on a GPU, with random weights of a model's shape, or with a real model",
        "backend=engine scale=full model=llama-3.1-8b",
    ),
    (
        "does the simulator plan what the engine planned? (any study with backend=engine will do)",
        "experiment=replay run=outputs/2026-01-31/12-00-00-record",
    ),
    (
        "how long does a step take here? fits cost=fitted (with run=<folder>: to that run)",
        "experiment=calibrate backend=engine",
    ),
    (
        "how fast is a server elsewhere? from its requests' times; other settings describe it",
        "experiment=calibrate requests=log.csv model=llama-3.1-8b memory.blocks=2588",
    ),
    (
        "another log, with what was fitted to one",
        "experiment=predict fit=outputs/2026-01-31/12-00-00-calibrate requests=b.csv",
    ),
    (
        "the same, of a server that answers over HTTP: observe it, then fit to what was seen",
        "bench url=http://localhost:8000 workload.rate=4 record=log.csv",
    ),
    (
        "how far is the simulator from the engine? (backend.clock=cpu: on a shared machine)",
        "experiment=validate backend=engine backend.clock=cpu",
    ),
    (
        "latency against rate, in one report",
        "experiment=sweep study.over=workload.rate 'study.values=[2, 4, 6, 8]'",
    ),
    (
        "a policy of your own: class MyPolicy in mine.py, here or on the path",
        "experiment=single policy._target_=mine.MyPolicy +policy.some_setting=3",
    ),
    (
        "a study of your own: studies/experiment/mine.yaml, written as those in conf/experiment",
        "--config-dir studies experiment=mine",
    ),
    (
        "a trace, ten minutes of it at twice its rate",
        "experiment=single workload=trace workload.path=trace.csv \\\n"
        "    workload.window=600 workload.rate_scale=2",
    ),
    (
        "every combination, a report each, on all cores; ends with a table",
        "-m experiment=single memory.block_size=8,16,32 workload.rate=2,4",
    ),
    (
        "go on with a study that was interrupted",
        "hydra.run.dir=outputs/2026-01-31/12-00-00-fcfs_vs_priority",
    ),
)


def manual_page() -> str:
    """The page of `--help`; its lists come from conf/ itself."""
    return "\n".join(_lines())


def _lines() -> Iterator[str]:
    yield f"pagedsim {pagedsim.__version__}: which request runs next, and which yields its memory?"
    yield ""
    yield from textwrap.wrap(
        "Simulates a server of large language models, step by step: requests arrive, a scheduler "
        "batches them, memory runs out, a request is preempted. A study runs several arms, which "
        "are variants of one configuration, on the same requests (unless an arm sets workload.*) "
        "under several seeds. It ends with a table, a report and plots that say by how much one "
        "arm beats another, and how surely. It needs no GPU, no account and no network. With "
        "backend=engine the same study is served in real time.",
        WIDTH,
    )
    yield from ("", "USAGE", "  python -m pagedsim [group=option] [key=value] ...")
    yield "  python -m pagedsim -m key=value,value ...        all combinations"
    yield "  python -m pagedsim --cfg job [group=option] ...  print the configuration, run nothing"
    yield "  python -m pagedsim policies                      every policy: its rule, what it needs"
    yield "  python -m pagedsim bench url=http://host:port ...  load on a server; bench --help"
    yield "  python -m pagedsim serve ...                     a server of such words; serve --help"
    yield from ("", "GROUPS (* is the default)")
    yield from groups("config")
    yield from _experiments()
    yield from ("", "SETTINGS (with their defaults; an experiment has its own)")
    yield from settings(SETTINGS, _plain())
    yield "  All of them, as they stand: --cfg job. A key that its group lacks: +group.key=value."
    yield from ("", "EXAMPLES")
    for meaning, words in EXAMPLES:
        yield from (f"  # {meaning}", f"  python -m pagedsim {words}".rstrip())
    yield from ("", "RESULTS, in outputs/<date>/<time>-<experiment>/")
    yield "  report.html, plots/*.png        what to show others"
    yield "  result.json                     what was found, in words and numbers"
    yield "  comparison.csv                  arms against the baseline, or the study's table"
    yield "  config.yaml                     the whole configuration"
    yield "  wandb/                          a run an arm, one of the comparison; `wandb sync`"
    yield "  and where it keeps tables:"
    yield "  runs/<arm>/seed-<n>/            requests.parquet, steps.parquet, summary.json"
    yield "  timeline.json                   requests and steps, for ui.perfetto.dev"
    yield "  Ctrl-C keeps what is complete. A study that is run again into the same folder goes on."


def _experiments() -> Iterator[str]:
    """What each is served by, and whether it leaves tables of its runs."""
    yield from ("", "EXPERIMENTS         backend            of its runs it leaves")
    for one in experiments():
        left = "tables, a timeline" if one.keeps_tables else "summaries" if one.runs else "-"
        if one.why:
            left += f" ({one.why})"
        yield from hanging(f"  {one.name:<17} {', '.join(one.backends)}", 39, left)


def groups(
    root: str, meanings: Mapping[str, str] | None = None, without: str = ""
) -> Iterator[str]:
    """The groups that the configuration `root` has, each with its options but one.

    `meanings` are those that are not what they are for a study.
    """
    chosen = _defaults(root)
    for group, meaning in {**_groups(), **(meanings or {})}.items():
        if group in chosen or root == "config":
            yield from _group(group, meaning, chosen.get(group, ""), without)


def settings(of: Settings, config: DictConfig) -> Iterator[str]:
    """Settings under their titles, each with its default in `config`."""
    for title, rows in of.items():
        yield f"  {title}"
        for key, meaning in rows:
            value = _default(key, config)
            name = f"    {key}={value}" if value else f"    {key}"
            yield from hanging(name, 41, meaning)


def _group(group: str, meaning: str, default: str, without: str) -> Iterator[str]:
    """A group's line, and its options below it."""
    names = (name for name in _available().options_of(group) if name != without)
    starred = [f"{name}*" if name == default else name for name in names]
    yield from hanging(f"  {group}", _INDENT, meaning)
    yield from hanging("", _INDENT, ", ".join(starred))


def hanging(name: str, indent: int, text: str) -> list[str]:
    """A name, and from column `indent` on a text of as many lines as it takes."""
    blank = " " * indent
    lines = textwrap.wrap(
        text,
        WIDTH,
        initial_indent=blank,
        subsequent_indent=blank,
        break_on_hyphens=False,
        break_long_words=False,
    )
    lines = lines or [blank]
    return [f"{name:<{indent}}{lines[0][indent:]}".rstrip(), *lines[1:]]


def _groups() -> dict[str, str]:
    """Every group there is; one that this page does not know comes last."""
    there = _available().groups()
    known = [group for group in GROUPS if group in there]
    return {group: GROUPS.get(group, "") for group in dict.fromkeys([*known, *there])}


@cache
def _available() -> Options:
    return Options()


def _defaults(root: str) -> dict[str, str]:
    """The option of each group that a base of conf/ chooses."""
    base = OmegaConf.create((files("pagedsim.conf") / f"{root}.yaml").read_text(encoding="utf-8"))
    chosen: dict[str, str] = {}
    for entry in base.defaults:
        if OmegaConf.is_dict(entry):
            chosen |= {str(key): str(option) for key, option in entry.items_ex(resolve=False)}
    return chosen


@cache
def _plain() -> DictConfig:
    """The configuration of one run, with every default."""
    return _available().compose("config", ["experiment=single"]).config


def _default(key: str, config: DictConfig) -> str:
    """The default of a setting as one would type it; "" for Hydra's own."""
    if key.startswith("hydra."):
        return ""
    value = OmegaConf.select(config, key, throw_on_missing=True)
    return "null" if value is None else str(value).lower()


# -- experiments -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Experiment:
    """One option of the group `experiment`."""

    name: str
    title: str
    kind: type[Study]

    @property
    def backends(self) -> Sequence[str]:
        """Those that can serve it."""
        return self.kind.backends

    @property
    def why(self) -> str:
        """Why no other; empty where every backend can."""
        return self.kind.why if len(self.backends) == 1 else ""

    @property
    def runs(self) -> bool:
        """Whether it has anything run, rather than reading or working out."""
        return self.kind.asks

    @property
    def keeps_tables(self) -> bool:
        """Whether it leaves tables of its runs, and a timeline."""
        return self.runs and self.kind.keeps_tables


def experiments() -> list[Experiment]:
    """All of them, by name, from conf/experiment."""
    paths = [path for path in _folder().iterdir() if path.name.endswith(".yaml")]
    return [_experiment(path) for path in sorted(paths, key=lambda path: path.name)]


def _experiment(path: Traversable) -> Experiment:
    config: Any = OmegaConf.create(path.read_text(encoding="utf-8"))
    study: Any = config.study
    return Experiment(
        path.name.removesuffix(".yaml"), str(study.get("title", "")), _kind(str(study._target_))
    )


def _kind(target: str) -> type[Study]:
    """The class of what a target makes, which may be a function."""
    found = locate(target)
    kind: Any = found if isclass(found) else get_type_hints(found)["return"]
    if not issubclass(kind, Study):
        raise ConfigError(f"study._target_={target}: must make a Study")
    return cast(type[Study], kind)


def _folder() -> Traversable:
    return files("pagedsim.conf") / "experiment"


# -- policies --------------------------------------------------------------------------------------

POLICIES_HELP = """python -m pagedsim policies
  lists every policy there is, those of installed packages as well: its rule, where it is from, what
  it needs of the requests and what it does not go with. It takes no words. policy=NAME chooses one;
  python -m pagedsim --help explains the rest."""

NEEDS: dict[Need, str] = {
    "predictor": "predictor= other than none",
    "deadline": "workload.deadline=",
    "client": "workload.client= of several",
    "session": "workload= of sessions",
    "prompts": "prompts with contents, memory=prefix",
    "priority": "workload.priority= of several",
}
"""What a word of `Policy.needs` means on the command line."""


def policies_page() -> str:
    """The page of `python -m pagedsim policies`: every policy, by the words of its class."""
    return "\n".join(_policy_lines())


def _policy_lines() -> Iterator[str]:
    yield "policy=NAME      which request goes first, and which are admitted"
    for name, kind in POLICIES.items():
        yield ""
        yield from _entry(name, kind)
        for origin in plugin_sources(name):
            yield from hanging("", _INDENT, f"not that of {origin}: the name is taken")
    for name in plugins("policy"):
        yield ""
        yield from _offered_entry(name)
    yield ""
    yield "policy.victim=NAME   which request yields memory, under any of them"
    for name, (meaning, _) in VICTIMS.items():
        yield from hanging(f"  {name}", _INDENT, meaning)
    yield ""
    yield "A class of your own: policy._target_=module.Class, or a name for it as an entry point of"
    yield "the group pagedsim.policies. docs/policies.md has the hooks."


def _offered_entry(name: str) -> Iterator[str]:
    """What a package offers, or why it cannot be had."""
    try:
        kind = plugin_policy(name)
    except ConfigError as error:
        yield from hanging(name, _INDENT, f"not there: {error}")
        return
    yield from _entry(name, kind)


def _entry(name: str, kind: type[Policy]) -> Iterator[str]:
    rule = " ".join((getdoc(kind) or "").split("\n\n")[0].split())
    yield from hanging(name, _INDENT, rule)
    if accepts(kind, "of"):
        yield from hanging("", _INDENT, "around: any other, policy.of=NAME")
    if kind.paper:
        yield from hanging("", _INDENT, f"from: {kind.paper}")
    for need in kind.needs:
        yield from hanging("", _INDENT, f"needs: {NEEDS[need]}")
    for line in incompatible(name):
        yield from hanging("", _INDENT, f"not with {line}")


def incompatible(name: str) -> list[str]:
    """What a policy does not combine with, and why, found by trying."""
    found: dict[str, list[str]] = {}
    for batching in BATCHINGS:
        for preemption, make in PREEMPTIONS.items():
            if accepts(make, "prices"):
                continue  # as swap
            error = _refusal(name, batching, preemption)
            if error and error != _refusal("fcfs", batching, preemption):
                found.setdefault(error, []).append(batching)
    return [f"{_where(batchings)}: {error}" for error, batchings in found.items()]


def _refusal(policy: str, batching: str, preemption: str) -> str | None:
    """Why a scheduler cannot have these together, or None."""
    try:
        make_scheduler(
            memory=make_memory("paged", blocks=8, cpu_blocks=8),
            policy=make_policy(policy),
            batching=make_batching(batching),
            preemption=make_preemption(preemption),
        )
    except ConfigError as error:
        return str(error)
    return None


def _where(batchings: Sequence[str]) -> str:
    """What a policy does not go with: no batching at all means the memory that was tried."""
    different = list(dict.fromkeys(batchings))
    return "memory=paged" if len(different) == len(BATCHINGS) else f"batching={','.join(different)}"


# -- bench -----------------------------------------------------------------------------------------

BENCH_HELP = """python -m pagedsim bench url=http://host:port [key=value] ...
  sends a workload to a server that speaks as OpenAI's does (python -m pagedsim serve, vLLM, …)
  and tells what its client sees. It is experiment=bench with backend=http; with an
  experiment= of yours, such as sweep or compare, it is that one with backend=http.
  Needs pip install -c constraints.txt '.[serve]'.

THE SERVER
  url=http://host:port       where it is. A key that it asks for stands in OPENAI_API_KEY; it is
                             neither printed nor kept
  backend.model=NAME         what is asked for (default: the first that /v1/models names)
  backend.endpoint=chat      /v1/chat/completions instead of /v1/completions
  backend.prompt=text        words instead of token ids, for servers that take no ids
  backend.extra={top_p: 0.9} more fields of every request; null takes one away, as in
                             {ignore_eos: null} for servers that refuse what they do not know

THE LOAD (as of every experiment; python -m pagedsim --help has all of it)
  workload=sharegpt          lengths and times of arrivals, or a trace: workload=trace
  workload.requests=100      how many; or workload.duration, in seconds
  workload.rate=1            requests/s on average; with a trace, workload.rate_scale
  workload.arrivals=poisson  poisson | gamma | fixed | burst (all at once) | closed
  workload.users=8           of arrivals=closed: each waits for its answer, then thinks for
                             workload.think_time seconds, then asks again
  backend.concurrency=64     so many requests at once at most; the others wait, and that counts
  backend.warmup=1           requests before the clock starts; if one fails, nothing runs
  backend.timeout=600        seconds after which a request is given up
  seed=0, seeds=1            other requests; the same seed sends the same prompts, of which a
                             prefix cache may still have those of an earlier run
  slo.ttft=1 slo.tpot=0.05   seconds; the table then has goodput

WHAT IT LEAVES, beside report.html, result.json, plots/ and the tables of every experiment
  runs/bench/seed-<n>/vllm_bench.json    what `vllm bench serve` would have written
  record=log.csv             the requests with their times, for experiment=calibrate

EXAMPLES
  # an open loop: 200 chats at 4 requests/s
  python -m pagedsim bench url=http://localhost:8000 workload.requests=200 workload.rate=4
  # a closed loop of 32 users, on the chat endpoint
  python -m pagedsim bench url=http://localhost:8000 backend.endpoint=chat \\
      workload.arrivals=closed workload.users=32
  # latency against rate, in one report
  python -m pagedsim bench url=http://localhost:8000 experiment=sweep study.values=[1,2,4]
  # observe, calibrate, simulate: the server's model and hardware, and the same load
  python -m pagedsim bench url=http://localhost:8000 workload.rate=4 record=log.csv
  python -m pagedsim experiment=calibrate requests=log.csv model=llama-3.1-8b hardware=h100
  python -m pagedsim experiment=single model=llama-3.1-8b hardware=h100 \\
      cost.bandwidth_efficiency=0.87 workload.rate=4 workload.requests=100 seeds=1"""


def bench_words(words: Sequence[str]) -> list[str]:
    """The overrides that the words after `bench` stand for.

    >>> bench_words(["url=localhost:8000", "seeds=2"])
    ['experiment=bench', 'backend.url=localhost:8000', 'seeds=2']
    """
    own = any(word.startswith("experiment=") for word in words)
    named = [f"backend.{word}" if word.startswith("url=") else word for word in words]
    return ["backend=http" if own else "experiment=bench", *named]
