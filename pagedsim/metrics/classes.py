"""Arms told apart by class of requests: those of one priority."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from pagedsim.metrics.arms import Arms


def by_class(arms: Arms) -> Arms:
    """The same runs, told apart by priority and not by client.

    A priority that one class of the workload alone has goes by the name of that class.
    """
    names = _class_names(arms)
    runs = [
        replace(run, summary=run.summary | {"clients": _renamed(run.summary, names)})
        for run in arms.runs
    ]
    there = (name for run in runs for name in run.summary["clients"])
    return replace(arms, runs=runs, clients=tuple(dict.fromkeys(there)))


def _renamed(summary: Mapping[str, object], names: Mapping[str, str]) -> dict[str, object]:
    found = summary.get("classes", {})
    assert isinstance(found, Mapping)
    return {names.get(level, f"priority {level}"): one for level, one in found.items()}


def _class_names(arms: Arms) -> dict[str, str]:
    """Names by priority, where they are clear, and the same for all arms."""
    found: dict[str, set[str]] = {}
    for run in arms.runs:
        workload = run.config.get("workload")
        classes = workload.get("classes", {}) if isinstance(workload, Mapping) else {}
        for name, settings in classes.items():
            priority = settings.get("priority", 0)
            levels = priority if isinstance(priority, Mapping) else [priority]
            for level in levels:
                found.setdefault(f"{float(level):g}", set()).add(str(name))
    return {level: next(iter(some)) for level, some in found.items() if len(some) == 1}
