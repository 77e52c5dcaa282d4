"""The report as one self-contained HTML page."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib.resources import files
from typing import Any

import pagedsim
from pagedsim.metrics.arms import Arms
from pagedsim.metrics.catalogue import keys_of, label_of, metric_of
from pagedsim.metrics.compare import compare
from pagedsim.metrics.definitions import METRICS
from pagedsim.metrics.result import Listing, Result
from pagedsim.report.embedded import numbers, scripts, styles
from pagedsim.report.figures import COLOURS, Plot
from pagedsim.report.style import DARK, GRID, INK, MUTED, PAPER
from pagedsim.report.table import (
    Cell,
    Section,
    keys_in,
    means_over,
    reasons,
    sections,
    tables,
    versus,
)

_NAMED = {"--ink": INK, "--muted": MUTED, "--grid": GRID, "--paper": PAPER, "--accent": "#0072b2"}
_ROOMY = 6
"""Maximum number of columns for which the table shows confidence intervals."""
_DARK_ONLY = {"--soft": "#161b22", "--free": "#222932", "--better": "#4cc26b", "--worse": "#ff7b72"}


def page(result: Result, plots: Sequence[Plot], arms: Arms | None = None) -> str:
    """The report as HTML; with `arms`, including their comparison and differing settings."""
    at, inside = arms.focus if arms is not None else ("", None)
    content = numbers(plots, inside)
    parts = [
        f'<p class="eyebrow">pagedsim study · {escape(result.name)}</p>',
        f"<h1>{escape(result.title)}</h1>",
        f'<p class="question">{escape(result.question)}</p>',
        _finding(result, arms),
        _failed(result.failed),
        *(_results(arms) if arms is not None else ()),
        *_replay(content["replay"], at),
        *map(_table, tables(result)),
        *(f'<p class="note">{escape(reason)}</p>' for reason in reasons(result)),
        *map(figure, plots),
        *(_settings(inside) if inside is not None else ()),
        *_commands(result),
        *(_definitions(arms) if arms is not None else ()),
    ]
    return document(result.title, parts, scripts(content))


def document(title: str, parts: Iterable[str], more: str = "") -> str:
    """A self-contained page; `more` stands at its end."""
    body = "\n".join(part for part in parts if part)
    style = files("pagedsim.report").joinpath("page.css").read_text(encoding="utf-8")
    style = (styles() if more else "") + style
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta name="generator" content="pagedsim {pagedsim.__version__}">\n'
        f"<title>{escape(title)}</title>\n<style>\n{_variables()}{style}</style>\n"
        f"</head>\n<body>\n<main>\n{body}\n</main>\n{more}\n</body>\n</html>\n"
    )


def _table(listing: Listing) -> str:
    top = "".join(f"<th>{escape(name)}</th>" for name in listing.head)
    body = "".join(
        f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in listing.rows
    )
    note = f'<p class="note">{escape(listing.note)}</p>' if listing.note else ""
    return f"<h2>{escape(listing.title or 'Results')}</h2>{_grid('results', top, body)}{note}"


def _grid(kind: str, head: str, body: str) -> str:
    return (
        f'<div class="scroll"><table class="{kind}"><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _variables() -> str:
    """CSS variables for the colours of page and plots in light and dark mode; print is light."""
    light = {name: colour for colour, name in COLOURS.items()} | _NAMED
    dark = {name: DARK[colour] for name, colour in light.items()} | _DARK_ONLY
    rules = ["".join(f"{name}:{value};" for name, value in mode.items()) for mode in (light, dark)]
    return (
        f":root {{ {rules[0]} }}\n"
        f"@media screen and (prefers-color-scheme: dark) {{ html:root {{ {rules[1]} }} }}\n"
    )


def _finding(result: Result, arms: Arms | None) -> str:
    sentences = "".join(f"<p>{escape(sentence)}</p>" for sentence in result.finding)
    words = _how_sure(arms, "CI" in sentences) if arms is not None else ""
    sure = f'<p class="sure">{words}</p>' if words else ""
    notes = "".join(f'<p class="sure">Note: {escape(note)}.</p>' for note in result.notes)
    return f'<section class="finding">{sentences}{sure}{notes}</section>'


def _how_sure(study: Arms, intervals: bool) -> str:
    seeds = max((len(study.of(arm)) for arm in study.arms), default=0)
    if seeds < 2 or len(study.arms) < 2:
        return ""
    words = f"Over {seeds} seeds; under each, all arms served the same requests."
    if not study.same_requests:
        words = f"Over {seeds} seeds; the arms had different workloads, drawn from the same seeds."
    if intervals:
        words += (
            " CI: 95 % confidence interval of the change, from the seeds’ ratios (Student’s t). "
            f"Named are the largest of {len(compare(study))} "
            "differences compared; where arms do not differ, one in twenty looks sure."
        )
    return words


def _failed(failed: Mapping[str, str]) -> str:
    if not failed:
        return ""
    lines = "".join(
        f"<p><strong>{escape(what)}</strong>: {escape(why)}</p>" for what, why in failed.items()
    )
    return f'<section class="finding failed"><p>Not everything was completed.</p>{lines}</section>'


def _results(study: Arms) -> Iterable[str]:
    parts = sections(study)
    keys = keys_in(parts)
    head = "".join(f"<th>{escape(label_of(key))}</th>" for key in keys)
    rows = "".join(_section(part, keys, len(parts) > 1) for part in parts)
    seeds = max(len(study.of(arm)) for arm in study.arms)
    note = f"{means_over(study, parts)}."
    if seeds > 1 and len(keys) <= _ROOMY:
        note = (
            f"{means_over(study, parts)}, with the 95 % confidence interval (± where it is as wide "
            "below as above), which holds how much seeds differ; the change below, from one "
            "mean to the other, is surer, since it is paired by seed."
        )
    if len(study.arms) > 1:
        note += f" Bold: best mean. Below: against {escape(versus(study))}"
        note += "; grey where that is not sure, or neither way is better." if seeds > 1 else "."
    yield "<h2>Results</h2>"
    yield _grid("results", f"<th>{escape(study.swept_key)}</th>{head}", rows)
    yield f'<p class="note">{note}</p>'


def _replay(played: Mapping[str, Any] | None, at: str) -> Iterable[str]:
    """The place of a replay, which scripts fill, and what is in it; `at`: of which cell of the
    conditions it is."""
    if played is None:
        return
    blocks = any(course["servers"] for course in played["courses"])
    yield f'<section class="replay"><h2>Replay{f", {escape(at)}" if at else ""}</h2>'
    yield '<div id="replay"></div><noscript><p class="note">It needs scripts.</p></noscript>'
    said = "A square is a request, in its own colour, or a block in the colour of its request; a "
    said += "running request fills up with its prompt, then with its answer. "
    if blocks:
        said += (
            "Blocks in use are as recorded; whose they are is worked out from the tokens that a "
            "request has by then, evenly over a stage. Grey blocks are in use beyond that: ahead "
            "of tokens, or for a cache. "
        )
    said += "The strip above has requests that wait, and marks of preemptions below; "
    yield f'<p class="note">{said}click a square to follow its request. '
    yield f"{escape(played['note'])}.</p></section>"


def _section(part: Section, keys: list[str], titled: bool) -> str:
    whose = "" if part.client is None else f' data-client="{escape(part.client)}"'
    title = (
        f'<tr class="group"{whose}><th colspan="{len(keys) + 1}">{escape(part.title)}</th></tr>'
        if titled
        else ""
    )
    rows = []
    for arm, cells in part.rows.items():
        inner = "".join(
            _cell(cells[key], len(keys) <= _ROOMY) if key in cells else "<td>–</td>" for key in keys
        )
        named = f'<tr data-arm="{escape(arm)}"{whose}><td>{escape(arm)}</td>'
        rows.append(f"{named}{inner}</tr>")
    return title + "".join(rows)


def _cell(cell: Cell, roomy: bool) -> str:
    margin = f' <span class="margin">{cell.margin}</span>' if cell.margin and roomy else ""
    change = f'<span class="change {cell.verdict}">{cell.change}</span>' if cell.change else ""
    best = ' class="best"' if cell.best else ""
    mean = cell.estimate.mean
    value = f' data-value="{mean!r}"' if mean == mean else ""
    return f'<td{best}{value}><span class="value">{escape(cell.text)}</span>{margin}{change}</td>'


def figure(plot: Plot) -> str:
    """A plot with its title and caption."""
    svg = plot.svg.replace("<svg ", f'<svg role="img" aria-label="{escape(plot.title)}" ', 1)
    return (
        f"<h2>{escape(plot.title)}</h2>\n"
        f'<figure id="figure-{escape(plot.name)}"><div class="scroll">{svg}</div>'
        f"<figcaption>{escape(plot.caption)}</figcaption></figure>"
    )


def _settings(study: Arms) -> Iterable[str]:
    """Settings that differ between the arms, then the common ones."""
    configs = {arm: flat(study.of(arm)[0].config) for arm in study.arms}
    names = sorted(set().union(*configs.values()) - {"seed"})
    rows = {name: [configs[arm].get(name, "–") for arm in study.arms] for name in names}
    differing = {name: values for name, values in rows.items() if len(set(values)) > 1}
    yield "<h2>Configuration</h2>"
    if differing:
        head = "".join(f"<th>{escape(arm)}</th>" for arm in study.arms)
        yield '<p class="note">The arms differ in this and in nothing else.</p>'
        yield _plain_table("settings", f"<th>setting</th>{head}", differing)
    elif len(study.arms) > 1:
        yield '<p class="note">The arms do not differ in any setting.</p>'
    seeds = ", ".join(str(run.seed) for run in study.of(study.arms[0]))
    shared = {"seed": [seeds]} | {n: v[:1] for n, v in rows.items() if n not in differing}
    yield (
        f"<details><summary>{len(shared)} settings that all arms share</summary>"
        f"{_plain_table('all', '<th>setting</th><th>value</th>', shared)}</details>"
    )


def _plain_table(name: str, head: str, rows: dict[str, list[str]]) -> str:
    lines = "".join(
        f"<tr><th>{escape(key)}</th>{''.join(f'<td>{escape(v)}</td>' for v in values)}</tr>"
        for key, values in rows.items()
    )
    return _grid(name, head, lines)


def flat(config: Any, prefix: str = "") -> dict[str, str]:
    """Flatten a nested configuration to dotted names and strings."""
    if isinstance(config, dict) and config:
        entries: dict[str, str] = {}
        for name, value in config.items():
            entries |= flat(value, f"{prefix}{name}.")
        return entries
    return {prefix[:-1]: "null" if config is None else str(config)}


def _commands(result: Result) -> Iterable[str]:
    if result.source:
        yield f'<p class="note">Published: {escape(result.source)}</p>'
    yield "<h2>To run it again</h2>"
    yield f"<pre><code>{escape(result.command)}</code></pre>"
    for what, command in result.again.items():
        yield f'<p class="note">{escape(what)}:</p><pre><code>{escape(command)}</code></pre>'
    if result.made_by:
        version, *commit = map(escape, result.made_by.values())
        at = f", commit <code>{commit[0]}</code>" if commit else ""
        yield f'<p class="note">Made by pagedsim {version}{at}.</p>'
    yield (
        '<p class="note">Beside this page: <code>result.json</code>, <code>comparison.csv</code>, '
        "<code>table.tex</code>, <code>plots/</code> with their numbers; where tables of the runs "
        "are kept, these (Parquet) with the summary of each, and <code>timeline.json</code>, which "
        "Perfetto (ui.perfetto.dev) opens.</p>"
    )


def _definitions(study: Arms) -> Iterable[str]:
    used = dict.fromkeys(metric_of(key).name for key in keys_of(study.metrics))
    used |= dict.fromkeys(("ttft", "tpot", "e2e"))  # always in the plots
    terms = "".join(
        f"<dt>{escape(METRICS[name].label)}</dt><dd>{escape(METRICS[name].meaning)}</dd>"
        for name in used
    )
    yield "<h2>What the metrics mean</h2>"
    yield f"<dl>{terms}</dl>"
    yield (
        '<p class="note">Latencies count requests that finished. P50, P90 and P99: half, 90 % and '
        "99 % of the values lie at or below it, worked out for each seed and then averaged.</p>"
    )
