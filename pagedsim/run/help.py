"""The pages of `--help`, `serve --help`, `policies` and `bench --help`."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Sequence
from functools import cache
from inspect import getdoc, isclass
from pathlib import Path
from typing import Any, NamedTuple, cast, get_type_hints

import pagedsim
from pagedsim import build
from pagedsim.core import ConfigError, Policy
from pagedsim.core.policy import Need
from pagedsim.policies.victims import VICTIMS
from pagedsim.run.study import Study
from pagedsim.spec.composed import Composed
from pagedsim.spec.conf import ROOT, Conf, Settings, select
from pagedsim.spec.objects import locate

WIDTH = 96
_INDENT = 18


def _text(name: str) -> str:
    return Path(__file__).with_name(f"{name}.txt").read_text(encoding="utf-8")


GROUPS = dict(line.split(": ", 1) for line in _text("groups").splitlines())
"""The groups in the order of the page, and what each decides."""
_SERVES = "what carries the steps out: simulated time, or a real engine"
"""What the group `backend` decides of a server."""

_PAGES = {ROOT: "manual", "serve": "serve"}
"""The texts of the pages, by the roots whose words they explain."""


def manual_page(root: str = ROOT) -> str:
    """The page of `--help`: a text, with lists and defaults from conf/ itself."""
    return "\n".join(_lines(root))


def _lines(root: str) -> Iterator[str]:
    for line in _text(_PAGES[root]).splitlines():
        if line == "{groups}":
            yield from _groups(root)
        elif line == "{experiments}":
            yield from _experiments()
        elif setting := re.fullmatch(r"    \{(.+?)\}: (.+)", line):
            yield from _setting(setting[1], setting[2], _plain(root))
        else:
            yield line.replace("{version}", pagedsim.__version__)


def _experiments() -> Iterator[str]:
    """What each is served by, and whether it leaves tables of its runs."""
    for name, kind in experiments():
        leaves = "tables, a timeline" if kind.keeps_tables else "summaries"
        leaves = leaves if kind.asks else "-"
        if len(kind.backends) == 1:
            leaves += f" ({kind.why})"
        yield from hanging(f"  {name:<17} {', '.join(kind.backends)}", 39, leaves)


def _groups(root: str) -> Iterator[str]:
    """The groups that the configuration `root` has, each with its options."""
    conf = Conf(root=root)
    known = [group for group in GROUPS if group in conf.groups]
    for group in dict.fromkeys([*known, *conf.groups]):
        if group in conf.defaults or root == ROOT:
            yield from _group(conf, group)


def _setting(key: str, meaning: str, config: Settings) -> list[str]:
    """A setting with its default as one would type it, but for those of Hydra's own."""
    name = f"    {key}"
    if not key.startswith("hydra."):
        value = select(config, key)
        name += "=null" if value is None else f"={value}".lower()
    return hanging(name, 41, meaning)


def _group(conf: Conf, group: str) -> Iterator[str]:
    """A group's line, and its options below it."""
    names, meaning = conf.options_of(group), GROUPS.get(group, "")
    if conf.root == "serve" and group == "backend":
        names, meaning = [name for name in names if name != "http"], _SERVES
    default = conf.defaults.get(group)
    starred = [f"{name}*" if name == default else name for name in names]
    yield from hanging(f"  {group}", _INDENT, meaning)
    yield from hanging("", _INDENT, ", ".join(starred))


def hanging(name: str, indent: int, text: str) -> list[str]:
    """A name, and from column `indent` on a text of as many lines as it takes."""
    first, more = f"{name:<{indent}}", " " * indent
    plain: Any = {"break_on_hyphens": False, "break_long_words": False}
    lines = textwrap.wrap(text, WIDTH, initial_indent=first, subsequent_indent=more, **plain)
    return lines or [name]


@cache
def _plain(root: str) -> Settings:
    """The configuration of one run, or of a server, with every default."""
    words = ["experiment=single"] if root == ROOT else []
    return Composed.of(words, Conf(root=root)).resolved(missing=True)


# -- experiments -----------------------------------------------------------------------------------


