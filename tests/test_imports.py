"""Imports point down only: who may import what, held by reading the source of every module.

`RULES` is the whole law. A room is a top-level package, or what stands directly under `pagedsim`;
it may always import itself and the standard library. An import counts wherever it stands in a
file, inside functions too; only `if TYPE_CHECKING:` is exempt, since it never runs. Inside a
room not even that is: its modules have an order, and can be read in it.
"""

import ast
import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from itertools import accumulate
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("pagedsim", "policies", "kernels", "experiments", "conf")
"""The folders of the package; the last four are `pagedsim.policies` and so on."""

TORCH = ("torch", "triton", "transformers")
"""What only an installation with the `engine` extra has."""
STUDY = ("simpy", "hydra", "omegaconf", "wandb")
"""What a serving process does without."""


@dataclass(frozen=True)
class Outside:
    """The third-party packages a room may import: only some, or all but some."""

    names: tuple[str, ...]
    listed_allowed: bool

    def allows(self, package: str) -> bool:
        return (package in self.names) is self.listed_allowed

    def __str__(self) -> str:
        if self.listed_allowed:
            return ", ".join(self.names)
        return "any third-party package" + (f" but {', '.join(self.names)}" if self.names else "")


def only(*names: str) -> Outside:
    return Outside(names, listed_allowed=True)


def all_but(*names: str) -> Outside:
    return Outside(names, listed_allowed=False)


SERVED = "core build server policies sglang sim cluster workload metrics"
"""What a run is built of."""
ALL = f"pagedsim {SERVED} engine kernels report tracking conf spec backends user_error requirements"

RULES: dict[str, tuple[str, Outside]] = {
    "pagedsim": ("", only()),  # its __init__.py alone: importing any room runs it
    "pagedsim.core": ("", only()),
    "pagedsim.policies": ("core", only()),
    "pagedsim.sglang": ("core", only()),
    "pagedsim.trtllm": ("core", only()),
    "pagedsim.build": ("core policies sglang trtllm", only()),
    "pagedsim.server": ("core build policies", only()),
    "pagedsim.kernels": ("", only("torch", "triton", "flashinfer")),
    "pagedsim.sim": ("core build server sglang", all_but(*TORCH)),
    "pagedsim.cluster": ("core build server sim policies", all_but(*TORCH)),
    "pagedsim.requirements": ("core", only()),
    "pagedsim.engine": ("core sglang build server kernels requirements", all_but(*STUDY)),
    "pagedsim.api": (
        "core metrics report run spec user_error",
        only("matplotlib", "numpy", "pyarrow", "rich"),
    ),
    "pagedsim.testing": ("core build policies sim cluster metrics", only("pyarrow")),
    "pagedsim.workload": ("core", all_but(*TORCH)),
    "pagedsim.metrics": ("pagedsim core", all_but(*TORCH)),
    "pagedsim.report": ("pagedsim core metrics", all_but(*TORCH)),
    "pagedsim.spec": (f"{SERVED} conf backends", only("hydra", "omegaconf", "yaml")),
    "pagedsim.backends": (f"{SERVED} engine spec requirements", all_but()),
    "pagedsim.user_error": ("core", only()),
    "pagedsim.tracking": ("pagedsim core metrics report", all_but(*TORCH)),
    "pagedsim.conf": ("", only()),
    "pagedsim.run": (ALL, all_but()),
    "pagedsim.fidelity": (f"{ALL} run", all_but()),
    "pagedsim.serve": (f"{ALL} run", all_but()),
    "pagedsim.__main__": (f"{ALL} run serve", all_but()),
    "pagedsim.experiments": (f"{ALL} run fidelity serve __main__", all_but()),
}
"""By room: the rooms of ours and the third-party packages that it may import."""


def allowed_rooms(room: str) -> list[str]:
    """The rooms that a room may import, itself among them."""
    names = RULES[room][0].split()
    return [room, *(name if name == "pagedsim" else f"pagedsim.{name}" for name in names)]


def test_every_import_points_down() -> None:
    assert violations(ROOT) == []


def test_a_module_that_is_run_runs_after_all_its_definitions() -> None:
    early = []
    for module, path in source_modules(ROOT):
        body = ast.parse(path.read_text()).body
        runs = [isinstance(one, ast.If) and "__name__" in ast.unparse(one.test) for one in body]
        early += [module] if any(runs[:-1]) else []
    assert early == []


@pytest.mark.parametrize("room", RULES)
def test_no_modules_of_a_room_import_each_other(room: str) -> None:
    assert cycle(ROOT, room) == []


