"""A number is the same in all places: in the summaries of runs, in comparison.csv and
result.json, on the terminal, in the report, in Weights & Biases and from Python."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import unescape
from math import exp, isnan, log, nan
from pathlib import Path
from statistics import fmean, geometric_mean
from typing import Any

import pytest
import yaml

import pagedsim as ps
from pagedsim.metrics.catalogue import keys_of, label_of
from pagedsim.metrics.definitions import METRICS
from tests.conftest import Call
from tests.wandb_files import by_name, records, summary_of, table_of

LOAD = (
    *("seeds=2", "seed=4", "jobs=1", "workload.requests=5", "workload.rate=20"),
    *("server.max_seqs=4", "slo.ttft=0.2", f"study.metrics=[{','.join(METRICS)}]"),
)
"""So few requests that some metric has a value under one seed alone."""
BATCHINGS = {"a": "prefill_first", "b": "unified"}
ARMS = 'study.arms={a: ["batching=prefill_first"], b: ["batching=unified"]}'
STUDIES = {
    "arms": (
        *("experiment=compare", ARMS, "workload=chat_and_batch", "policy=priority"),
        *("memory.blocks=150", "preemption=swap", "server.max_model_len=2048"),
    ),
    "fleets": (
        *("experiment=compare", ARMS, "fleet.replicas=2"),
        *("memory=prefix", "workload=four_clients"),
    ),
    "one": ("experiment=single", "workload=chat_and_batch"),
}
UNITS = {"ms": 1e-3, "µs": 1e-6, "%": 1e-2, "pp": 1e-2, "kJ": 1e3, "MJ": 1e6, "kW": 1e3, "ct": 1e-2}
"""Those that are not 1."""
NUMBER = re.compile(r"([−-]?[\d,]+(?:\.(\d+))?)(?: ?([^\d\s;,()]+))?")
REPLICA = {"Requests": "requests", "Load": "load", "Busy": "busy"}
"""Headings of a table of replicas that are no metric's."""


def says(text: str, value: float) -> bool:
    """Whether a printed number is this one, as far as it is printed."""
    if (found := NUMBER.fullmatch(text)) is None:
        return text == "–" and isnan(value)
    number, decimals, unit = found.groups()
    scale = UNITS.get(unit or "", 1.0)
    printed = float(number.replace(",", "").replace("−", "-")) * scale
    return abs(printed - value) <= 0.5001 * scale * 10.0 ** -len(decimals or "")


def near(one: object, other: object, digits: float = 1e-12) -> bool:
    """Whether two numbers are equal; nothing is NaN."""
    a, b = (nan if value in (None, "") else float(str(value)) for value in (one, other))
    return (isnan(a) and isnan(b)) or abs(a - b) <= digits * max(abs(a), abs(b))


def averaged(values: dict[str, list[float]]) -> dict[str, float]:
    """Means by arm over the seeds that all arms have which have any, geometric if all values are
    positive."""
    known = {
        arm: [n for n, one in enumerate(some) if not isnan(one)] for arm, some in values.items()
    }
    seeds = [set(some) for some in known.values() if some]
    shared = set.intersection(*seeds) if seeds else set()
    used = {
        arm: [values[arm][n] for n in known[arm] if n in (shared or known[arm])] for arm in known
    }
    mean = geometric_mean if all(one > 0 for some in used.values() for one in some) else fmean
    return {arm: mean(some) if some else nan for arm, some in used.items()}


@dataclass(frozen=True)
class Facts:
    """What a study has left."""

    folder: Path
    terminal: str
    summaries: dict[str, list[dict[str, Any]]]
    """By arm, one a seed."""

    def values(self, arm: str, key: str, client: str | None) -> list[float]:
        """One a seed, NaN where there is none."""
        groups = self.summaries[arm]
        if client is not None:
            groups = [one["clients"].get(client, {}) for one in groups]
        return [nan if one.get(key) is None else float(one[key]) for one in groups]

    def mean(self, arm: str, key: str, client: str | None = None) -> float:
        return averaged({arm: self.values(arm, key, client) for arm in self.summaries})[arm]

    @property
    def clients(self) -> list[str | None]:
        seeds = [one for some in self.summaries.values() for one in some]
        return [*sorted({client for one in seeds for client in one["clients"]}), None]

    @property
    def page(self) -> str:
        return (self.folder / "report.html").read_text(encoding="utf-8")

    @property
    def table(self) -> list[dict[str, str]]:
        with (self.folder / "comparison.csv").open(encoding="utf-8", newline="") as file:
            return list(csv.DictReader(file))


