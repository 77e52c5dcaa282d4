"""The manual page that `python -m pagedsim --help` prints; its lists come from conf/ itself."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable

from hydra import compose
from omegaconf import DictConfig, OmegaConf

import pagedsim
from pagedsim.build import plugin_policies
from pagedsim.run.listing import experiments

WIDTH = 96
_INDENT = 18

GROUPS = {
    "experiment": "what is studied: which arms, under which workload",
    "policy": "which request goes first, which yields its memory",
    "preemption": "what becomes of the memory of a request that yields",
    "batching": "how a step is composed",
    "memory": "how keys and values are stored",
    "model": "what is served",
    "hardware": "the GPU, from its data sheet",
    "stack": "what software takes beside the kernels, where step times come from data sheets",
    "cost": "how long a step takes",
    "workload": "which requests arrive, and when",
    "predictor": "who tells policies how long answers will be",
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


def page() -> str:
    """The manual page."""
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
    own = plugin_policies() if group == "policy" else ()
    names = sorted([*(path.name.removesuffix(".yaml") for path in _options(group)), *own])
    starred = [f"{name}*" if name == default else name for name in names if name != without]
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
    there = [path.name for path in _conf().iterdir() if path.is_dir() and _options(path.name)]
    unknown = sorted(set(there) - GROUPS.keys())
    return {group: GROUPS.get(group, "") for group in [*GROUPS, *unknown] if group in there}


def _conf() -> Traversable:
    return files("conf")


def _options(group: str) -> list[Traversable]:
    folder = _conf() / group
    return [path for path in folder.iterdir() if path.name.endswith(".yaml")]


def _defaults(root: str) -> dict[str, str]:
    """The option of each group that a base of conf/ chooses."""
    base = OmegaConf.create((_conf() / f"{root}.yaml").read_text(encoding="utf-8"))
    chosen: dict[str, str] = {}
    for entry in base.defaults:
        if OmegaConf.is_dict(entry):
            chosen |= {str(key): str(option) for key, option in entry.items_ex(resolve=False)}
    return chosen


@cache
def _plain() -> DictConfig:
    """The configuration of one run, with every default."""
    return compose("config", overrides=["experiment=single"])


def _default(key: str, config: DictConfig) -> str:
    """The default of a setting as one would type it; "" for Hydra's own."""
    if key.startswith("hydra."):
        return ""
    value = OmegaConf.select(config, key, throw_on_missing=True)
    return "null" if value is None else str(value).lower()