@pytest.mark.parametrize(
    ("rooms", "absent"),
    [
        (("pagedsim.core", "pagedsim.build", "pagedsim.policies", "pagedsim.sim"), TORCH),
        (("pagedsim.workload", "pagedsim.metrics", "pagedsim.report"), TORCH),
        (("pagedsim.kernels", "pagedsim.engine"), STUDY),
    ],
    ids=["simulation", "study", "engine"],
)
def test_importing_every_module_leaves_out(rooms: tuple[str, ...], absent: tuple[str, ...]) -> None:
    """What the source does not show, a third-party package pulling in another, shows here."""
    if absent is STUDY and importlib.util.find_spec("torch") is None:
        pytest.skip("the engine extra is not installed")
    if "pagedsim.kernels" in rooms and importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed, or not for this system")
    modules = [module for module, _ in source_modules(ROOT) if room_of(module) in rooms]
    code = (
        "import importlib, sys\n"
        f"for module in {modules!r}: importlib.import_module(module)\n"
        f"print(*(name for name in {absent!r} if name in sys.modules))"
    )
    child = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert child.returncode == 0, child.stderr
    assert child.stdout.split() == [], f"importing {modules} brought {child.stdout}"


HEAVY = ("pandas", "matplotlib", "wandb", "torch", "optuna", "scipy")
"""What takes longer to import than a short study takes to run, and most commands do without."""


LIGHT = (
    ("--version",),
    ("--help",),
    ("serve", "--help"),
    ("policies",),
    ("experiment=estimate", "tracking=none", "report=false"),
    ("experiment=single", "tracking=none", "report=false", "seeds=1", "workload.requests=3"),
)


def test_a_command_leaves_out_what_it_does_not_need(tmp_path: Path) -> None:
    """One process gives all of these commands; the first that imports too much is named."""
    assert left_out(LIGHT, tmp_path, "sys.modules") == ""


SAVINGS = """
import atexit, gc, runpy, sys, yaml
from omegaconf._utils import get_yaml_loader
from pagedsim.spec.conf import register
from pagedsim.report.style import drawing, new_figure

with drawing():
    new_figure(1).subplots()
from matplotlib.lines import Line2D  # its documentation is written when it is imported
register()
fast_yaml = not yaml.__with_libyaml__ or issubclass(get_yaml_loader(), yaml.CSafeLoader)
docs = "agg_filter" in Line2D.__init__.__doc__
atexit.register(lambda: print(docs, fast_yaml, gc.get_freeze_count() > 10_000))
sys.argv = ["pagedsim", "policies", "--help"]
runpy.run_module("pagedsim", run_name="__main__", alter_sys=True)
"""


def test_unused_work_of_a_library_is_left_out(tmp_path: Path) -> None:
    """No documentation of matplotlib's artists, no YAML in Python, no collection at exit."""
    child = in_a_child(SAVINGS, tmp_path)
    assert (child.returncode, child.stderr) == (0, "")
    assert child.stdout.splitlines()[-1] == "False True True"


def left_out(
    commands: Sequence[tuple[str, ...]], folder: Path, modules: str, before: str = ""
) -> str:
    """Which of `HEAVY` are among `modules` when a command is over, with the first such command."""
    code = (
        f"import pathlib, sys; HEAVY = set({HEAVY!r})\n{before}\n"
        "import pagedsim.__main__ as front\n"
        f"for words in {commands!r}:\n"
        "    sys.argv = ['pagedsim', *words]\n"
        "    try: front.main()\n"
        "    except SystemExit as end: assert not end.code, end.code\n"
        f"    found = HEAVY & set({modules})\n"
        "    pathlib.Path('heavy').write_text(' '.join([*found, *words] if found else []))\n"
        "    if found: break"
    )
    child = in_a_child(code, folder)
    assert child.returncode == 0, child.stderr
    return (folder / "heavy").read_text()


