"""Experiments from Python: `import pagedsim as ps`, then `ps.simulate`, `ps.compare` and others.

Keyword arguments are the settings of the command line. A value is plain, an `option(...)` with
settings of its own, an object or a class (of policies, batchings, cost models, routers, …), or, for
`compare` and `capacity`, a mapping of arms to such values. Each call does what the command does:
the same checks, processes and files.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from io import StringIO
from itertools import chain, product
from pathlib import Path
from shutil import copytree, rmtree
from tempfile import mkdtemp
from typing import TYPE_CHECKING, Any
from weakref import finalize

import numpy as np

from pagedsim.core import ConfigError, Memory, PagedsimError
from pagedsim.core.contracts import is_ours
from pagedsim.core.errors import printed, unknown
from pagedsim.metrics.definitions import METRICS
from pagedsim.metrics.variation import said
from pagedsim.report.figures import FigureSpec as FigureSpec
from pagedsim.report.plots import own_plots
from pagedsim.report.plots import plot as plot
from pagedsim.report.print import draw_print, latex_of
from pagedsim.report.table import columns_of
from pagedsim.run.folder import claimed
from pagedsim.run.pool import importing_the_script
from pagedsim.run.runner import Execution
from pagedsim.spec.composed import Composed
from pagedsim.spec.conf import OPEN, Conf
from pagedsim.spec.given import Given, arguments_of
from pagedsim.spec.objects import draws
from pagedsim.spec.run import RunSpec
from pagedsim.spec.study import StudySpec
from pagedsim.spec.words import Change
from pagedsim.user_error import Interruption, UserError, line

if TYPE_CHECKING:
    import pyarrow as pa
    from matplotlib.figure import Figure

    from pagedsim.metrics.arms import Run
    from pagedsim.run.publish import Published
    from pagedsim.server import ServerSpec

_OF_THE_STUDY = ("title", "question", "metrics", "baseline")
_ALIASES = {"gpu": "hardware", **{name: f"study.{name}" for name in _OF_THE_STUDY}}
"""Keywords that are not the names of settings."""
_SECTIONS = re.compile(r"server|slo|qoe|slo\.clients(\.[^.]+)?")
"""Keys whose mappings are settings, not arms."""
_LIMITS = ("max_seqs", "max_batched_tokens", "max_model_len", "async_scheduling")
"""Those of `server`, which is a group of servers, too."""
_NOT_OF_A_CLASS = ("memory", "fleet.autoscale")
"""Keys of which some settings are not those of the class: the server's, or the fleet's."""

metric = METRICS
"""All metrics; its methods are the decorators that define one: `@ps.metric.group(...)`."""


@dataclass(frozen=True)
class Option:
    """An option of a group, or a class, with settings."""

    kind: str | type
    settings: Mapping[str, Any]


def option(kind: str | type, /, **settings: Any) -> Option:
    """An option of a group by name, or a class of one's own, with some of its settings.

    `option("prefix", block_size=32)`, `option(MyPolicy, factor=2.0)`.
    """
    if not isinstance(kind, str | type):
        raise ConfigError(
            f"option({printed(kind)}, ...): must be a name or a class; an object has its settings"
        )
    return Option(kind, settings)


def synthetic(lengths: str | Mapping[str, Any] = "sharegpt", /, **settings: Any) -> Option:
    """Generated requests: `synthetic(rate=8, requests=2000)`.

    `lengths` is a shape of lengths or a mapping with `shape` and its settings; `settings` are those
    of `workload=sharegpt`.
    """
    shape = {"shape": lengths} if isinstance(lengths, str) else lengths
    return Option("sharegpt", {**settings, "lengths": shape})


def trace(path: str | Path | Sequence[str | Path], /, **settings: Any) -> Option:
    """The requests of a file: `trace("mine.csv", columns={"arrival": "my_time"})`; or the sessions
    of one, of several or of a folder: `trace("sessions", replay={"markers": "end"})`.

    `settings` are those of `workload=trace`.
    """
    return Option("trace", {"path": path, **settings})


# -- settings as changes of a configuration --------------------------------------------------------


def changes_from(settings: Mapping[str, Any]) -> tuple[list[Change], dict[str, list[Change]]]:
    """The changes that settings stand for, and those of each arm (none: no setting has arms)."""
    plain: list[tuple[str, Any]] = []
    varied: list[list[tuple[str, list[Change]]]] = []
    leaves = [*_leaves(settings)]
    _refuse_other_sizes(dict(leaves))
    for key, count in Counter(key for key, _ in leaves).items():
        if count > 1:
            raise ConfigError(f"{key}: is given {count} times")
    for key, value in leaves:
        if isinstance(value, Mapping):
            if not value:
                raise ConfigError(f"{key}={{}}: must have at least one arm")
            varied.append([(str(arm), _changes(key, option)) for arm, option in value.items()])
            _refuse_equal(f"{key}: ", [name for name, _ in varied[-1]])
        else:
            plain.append((key, value))
    # A class or object first, then single settings of its group.
    plain.sort(key=lambda setting: setting[0].count("."))
    changes = [change for key, value in plain for change in _changes(key, value)]
    combined = list(product(*varied)) if varied else []
    names = [", ".join(name for name, _ in arms) for arms in combined]
    _refuse_equal("", names)
    patches = [[change for _, patch in arms for change in patch] for arms in combined]
    return changes, dict(zip(names, patches, strict=True))


def _refuse_equal(where: str, names: Sequence[str]) -> None:
    for name, count in Counter(names).items():
        if count > 1:
            raise ConfigError(f"{where}{count} arms are called {name!r}: names must differ")
        if not name.strip():
            raise ConfigError(f"{where}an arm has an empty name")


def _leaves(settings: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """The settings by their whole names."""
    for name, value in settings.items():
        key = f"{above}{_ALIASES.get(name, name)}"
        if key != name and key in settings:
            raise ConfigError(f"{name}: is {key}, which is given, too")
        if _SECTIONS.fullmatch(key) and isinstance(value, Mapping) and not _of_servers(key, value):
            yield from _leaves(value, f"{key}.")
        else:
            yield key, value


def _of_servers(key: str, value: Mapping[str, Any]) -> bool:
    """Whether a mapping is of arms with options of the group `server`, whose name the limits have,
    too."""
    if key != "server":
        return False
    named = [
        name not in _LIMITS and isinstance(option, str | Option) for name, option in value.items()
    ]
    if named and all(named):
        return True
    if any(named) or any(isinstance(limit, Mapping) for limit in value.values()):
        raise ConfigError(
            "server: must be limits, such as {'max_seqs': 64}, or arms of servers by name, such as "
            "{'a': 'vllm-0.33'}; arms of a limit are {'server.max_seqs': {'a': 64}}"
        )
    return False


def _changes(key: str, value: Any) -> list[Change]:
    """The changes that give a setting a value."""
    if isinstance(value, Option) and isinstance(value.kind, str):
        inside = [
            Change(f"{key}.{name}", _plain(f"{key}.{name}", setting), "force")
            for name, setting in value.settings.items()
        ]
        named = f"{key}.rule" if key == "fleet.autoscale" else key
        return [Change(named, value.kind), *inside]
    settings = _plain(key, value)
    if not isinstance(settings, dict) or isinstance(value, Mapping):
        return [Change(key, settings, "force" if OPEN.match(key) else "change")]
    if isinstance(value, Memory):
        settings |= _sizes_of(value)
    changes = [Change(f"{key}.{name}", inner, "force") for name, inner in settings.items()]
    # Else without the settings of the option that was chosen before.
    return changes if key in _NOT_OF_A_CLASS else [Change(key, kind="delete"), *changes]


def _sizes_of(memory: Memory) -> dict[str, int]:
    sizes = {"block_size": memory.block_size, "blocks": memory.total}
    return {**sizes, "cpu_blocks": memory.cpu_total}


def _refuse_other_sizes(settings: Mapping[str, Any]) -> None:
    """Raise ConfigError for a size of memory beside an object that has another one."""
    for memory in _each(settings.get("memory")):
        for name, size in _sizes_of(memory).items() if isinstance(memory, Memory) else ():
            for other in _each(settings.get(f"memory.{name}", size)):
                if other != size:
                    raise ConfigError(
                        f"memory.{name}={other}: must be {size}, as the object of "
                        f"{type(memory).__name__} has; its class takes other sizes"
                    )


def _each(value: Any) -> list[Any]:
    """The values of a setting: that of all arms, or of each."""
    return list(value.values()) if isinstance(value, Mapping) else [value]


def _plain(key: str, value: Any) -> Any:
    """A value as a configuration has it: classes and objects as the settings that make them."""
    if isinstance(value, type):
        return {"_target_": _path_of(key, value)}
    if isinstance(value, Option):
        if isinstance(value.kind, str):
            raise ConfigError(f"{key}={value.kind}: must be a class or an object inside an option")
        inside = {name: _plain(f"{key}.{name}", inner) for name, inner in value.settings.items()}
        return {**_plain(key, value.kind), **inside}
    if isinstance(value, list | tuple):
        return [_plain(key, inner) for inner in value]
    if isinstance(value, Mapping):
        return {name: _plain(f"{key}.{name}", inner) for name, inner in value.items()}
    if isinstance(value, np.generic):
        return value.item()
    if value is None or isinstance(value, str | bool | int | float):
        return value
    return str(value) if isinstance(value, Path) else _object(key, value)


def _object(key: str, value: Any) -> dict[str, Any]:
    """The settings of an object: its class and arguments, or the object itself."""
    kind: Any = type(value)
    name = kind.__name__
    if draws(value):
        raise ConfigError(
            f"{key}: {name} takes a seed, to which each run adds its own: must be a class, or "
            f"option({name}, ...)"
        )
    if not is_ours(kind) and (arguments := arguments_of(value)) is not None:
        return {"_target_": _path_of(key, kind), **arguments}
    try:
        return {"_target_": Given(value)}
    except ConfigError as error:
        raise ConfigError(f"{key}: {name} {error}") from error


def _path_of(key: str, kind: type) -> str:
    if "<locals>" in kind.__qualname__:
        raise ConfigError(
            f"{key}: {kind.__qualname__}: must be defined at the top level of a module, so that "
            "processes find it"
        )
    return f"{kind.__module__}.{kind.__qualname__}"


# -- experiments -----------------------------------------------------------------------------------


_NONE: Mapping[str, Any] = {}
Folder = str | Path | None


def experiment(
    name: str, settings: Mapping[str, Any] = _NONE, /, *, folder: Folder = None, **more: Any
) -> Result:
    """Run any experiment of the command line, by its name.

    Settings with dotted names are given as a mapping, `{"memory.block_size": 32}`, the others as
    keywords; those of a section also as `server={"max_seqs": 64}`. Runs are written to `folder`,
    from which the same call goes on if it was interrupted; without one they are removed with the
    result.
    """
    changes, arms = changes_from(_whole(settings, more))
    return _executed([Change("experiment", name), *changes], arms, folder)


def simulate(
    settings: Mapping[str, Any] = _NONE, /, *, folder: Folder = None, **more: Any
) -> Result:
    """One configuration, under `seeds` seeds."""
    _refuse_arms("simulate", _whole(settings, more))
    return experiment("single", settings, folder=folder, **more)


def compare(
    settings: Mapping[str, Any] = _NONE, /, *, folder: Folder = None, **more: Any
) -> Result:
    """Compare arms on the same requests; the first is the baseline.

    A setting that is a mapping has an arm for each of its values; of several such settings every
    combination is an arm. `metrics` are the columns, `baseline` is another arm than the first.
    """
    if not any(isinstance(value, Mapping) for _, value in _leaves(_whole(settings, more))):
        raise ConfigError(
            "compare: needs a setting with arms, such as policy={'a': 'fcfs', 'b': 'sjf'}"
        )
    return experiment("compare", settings, folder=folder, **more)


def sweep(
    over: str,
    values: Sequence[Any],
    settings: Mapping[str, Any] = _NONE,
    /,
    *,
    facets: Mapping[str, Sequence[Any]] | None = None,
    bounds: Mapping[str, Any] | None = None,
    folder: Folder = None,
    **more: Any,
) -> Result:
    """Compare the values of one setting: `sweep("memory.block_size", [8, 16, 32])`.

    Settings that are mappings are of arms, which are compared at each value:
    `sweep("workload.rate", [2, 4, 8], policy={"fcfs": "fcfs", "vtc": "vtc"})`; so they are at each
    value of `facets`, a mapping of further settings to lists. `bounds` are latencies in seconds,
    for the value up to which each arm meets them all.
    """
    if not isinstance(values, list | tuple | range | np.ndarray):
        raise ConfigError(f"{over}={values!r}: must be a list of values")
    if any(_plain(over, value) != value for value in values):
        raise ConfigError(f"{over}: the values of a sweep must be plain; compare takes objects")
    changes, arms = changes_from(_whole(settings, more))
    study: dict[str, Any] = {"over": _ALIASES.get(over, over), "values": list(values)}
    if isinstance(facets, Mapping):
        facets = {_ALIASES.get(name, name): some for name, some in facets.items()}
        for name, some in facets.items():
            if _plain(name, some) != (list(some) if isinstance(some, tuple) else some):
                raise ConfigError(f"facets: {name}: values must be plain; compare takes objects")
    study |= {"facets": facets, "bounds": bounds}
    own = [Change(f"study.{key}", _plain(f"study.{key}", value)) for key, value in study.items()]
    return _executed([Change("experiment", "sweep"), *own, *changes], arms, folder)


def capacity(
    bounds: Mapping[str, Any] | None = None,
    settings: Mapping[str, Any] = _NONE,
    /,
    *,
    folder: Folder = None,
    **more: Any,
) -> Result:
    """The highest rate of arrivals at which each arm meets `bounds` of latencies, in seconds.

    `capacity({"ttft_p99": 2.0}, policy={...})`; without arms, of the configuration alone.
    """
    if not isinstance(bounds, Mapping | None):
        raise ConfigError(f"capacity: {bounds!r}: must be a mapping, such as {{'ttft_p99': 2.0}}")
    changes, arms = changes_from(_whole(settings, more))
    if bounds is not None:  # in place of those of the experiment
        changes.append(Change("study.bounds", kind="delete"))
        changes += [
            Change(f"study.bounds.{name}", _plain(f"study.bounds.{name}", bound), "force")
            for name, bound in bounds.items()
        ]
    return _executed([Change("experiment", "capacity"), *changes], arms or {"run": []}, folder)


def fleet(
    replicas: int | Mapping[str, Mapping[str, Any]],
    settings: Mapping[str, Any] = _NONE,
    /,
    *,
    folder: Folder = None,
    **more: Any,
) -> Result:
    """Replicas behind a router: `fleet(4, router="least_requests")`.

    Pools of different ones have a mapping:
    `fleet({"fast": {"replicas": 2, "set": ["hardware=h100"]}, "slow": {"replicas": 4}})`. Other
    settings may have arms, which are compared.
    """
    changes, arms = changes_from(_whole(settings, more))
    key = "fleet.pools" if isinstance(replicas, Mapping) else "fleet.replicas"
    changes.append(Change(key, _plain(key, replicas)))
    return _executed(
        [Change("experiment", "compare" if arms else "single"), *changes], arms, folder
    )


def estimate(settings: Mapping[str, Any] = _NONE, /, **more: Any) -> Result:
    """What fits on a GPU, how long steps take and what binds them, without a run.

    `prompt` is the tokens of a context, `batch` the sequences that decode together.
    """
    _refuse_arms("estimate", _whole(settings, more))
    return experiment("estimate", settings, **more)


def preset(name: str, settings: Mapping[str, Any] = _NONE, /, **more: Any) -> ServerSpec:
    """How a real server decides, for one engine: `LLM("tiny", server=preset("sglang-0.5"))`.

    `name` is an option of the group `server`; `settings` are those of the server command, such as
    `gpu`, on which some defaults depend.
    """
    if not isinstance(name, str):
        raise ConfigError(f"preset({printed(name)}): must be a name, such as 'sglang-0.5'")
    whole = {**settings, **more}
    if "server" in whole:
        raise ConfigError("preset: server: is its first argument; limits are settings of LLM")
    _refuse_arms("preset", whole)
    changes, _ = changes_from({"server": name, **whole})
    return RunSpec(Composed.of(changes, Conf(root="serve")).resolved()).server


def _whole(settings: Mapping[str, Any], more: Mapping[str, Any]) -> Mapping[str, Any]:
    if not isinstance(settings, Mapping):
        raise ConfigError(f"{settings!r}: must be a mapping of settings, such as {{'seeds': 3}}")
    whole = {**settings, **more}
    given = whole.get("plugins", [])
    if isinstance(given, list) and (own := METRICS.own | own_plots()):
        whole["plugins"] = [*given, *sorted(own - {*given})]
    return whole


def _refuse_arms(name: str, settings: Mapping[str, Any]) -> None:
    for key, value in _leaves(settings):
        if isinstance(value, Mapping):
            raise ConfigError(
                f"{key}: a mapping is of arms, which {name} does not have; settings of an option "
                "are option('name', setting=value)"
            )


def _executed(
    changes: Sequence[Change], arms: Mapping[str, Sequence[Change]], folder: Folder
) -> Result:
    if importing_the_script():
        raise SystemExit(1)  # the process that began this one says what the script lacks
    groups = {change.key.partition(".")[0] for change in changes}
    changes = [*changes, *(change for key, change in _QUIET.items() if key not in groups)]
    if not isinstance(folder, str | Path | None):
        raise ConfigError(f"folder={printed(folder)}: must be a path")
    if folder is not None:
        _refuse_unpicklable([*changes, *chain.from_iterable(arms.values())], folder)
        with _in_words_of_python(), claimed(Path(folder), chosen=True) as place:
            return Result(_published(changes, arms, place), place)
    place = Path(mkdtemp(prefix="pagedsim-"))
    try:
        with _in_words_of_python():
            result = Result(_published(changes, arms, place), place)
    except BaseException:
        rmtree(place, ignore_errors=True)
        raise
    finalize(result, rmtree, place, ignore_errors=True)
    return result


_QUIET = {"tracking": Change("tracking", "none"), "report": Change("report", False)}
"""What a script does not want unless it says so."""


def _refuse_unpicklable(changes: Sequence[Change], folder: str | Path) -> None:
    for change in changes:
        if isinstance(change.value, Given) and not change.value.pickles:
            key = change.key.partition(".")[0]
            raise ConfigError(
                f"folder={folder}: no later call could go on there: {key} is an object that cannot "
                "be pickled; leave folder= away and write with result.report(folder)"
            )


def _published(
    changes: Sequence[Change], arms: Mapping[str, Sequence[Change]], folder: Path
) -> Published:
    execution = Execution.of(StudySpec.of(changes, folder, arms=arms or None), quiet=True)
    execution.execute()
    assert execution.published is not None  # else it has raised
    return execution.published


@contextmanager
def _in_words_of_python() -> Iterator[None]:
    """Raise a study's errors in the words of a script."""
    try:
        yield
    except Interruption as error:
        raise KeyboardInterrupt("interrupted; with folder= the same call goes on") from error
    except Exception as error:
        text = line(error).lstrip("+").replace("hydra.run.dir=", "folder=")
        cause = error.__cause__ if isinstance(error, UserError) else error  # a user's code's
        raise UserError([text]) from None if isinstance(cause, PagedsimError) else cause