class Experiment(NamedTuple):
    """One option of the group `experiment`."""

    name: str
    kind: type[Study]


def experiments() -> list[Experiment]:
    """All of them, by name, from conf/experiment."""
    conf = Conf()
    options = {name: conf.option("experiment", name) for name in conf.options_of("experiment")}
    return [
        Experiment(name, _kind(str(option.settings["study"]["_target_"])))
        for name, option in options.items()
    ]


def _kind(target: str) -> type[Study]:
    """The class of what a target makes, which may be a function."""
    maker = locate(target)
    kind: Any = maker if isclass(maker) else get_type_hints(maker)["return"]
    if not issubclass(kind, Study):
        raise ConfigError(f"study._target_={target}: must make a Study")
    return cast(type[Study], kind)


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
    for name, kind in build.POLICIES.items():
        yield ""
        yield from _entry(name, kind)
        for origin in build.plugin_sources(name):
            yield from hanging("", _INDENT, f"not that of {origin}: the name is taken")
    for name in build.plugins("policy"):
        yield ""
        try:
            yield from _entry(name, build.plugin_policy(name))
        except ConfigError as error:
            yield from hanging(name, _INDENT, f"not there: {error}")
    yield ""
    yield "policy.victim=NAME   which request yields memory, under any of them"
    for name, (meaning, _) in VICTIMS.items():
        yield from hanging(f"  {name}", _INDENT, meaning)
    yield ""
    yield "A class of your own: policy._target_=module.Class, or a name for it as an entry point of"
    yield "the group pagedsim.policies. docs/policies.md has the hooks."


def _entry(name: str, kind: type[Policy]) -> Iterator[str]:
    rule = " ".join((getdoc(kind) or "").split("\n\n")[0].split())
    yield from hanging(name, _INDENT, rule)
    if build.accepts(kind, "of"):
        yield from hanging("", _INDENT, "around: any other, policy.of=NAME")
    if kind.paper:
        yield from hanging("", _INDENT, f"from: {kind.paper}")
    for need in kind.needs:
        yield from hanging("", _INDENT, f"needs: {NEEDS[need]}")
    for line in incompatible(name):
        yield from hanging("", _INDENT, f"not with {line}")


def incompatible(name: str) -> list[str]:
    """What a policy does not combine with, and why, found by trying."""
    refusals: dict[str, list[str]] = {}
    for batching in build.BATCHINGS:
        for preemption, make in build.PREEMPTIONS.items():
            if build.accepts(make, "prices"):
                continue  # as swap
            error = _refusal(name, batching, preemption)
            if error and error != _refusal("fcfs", batching, preemption):
                refusals.setdefault(error, []).append(batching)
    return [f"{_where(batchings)}: {error}" for error, batchings in refusals.items()]


def _refusal(policy: str, batching: str, preemption: str) -> str | None:
    """Why a scheduler cannot have these together, or None."""
    try:
        build.make_scheduler(
            memory=build.make_memory("paged", blocks=8, cpu_blocks=8),
            policy=build.make_policy(policy),
            batching=build.make_batching(batching),
            preemption=build.make_preemption(preemption),
        )
    except ConfigError as error:
        return str(error)
    return None


def _where(batchings: Sequence[str]) -> str:
    """What a policy does not go with: no batching at all means the memory that was tried."""
    different = list(dict.fromkeys(batchings))
    return (
        "memory=paged"
        if len(different) == len(build.BATCHINGS)
        else f"batching={','.join(different)}"
    )


# -- bench -----------------------------------------------------------------------------------------

BENCH_HELP = _text("bench").rstrip()


def bench_words(words: Sequence[str]) -> list[str]:
    """The overrides that the words after `bench` stand for.

    >>> bench_words(["url=localhost:8000", "seeds=2"])
    ['experiment=bench', 'backend.url=localhost:8000', 'seeds=2']
    """
    given = any(word.startswith("experiment=") for word in words)
    named = [f"backend.{word}" if word.startswith("url=") else word for word in words]
    return ["backend=http" if given else "experiment=bench", *named]
