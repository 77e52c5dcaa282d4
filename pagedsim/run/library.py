"""The page that `python -m pagedsim policies` prints: every policy there is, by its own words."""

from __future__ import annotations

from collections.abc import Iterator
from inspect import getdoc

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
    plugin_policies,
    plugin_policy,
    plugin_sources,
)
from pagedsim.core import ConfigError, Policy
from pagedsim.core.policy import Need
from pagedsim.run.manual import hanging
from policies.victims import VICTIMS

INDENT = 18

HELP = """python -m pagedsim policies
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


def page() -> str:
    """All of it."""
    return "\n".join(_lines())


def _lines() -> Iterator[str]:
    yield "policy=NAME      which request goes first, and who is admitted"
    for name, kind in POLICIES.items():
        yield ""
        yield from _entry(name, kind)
        for origin in plugin_sources(name):
            yield from hanging("", INDENT, f"not that of {origin}: the name is taken")
    for name in plugin_policies():
        yield ""
        yield from _of_others(name)
    yield ""
    yield "policy.victim=NAME   who yields memory, under any of them"
    for name, (meaning, _) in VICTIMS.items():
        yield from hanging(f"  {name}", INDENT, meaning)
    yield ""
    yield "A class of your own: policy._target_=module.Class, or a name for it as an entry point of"
    yield "the group pagedsim.policies. docs/policies.md has the hooks."


def _of_others(name: str) -> Iterator[str]:
    """What a package offers, or why it cannot be had."""
    try:
        kind = plugin_policy(name)
    except ConfigError as error:
        yield from hanging(name, INDENT, f"not there: {error}")
        return
    yield from _entry(name, kind)


def _entry(name: str, kind: type[Policy]) -> Iterator[str]:
    rule = " ".join((getdoc(kind) or "").split("\n\n")[0].split())
    yield from hanging(name, INDENT, rule)
    if accepts(kind, "of"):
        yield from hanging("", INDENT, "around: any other, policy.of=NAME")
    if kind.paper:
        yield from hanging("", INDENT, f"from: {kind.paper}")
    for need in kind.needs:
        yield from hanging("", INDENT, f"needs: {NEEDS[need]}")
    for line in misfits(name):
        yield from hanging("", INDENT, f"not with {line}")


def misfits(name: str) -> list[str]:
    """What a policy does not combine with, and why, found by trying."""
    found = []
    for batching in BATCHINGS:
        for preemption, make in PREEMPTIONS.items():
            if accepts(make, "prices"):
                continue  # as swap
            try:
                make_scheduler(
                    memory=make_memory("paged", blocks=8, cpu_blocks=8),
                    policy=make_policy(name),
                    batching=make_batching(batching),
                    preemption=make_preemption(preemption),
                )
            except ConfigError as error:
                found.append(f"batching={batching}: {error}")
    return list(dict.fromkeys(found))