def read(folder: Path, terminal: str) -> Facts:
    summaries: dict[str, list[dict[str, Any]]] = {}
    for path in sorted(folder.glob("runs/*/seed-*")):
        summaries.setdefault(path.parent.name, []).append(
            json.loads((path / "summary.json").read_text())
        )
    return Facts(folder, terminal, summaries)


# -- places ---------------------------------------------------------------------------------------

Claims = Iterator[tuple[str, bool]]
"""Statements of one place, and whether each is so."""


def of_csv(facts: Facts) -> Claims:
    for row in facts.table:
        key, arm, client = row["metric"], row["arm"], row["client"]
        group = None if client == "all" else client
        ours = facts.values(arm, key, group)
        if "mean" in row:  # of a single arm
            yield f"csv {client} {key}", near(row["mean"], facts.mean(arm, key, group))
            continue
        theirs = facts.values(row["baseline"], key, group)
        pairs = [pair for pair in zip(ours, theirs, strict=True) if not any(map(isnan, pair))]
        yield f"csv {client} {key} seeds", int(row["seeds"]) == len(pairs)
        for name, one in (("ours", arm), ("theirs", row["baseline"])):
            yield f"csv {client} {key} {name}", near(row[name], facts.mean(one, key, group))
        scale = max(abs(value) for pair in pairs for value in pair)
        change = float(row["ours"]) - float(row["theirs"])
        yield (
            f"csv {client} {key} difference",
            abs(float(row["difference"]) - change) <= 1e-12 * scale,
        )
        all_positive = min(value for pair in pairs for value in pair) > 0
        kind = "geometric" if all_positive else "arithmetic"
        yield f"csv {client} {key} average", row["average"] == kind
        if all_positive:
            ratio = exp(fmean(log(a / b) for a, b in pairs))
            yield f"csv {client} {key} ratio", near(row["ratio"], ratio)
        if row["ratio"]:
            change = float(row["ours"]) / float(row["theirs"])
            yield f"csv {client} {key} change", near(row["ratio"], change)


def of_json(facts: Facts) -> Claims:
    means = json.loads((facts.folder / "result.json").read_text())["data"]["means"]
    for arm, row in means.items():
        for key, value in row.items():
            yield f"result.json {arm} {key}", near(value, facts.mean(arm, key), 1e-5)


def rows_of(page: str) -> Iterator[tuple[str, str, str, dict[str, str]]]:
    """Of each row of the tables: their title, its group, its name, and its cells by heading."""
    tables = re.findall(r"<h2>([^<]*)</h2><div[^>]*>(<table.*?</table>)", page.replace("\n", " "))
    for title, table in tables:
        (_, *head), *rows = [cells(row) for row in re.findall(r"<tr.*?</tr>", table)]
        group = "all requests"
        for name, *row in rows:
            if row:
                yield title, group, name, dict(zip(head, row, strict=True))
            else:
                group = name


def of_page(facts: Facts) -> Claims:
    """The table of arms, whose columns are metrics, and those of replicas."""
    keys = {label_of(key): key for key in keys_of(METRICS)}
    for title, group, name, row in rows_of(facts.page):
        for label, cell in row.items():
            value, _, change = cell.partition("|")
            value = value.partition("±")[0].strip()
            what = f"page {title} {group} {name} {label}: {cell}"
            if title == "Results":
                client = None if group == "all requests" else group
                truth = facts.mean(name, keys[label], client)
                so = says(value, truth) and changed(facts, name, keys[label], client, change)
                yield what, so
            elif title.startswith("Replicas"):
                arm = title.removeprefix("Replicas").removeprefix(" of ") or "run"
                whole = {one["name"]: one for one in facts.summaries[arm][0]["replicas"]}
                found = whole[name][REPLICA.get(label) or keys[label]]
                yield what, says(value, nan if found is None else found)


def changed(facts: Facts, arm: str, key: str, client: str | None, change: str) -> bool:
    """Whether the change against the baseline is that of comparison.csv."""
    if not change:
        return True
    named = (client or "all", key, arm)
    row = next(r for r in facts.table if (r["client"], r["metric"], r["arm"]) == named)
    if change in ("same", "±0 %"):
        return near(row["ours"], row["theirs"], 5e-4)
    if not row["ratio"]:
        return says(change.lstrip("+").replace("− ", "−"), float(row["difference"]))
    if change.startswith("×"):
        return says(change[1:], float(row["ratio"]))
    return says(change.lstrip("+"), float(row["ratio"]) - 1) or float(row["ratio"]) < 1e-3


