"""What a study leaves for people and programs: the terminal, files, and Weights & Biases."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from pagedsim.core import PagedsimError
from pagedsim.metrics.arms import DEFAULT_METRICS, FAIRNESS_METRICS, FLEET_METRICS, Arms, Run
from pagedsim.metrics.catalogue import keys_of
from pagedsim.metrics.compare import means_of, value_of
from pagedsim.metrics.files import COMPARISON, REPORT, RESULT, TABLE, TIMELINE, write_json
from pagedsim.metrics.finding import absent
from pagedsim.metrics.recorder import SOURCES
from pagedsim.metrics.result import Conclusions, Result
from pagedsim.metrics.variation import Variation
from pagedsim.report import show, write
from pagedsim.report.figures import FORMATS, FigureSpec
from pagedsim.report.replicas import replica_listings
from pagedsim.report.table import Columns, columns_of, comparison_of, write_columns
from pagedsim.report.timeline import write_timeline
from pagedsim.run.provenance import made_by
from pagedsim.run.runs import Runs, changed_note, goes_on
from pagedsim.run.study import Analysis, Study
from pagedsim.server import ServerSpec
from pagedsim.spec.factors import factors_of, labels_of
from pagedsim.spec.run import memory_target
from pagedsim.spec.words import Change, key_of
from pagedsim.tracking import Tracked, track
from pagedsim.user_error import Interruption, shown

LAUNCH = "The answer as a real server"
"""What a report says before the lines that start it."""
BlockSizes = Mapping[float, Sequence[int]]
"""The block sizes of simulated runs, by their cost.block_tokens."""


@dataclass(frozen=True)
class Published:
    """What was published."""

    result: Result
    arms: Arms | None
    """The runs side by side; None where their tables are not kept, or there are none."""
    reading: Analysis
    block_sizes: BlockSizes

    @property
    def drawings(self) -> Mapping[str, FigureSpec]:
        """The figures, by name."""
        return self.reading.drawings

    @property
    def compared(self) -> Arms | None:
        """The runs side by side, where that is the main result."""
        return self.arms if self.reading.compares else None

    def comparison(self) -> Columns:
        """Columns and rows of comparison.csv; both empty where there is nothing to compare."""
        if self.reading.table is not None:
            return columns_of(self.reading.table)
        if self.arms is not None and keys_of(self.arms.metrics):
            return comparison_of(self.arms)
        return [], []

    def write_report(
        self, folder: Path, broken: dict[str, str] | None = None, formats: Sequence[str] = ("png",)
    ) -> Path:
        """Write plots, report.html and the timeline; returns the path of the report. `broken` and
        `formats` are as in `pagedsim.report.write`."""
        report = write(self.result, self.drawings, folder, self.compared, broken, formats)
        if self.arms is not None:
            write_timeline(self.arms, folder / TIMELINE)
        return report


def publish(study: Study, runs: Runs) -> Published | None:
    """Analyse the runs and publish the result; None if there is nothing to publish yet."""
    folder = runs.spec.folder
    try:
        reading = study.analyse(runs)
        if reading is None:
            return None
        arms = arms_of(study, runs) if study.keeps_tables and runs.finished else None
        result = _result(study, runs, reading, arms)
        sizes = _block_sizes(runs.finished.values())
        published = Published(result, arms, reading, sizes)
        _say_before(runs)
        _clear(folder)
        if not runs.quiet:
            unsaid = [line for line in result.notes if line not in runs.noted]
            brief = result.brief and runs.config["report"]
            show(replace(result, notes=unsaid, brief=brief), published.compared)
        drawn = list(reading.drawings) if runs.config["report"] else []
        pictures = reading.headline if reading.headline is not None else drawn
        write_json(folder / RESULT, result.record(pictures))
        if (table := published.comparison())[0]:
            write_columns(table, folder / COMPARISON)
        broken: dict[str, str] = {}
        report = None
        if runs.config["report"]:
            report = published.write_report(folder, broken, runs.config["figures"])
        if broken:
            for line in broken.values():
                runs.say(f"note: {line}")
            result = replace(result, notes=[*result.notes, *broken.values()])
            published = replace(published, result=result)
            kept = [name for name in pictures if name not in broken]
            write_json(folder / RESULT, result.record(kept))
        drawings = {name: one for name, one in reading.drawings.items() if name not in broken}
        tracked = _track(study, runs, published, drawings if report is not None else {})
    except KeyboardInterrupt:
        if not study.asks:
            raise
        progress = study.progress(runs)
        raise Interruption(f"while reporting; {progress}; {goes_on(folder)}") from None
    if not runs.quiet:
        _say_where(runs, reading, report, arms, tracked)
    if tracked.failure is not None:
        raise PagedsimError(
            f"{tracked.failure}; the results are whole in {shown(folder)}, and the same command "
            f"with hydra.run.dir={shown(folder)} tracks them without new runs"
        )
    return published


def arms_of(study: Study, runs: Runs) -> Arms:
    """The runs that can be compared, side by side."""
    arms = Arms(
        name=runs.spec.experiment,
        title=study.title,
        question=study.question,
        folder=runs.spec.folder,
        command=runs.spec.line(),
        runs=runs.comparable,
        baseline=study.baseline,
        swept=study.swept,
    )
    asked = {arm: runs.asked[arm] for arm in arms.arms if arm in runs.asked}
    overrides = {name: arm.overrides for name, arm in asked.items()}
    factors = factors_of(runs.spec, overrides, study.conditions)
    series = {name: arm.series for name, arm in asked.items() if arm.series is not None}
    arms.variation = Variation.of(factors, study.conditions, series)
    clients = (name for run in arms.runs for name in run.summary.get("clients", {}))
    arms.clients = tuple(dict.fromkeys(clients))
    arms.metrics = tuple(dict.fromkeys([*study.metrics, *_more_metrics(study, runs, arms)]))
    arms.failed = _missing(runs, arms)
    return arms


def _more_metrics(study: Study, runs: Runs, arms: Arms) -> Iterator[str]:
    """What is worth a column beside the study's own where there are several clients or sessions,
    unless the study chose its columns, and where there is an objective."""
    several, chosen = len(arms.clients) > 1, tuple(study.metrics) != DEFAULT_METRICS
    if several and not chosen:
        yield from FAIRNESS_METRICS
    if not chosen and any("sessions_finished" in run.summary for run in runs.finished.values()):
        yield from ("session_time", "session_served_time_mean")
    if not chosen:
        yield from FLEET_METRICS if any(run.replicas for run in arms.runs) else ()
        yield from _of_caches(arms)
    if any("goodput_per_s" in run.summary for run in runs.finished.values()):
        yield from ("goodput_per_s", "slo_attainment") if several else ("goodput_per_s",)


def _of_caches(arms: Arms) -> Iterator[str]:
    """What is worth a column where a prefix cache found something; where there are hits or tiers
    below the GPU, those by source."""
    (gpu, *below, _), others = SOURCES, ("recomputed_tokens", "working_set_peak")
    names = ("hit_rate", gpu, *below, *others)
    some = {name for name in names if any(value_of(run.summary, name) > 0 for run in arms.runs)}
    some |= {f"{tier}_hit_tokens" for run in arms.runs for tier in run.summary.get("tiers") or ()}
    if "hit_rate" in some:
        yield from (name for name in names if name in (some if some & {*below} else some - {gpu}))


def _missing(runs: Runs, arms: Arms) -> dict[str, str]:
    """Runs that are not there, or not shown, and why."""
    failed = {whose or "all runs": str(failure) for whose, failure in runs.reasons.items()}
    if runs.interrupted:
        failed["interrupted"] = runs.progress
    if (left_out := _left_out(runs, arms)) and not runs.repeated:
        failed["left out"] = (
            f"{left_out} complete runs, under seeds that not every arm has completed"
        )
    return failed


def _left_out(runs: Runs, arms: Arms) -> int:
    """Complete runs that are not compared."""
    return len(runs.finished) - len(arms.runs)


def _seed_notes(runs: Runs, arms: Arms | None) -> Iterator[str]:
    """Which seeds are compared, where some arms have one alone since nothing in them is drawn."""
    if arms is not None and runs.repeated and (left_out := _left_out(runs, arms)):
        seed = arms.runs[0].seed
        yield (
            f"arms are compared under seed {seed}: without anything drawn at random, some were "
            f"served under it alone, so {left_out} complete runs of the others are left out"
        )


def _absent_notes(runs: Runs, arms: Arms | None) -> Iterator[str]:
    """Which of the metrics that were asked for are no columns, since no run has a value."""
    asked = any(key_of(word) == "study.metrics" for word in runs.spec.words)
    if not asked or arms is None or not arms.finished:
        return
    names = absent(arms)
    if names and len(names) < len(keys_of(arms.metrics)):  # else the finding says so
        outside = not any(run.inside for run in arms.runs)
        why = ": a server over HTTP shows requests alone" if outside else ""
        yield f"no run has a value of {', '.join(names)}{why}"


def _result(study: Study, runs: Runs, reading: Analysis, arms: Arms | None) -> Result:
    replicas = []
    if arms is not None and reading.compares and arms.of_fleets:
        replicas = replica_listings(arms)
    conclusions = {part.name: getattr(reading, part.name) for part in fields(Conclusions)}
    conclusions |= {
        "listings": [*reading.listings, *replicas],
        "notes": [
            *runs.noted,
            *reading.notes,
            *_seed_notes(runs, arms),
            *_absent_notes(runs, arms),
            *block_size_notes(_block_sizes(runs.finished.values())),
            *blocks_notes(run.config["memory"] for run in runs.finished.values() if run.inside),
        ],
        "again": {**reading.again, **({LAUNCH: reading.launch} if reading.launch else {})},
        "failed": {**(arms.failed if arms is not None else {}), **reading.failed},
    }
    return Result(
        name=runs.spec.experiment,
        title=study.title,
        question=study.question,
        command=runs.spec.line(),
        source=study.source,
        made_by=made_by(),
        **conclusions,
    )


def _block_sizes(runs: Iterable[Run]) -> BlockSizes:
    sizes: dict[float, set[int]] = {}
    for run in runs:
        memory = run.config["memory"]
        if run.inside and not run.measured and not memory_target(memory).startswith("reserved"):
            blocks = float(run.config["cost"].get("block_tokens") or 0)
            sizes.setdefault(blocks, set()).add(memory.get("block_size", ServerSpec.block_size))
    return {blocks: sorted(some) for blocks, some in sizes.items()}


def block_size_notes(sizes: BlockSizes) -> Iterator[str]:
    """What simulated kernels make of the block size, where it differs between runs."""
    varied = sorted(blocks for blocks, some in sizes.items() if len(some) > 1)
    for blocks in varied:
        if blocks:
            yield (
                f"simulated attention takes as long to find a block as to read {blocks:g} tokens "
                "(cost.block_tokens): an assumption, not the time of a kernel"
            )
        else:
            where = " where cost.block_tokens=0" if len(varied) > 1 else ""
            yield (
                f"simulated kernels take the same time with any block size{where}; the engine's "
                "read blocks of 16 as fast as those of 128 on an H100, and on an A100 requests "
                "took longer with blocks of fewer than 16 tokens (Kwon et al., SOSP 2023, figure "
                "18b): cost.block_tokens= says what finding a block costs, and "
                "experiment=block_sizes backend=engine times a kernel"
            )


def blocks_notes(memories: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """Where the same number of blocks is another number of tokens."""
    sizes: dict[int, set[int]] = {}
    for memory in memories:
        if memory.get("blocks"):
            size = memory.get("block_size", ServerSpec.block_size)
            sizes.setdefault(memory["blocks"], set()).add(size)
    for blocks, some in sizes.items():
        if len(some) > 1:
            tokens = [f"{blocks * size:,} with memory.block_size={size}" for size in sorted(some)]
            yield f"memory.blocks={blocks} are different numbers of tokens: {', '.join(tokens)}"


def _clear(folder: Path) -> None:
    """Remove what an earlier part of the study has published; it may have had other arms."""
    for name in (REPORT, COMPARISON, TIMELINE, TABLE):
        (folder / name).unlink(missing_ok=True)
    for suffix in (*FORMATS, "csv"):
        for picture in (folder / "plots").glob(f"*.{suffix}"):
            picture.unlink()


def _say_before(runs: Runs) -> None:
    """What a reader should know before the table."""
    if runs.kept:
        runs.say(f"{runs.kept} of {runs.wanted} runs were there already, and the same: kept")
    if runs.repeated:
        workload = runs.config["workload"]
        trace = isinstance(workload, Mapping) and "resample" in workload
        more = "; workload.resample=SECONDS draws windows of the trace for each" if trace else ""
        runs.say(f"note: under every seed the workload is the same, so each arm is run once{more}")
    if runs.changed:
        runs.say(f"note: {changed_note(runs.changed)}")


def _track(
    study: Study, runs: Runs, published: Published, drawings: Mapping[str, FigureSpec]
) -> Tracked:
    """What the tracker was given, or why it took nothing, which hides no result."""
    if runs.interrupted or (settings := runs.config["tracking"])["mode"] == "none":
        return Tracked()
    arms = published.arms
    plain = arms is not None and len(arms.arms) > 1 and not arms.variation.conditions
    patches: dict[str, Sequence[str | Change]] = {
        name: [*arm.overrides, *(Change(*change, "replace") for change in arm.changes.items())]
        for name, arm in runs.asked.items()
    }
    return track(
        published.result,
        runs.spec.folder,
        arms.runs if arms is not None else runs.in_order,
        labels=labels_of(runs.spec, patches),
        comparison=published.comparison(),
        drawings=drawings,
        bars=means_of(arms) if arms is not None and plain else {},
        series=study.keeps_tables,
        **settings,
    )


def _say_where(
    runs: Runs, reading: Analysis, report: Path | None, arms: Arms | None, tracked: Tracked
) -> None:
    """Where to look."""
    folder = runs.spec.folder
    print(f"results   {shown(folder)}")
    if report is not None:
        print(f"report    {shown(report)}")
    if report is not None and arms is not None:
        print(f"timeline  {shown(folder / TIMELINE)}  (open it at ui.perfetto.dev)")
    if tracked.folders:
        later = "" if runs.config["tracking"]["mode"] == "online" else "; `wandb sync` uploads them"
        count = len(tracked.folders)
        print(f"tracking  {shown(folder / 'wandb')}  ({count} run{'s' * (count != 1)}{later})")
    for word, what in reading.used.items():
        print(f"{word:<9} {what}")
    if reading.launch:
        print(f"launch    {reading.launch.replace(chr(10), chr(10) + ' ' * 10)}")