def in_a_child(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run this in a Python of its own, in a folder."""
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )


# The checker, tried on small trees with known faults.


def plant(root: Path, files: dict[str, str]) -> list[str]:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return violations(root)


@pytest.mark.parametrize(
    ("path", "source", "target"),
    [
        ("pagedsim/core/a.py", "from pagedsim import sim", "pagedsim.sim"),
        ("pagedsim/core/a.py", "from ..sim.run import go", "pagedsim.sim.run"),
        ("pagedsim/core/__init__.py", "from ..sim import run", "pagedsim.sim.run"),
        ("pagedsim/core/a.py", "try:\n    import numpy\nexcept ImportError: pass", "numpy"),
        ("pagedsim/core/a.py", "if TYPE_CHECKING: pass\nelse: import numpy", "numpy"),
        ("pagedsim/core/a.py", "__import__('torch')", "torch"),
    ],
)
def test_the_checker_finds(path: str, source: str, target: str, tmp_path: Path) -> None:
    (violation,) = plant(tmp_path, {"pagedsim/sim/run.py": "", path: source})
    assert f" imports {target}; allowed: " in violation


@pytest.mark.parametrize("lazily", ["import x", "if TYPE_CHECKING: import x", "def f(): import x"])
def test_the_checker_finds_a_cycle(lazily: str, tmp_path: Path) -> None:
    core = {"a": "import pagedsim.core.b", "b": lazily.replace("x", "pagedsim.core.c"), "c": ""}
    plant(tmp_path, {f"pagedsim/core/{name}.py": source for name, source in core.items()})
    assert cycle(tmp_path, "pagedsim.core") == []
    plant(tmp_path, {"pagedsim/core/c.py": "from pagedsim.core import a"})
    assert {*cycle(tmp_path, "pagedsim.core")} == {f"pagedsim.core.{name}" for name in core}


# How it works: every module's imports, as absolute names, held against its room's rule.


def violations(root: Path) -> list[str]:
    """Every import under `root` that RULES forbids, as "file:line: what is wrong"."""
    modules = dict(source_modules(root))
    found, names = [], known(modules)
    for module, path in modules.items():
        room, place = room_of(module), path.relative_to(root).as_posix()
        if room not in RULES:
            found.append(f"{place}:1: no rule for {room}; add one to RULES")
            continue
        ours, outside = allowed_rooms(room), RULES[room][1]
        for line, target in imports(module, path, names):
            top = target.partition(".")[0]
            if top in PACKAGES:
                fine = room_of(target) in ours
            else:
                fine = top in sys.stdlib_module_names or outside.allows(top)
            if not fine:
                allowed = [*ours, "the standard library", str(outside)]
                found.append(
                    f"{place}:{line}: {room} imports {target}; allowed: {', '.join(allowed)}"
                )
    return found


def cycle(root: Path, room: str) -> list[str]:
    """Modules of a room that import each other in a circle, for types alone or not; or none."""
    modules = dict(source_modules(root))
    names = known(modules)
    needs = {
        module: {
            target
            for _, target in imports(module, path, names, for_types=True)
            if room_of(target) == room and target != module
        }
        for module, path in modules.items()
        if room_of(module) == room
    }
    try:
        TopologicalSorter(needs).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def source_modules(root: Path) -> Iterator[tuple[str, Path]]:
    """Name and file of every module of ours under `root`."""
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            if package != "pagedsim":
                parts = ("pagedsim", *parts)
            yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def room_of(module: str) -> str:
    """The room a module of ours stands in: `pagedsim.sim.driver` in `pagedsim.sim`."""
    return ".".join(module.split(".")[:2])


def known(modules: Iterable[str]) -> set[str]:
    """The names of modules and of the packages that they are in."""
    names: set[str] = set()
    for module in modules:
        names.update(accumulate(module.split("."), "{}.{}".format))
    return names


def imports(
    module: str, path: Path, names: set[str], for_types: bool = False
) -> Iterator[tuple[int, str]]:
    """Line and absolute name of everything that a module imports; `names` are of modules of ours.

    `for_types`: what is imported for a type checker alone counts, too.
    """
    nodes: list[ast.AST] = [ast.parse(path.read_text())]
    while nodes:
        node = nodes.pop()
        match node:
            case ast.If(test=ast.Name("TYPE_CHECKING") | ast.Attribute(attr="TYPE_CHECKING")) if (
                not for_types
            ):
                nodes += node.orelse
            case ast.Import():
                yield from ((node.lineno, alias.name) for alias in node.names)
            case ast.ImportFrom():
                source = node.module or ""
                if node.level:  # relative: one dot is the package, each further dot one above it
                    package = module.split(".")[: None if path.name == "__init__.py" else -1]
                    base = package[: len(package) - node.level + 1]
                    source = ".".join([*base, source] if source else base)
                for alias in node.names:
                    # `from pagedsim import x` imports the package's attribute x or its module x.
                    inner = f"{source}.{alias.name}"
                    yield node.lineno, inner if inner in names else source
            case ast.Call(
                func=ast.Name("__import__" | "import_module") | ast.Attribute(attr="import_module"),
                args=[ast.Constant(value=str(name)), *_],
            ):
                yield node.lineno, name
            case _:
                nodes += ast.iter_child_nodes(node)