def of_terminal(facts: Facts) -> Claims:
    """The terminal prints the rows of the page, a few columns at a time."""
    printed: dict[tuple[str, str], list[str]] = {}
    groups = {*(client or "all requests" for client in facts.clients), "Replicas"}
    group = ""
    for line in facts.terminal.splitlines():
        name, _, rest = line.strip().partition("  ")
        if line.strip().removesuffix(" of") in groups or line.startswith("Replicas"):
            group = line.strip()
        elif NUMBER.match(rest.strip()) or rest.strip().startswith("–"):
            printed.setdefault((group, name), []).extend(re.split(" {2,}", rest.strip()))
    on_page: dict[tuple[str, str], list[str]] = {}
    for heading, group, name, row in rows_of(facts.page):
        if heading == "Results" or heading.startswith("Replicas"):
            values = [re.split(r"[±|]", cell)[0].strip() for cell in row.values()]
            on_page[group if heading == "Results" else heading, name] = values
    for where, values in on_page.items():
        known = [[one for one in some if one != "–"] for some in (printed.get(where, []), values)]
        yield f"terminal {where}: {known[0]}, page: {known[1]}", known[0] == known[1]


def of_wandb(facts: Facts) -> Claims:
    tracked = by_name(facts.folder)
    study = tracked[json.loads((facts.folder / "result.json").read_text())["experiment"]]
    for arm, seeds in facts.summaries.items():
        names = sorted(name for name in tracked if name.startswith(f"{arm} seed "))
        for seed, summary in zip(names, seeds, strict=True):
            run = tracked[seed]
            kept = summary_of(records(run))
            for name, value in numbers(summary):
                yield f"W&B {seed} {name}", near(kept[name], value)
            if replicas := summary.get("replicas"):
                rows = table_of(run, "replicas")
                yield "W&B replicas", rows["data"] == [list(one.values()) for one in replicas]
        flat = [dict(numbers(one)) for one in seeds]
        if len(facts.summaries) == 1:
            kept = summary_of(records(study))
            for name in dict.fromkeys(name for one in flat for name in one):
                mean = averaged({arm: [one.get(name, nan) for one in flat]})[arm]
                yield f"W&B mean {name}", near(kept[name], mean)
    rows = table_of(study, "comparison")
    yield (
        "W&B comparison",
        [list(map(text_of, row)) for row in rows["data"]]
        == [list(row.values()) for row in facts.table],
    )


def numbers(summary: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    for name, value in summary.items():
        if isinstance(value, dict):
            yield from numbers(value, f"{prefix}{name}/")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield f"{prefix}{name}", value


def of_python(facts: Facts, words: Sequence[str]) -> Claims:
    """The same study from Python, which finds its runs."""
    given = dict(word.lstrip("+").split("=", 1) for word in words)
    settings = {key: yaml.safe_load(value) for key, value in given.items()}
    if settings.pop("study.arms", None):
        settings["batching"] = BATCHINGS
    result = ps.experiment(settings.pop("experiment"), settings, folder=facts.folder)
    for run in result.runs:
        there = dict(numbers(facts.summaries[run.arm][run.seed - result.runs[0].seed]))
        known = {key: value for key, value in numbers(run.summary) if not isnan(value)}
        yield f"Python {run.arm} {run.seed}", known == there
    rows = [
        dict(zip(row, map(text_of, row.values()), strict=True))
        for row in result.table().to_pylist()
    ]
    yield "Python table", rows == facts.table


def text_of(cell: object) -> str:
    return "" if cell is None else str(cell)


def cells(row: str) -> list[str]:
    """The texts of a row's cells, the change after a bar."""
    inner = re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row)
    barred = [re.sub(r'<span class="change[^>]*>', "|", cell) for cell in inner]
    return [unescape(re.sub(r"<[^>]*>", "", cell)) for cell in barred]


@pytest.mark.parametrize("study", STUDIES)
def test_a_number_is_one_fact(
    study: str, call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "240")  # no cell takes two lines
    words = (*STUDIES[study], *LOAD)
    code, terminal, errors = call(*words, "tracking.mode=offline", "hydra.run.dir=study")
    assert (code, errors) == (0, ""), errors
    facts = read(tmp_path / "study", terminal)
    claims = [
        *of_csv(facts),
        *of_json(facts),
        *of_page(facts),
        *of_terminal(facts),
        *of_wandb(facts),
    ]
    claims += of_python(facts, words)
    assert len(claims) > 300
    assert [what for what, so in claims if not so] == []