# -- results ---------------------------------------------------------------------------------------


@contextmanager
def _written(path: str | Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:  # no such folder, or a suffix that matplotlib lacks
        raise ConfigError(f"{path}: cannot be written: {error}") from error


class Plot:
    """A figure of a result; a notebook shows it."""

    def __init__(
        self,
        figure: Figure,
        title: str,
        caption: str,
        narrow: Callable[[float], Figure] | None = None,
    ) -> None:
        """`narrow` draws it at a width in inches, where it consists of lines."""
        self.figure, self.title, self.caption = figure, title, caption
        self._narrow = narrow

    @cached_property
    def svg(self) -> str:
        """The figure as SVG."""
        text = StringIO()
        self.figure.savefig(text, format="svg")
        return text.getvalue()

    def save(self, path: str | Path, width: float | None = None) -> None:
        """Write the figure in the format of the file's suffix; with a `width` in inches, such as
        3.3 for a column of a paper, drawn anew to fit, if it consists of lines."""
        from pagedsim.report.style import drawing

        figure = self.figure
        with drawing():
            if width is not None:
                if self._narrow is None:
                    raise ConfigError(
                        f"width={width}: must be left away: {self.title} has no lines alone"
                    )
                figure = self._narrow(width)
            with _written(path):
                figure.savefig(path)

    def _repr_svg_(self) -> str:
        return self.svg


class Result:
    """What an experiment found, its tables and its figures."""

    def __init__(self, published: Published, folder: Path) -> None:
        """`folder` has the runs; a temporary one lives as long as the result."""
        self._published, self.folder = published, folder

    @property
    def finding(self) -> list[str]:
        """Sentences, the most important first."""
        return list(self._published.result.finding)

    @property
    def notes(self) -> list[str]:
        """What a reader should know of the runs."""
        return list(self._published.result.notes)

    @property
    def data(self) -> Mapping[str, Any]:
        """The numbers of the experiment, as in result.json."""
        return self._published.result.data

    @property
    def runs(self) -> list[Run]:
        """The runs that are compared: arm, seed, configuration and summary of each."""
        arms = self._published.arms
        return list(arms.runs) if arms else []

    def table(self) -> pa.Table:
        """Every arm against the baseline: means over seeds, paired differences and ratios with
        95 % confidence intervals. Of a single arm, its metrics; without runs, the numbers."""
        import pyarrow as pa

        columns, rows = self._published.comparison()
        if not columns:
            columns, rows = columns_of([row.record() for row in self._published.result.rows])
        return pa.table({name: [row[at] for row in rows] for at, name in enumerate(columns)})

    @cached_property
    def requests(self) -> pa.Table:
        """One row per request, of all runs, with `arm`, `seed` and the settings that arms vary."""
        return self._tables(lambda run: run.requests())

    @cached_property
    def steps(self) -> pa.Table:
        """One row per step, of all runs, with the further columns of `requests`."""
        return self._tables(lambda run: run.steps())

    @cached_property
    def events(self) -> pa.Table:
        """One row per preemption, of all runs, with the further columns of `requests`."""
        return self._tables(lambda run: run.events())

    def _tables(self, read: Callable[[Run], pa.Table]) -> pa.Table:
        import pyarrow as pa

        if not self.runs:
            raise ConfigError(f"{self._published.result.name}: keeps no tables of its runs")
        tables = []
        for run in self.runs:
            table = read(run)
            for name, value in {"seed": run.seed, "arm": run.arm}.items():
                table = table.add_column(0, name, pa.repeat(value, len(table)))
            for name, value in self._settings_of(run.arm).items():
                table = table.append_column(name, pa.repeat(value, len(table)))
            tables.append(table)
        return pa.concat_tables(tables, promote_options="permissive")

    def _settings_of(self, arm: str) -> Mapping[str, Any]:
        """The values of the settings that arms vary; texts where they are not all numbers."""
        values = self._published.arms.variation.values if self._published.arms else {}
        numbers = {
            name: all(type(of[name]) in (int, float) for of in values.values())
            for name in values.get(arm, {})
        }
        return {
            name: value if numbers[name] else said(value)
            for name, value in values.get(arm, {}).items()
        }

    @property
    def plots(self) -> list[str]:
        """The names of its figures."""
        return list(self._published.drawings)

    def plot(self, name: str) -> Plot:
        """One of its figures."""
        from pagedsim.report.style import drawing

        if name not in self._published.drawings:
            raise unknown("plot", name, self.plots)
        spec, arms = self._published.drawings[name], self._published.compared
        _, inside = arms.focus if arms is not None else ("", None)
        narrow = None
        if spec.data is not None and inside is not None:
            narrow = partial(draw_print, spec.data(), inside.arms, bool(inside.swept))
        with drawing():
            return Plot(spec.draw(), spec.title, spec.caption, narrow)

    def to_latex(self) -> str:
        """The comparison as a LaTeX table of the package booktabs, as in table.tex."""
        if (arms := self._published.compared) is None:
            raise ConfigError(f"{self._published.result.name}: has no comparison of runs")
        return latex_of(arms)

    def report(self, folder: str | Path) -> Path:
        """Write all that the command leaves, with plots and report.html, whose path is returned."""
        place = Path(folder)
        if place.resolve() != self.folder.resolve():
            with _written(place):
                copytree(self.folder, place, dirs_exist_ok=True)
        return self._published.write_report(place)

    def __repr__(self) -> str:
        from rich.console import Console

        from pagedsim.report import show

        text = StringIO()
        show(
            self._published.result,
            self._published.compared,
            Console(file=text, width=100, force_jupyter=False),
        )
        return text.getvalue().strip()
