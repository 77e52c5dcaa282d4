"""What an installation gets: pinned versions that fit the open ranges, and a complete wheel."""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

import pagedsim
from pagedsim.requirements import numbers
from pagedsim.run.provenance import answered, asked
from tests import bounds

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def pins() -> dict[str, str]:
    """constraints.txt as {normalised name: version}."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pairs = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {normalised(name): version for name, version in pairs}


def normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def direct_dependencies() -> list[str]:
    extras = PROJECT["optional-dependencies"].values()
    return [*PROJECT["dependencies"], *(line for extra in extras for line in extra)]


def test_constraints_pin_every_direct_dependency() -> None:
    names = {normalised(re.split(r"[^\w.-]", line)[0]) for line in direct_dependencies()}
    assert names - set(pins()) == set()


def test_a_plain_installation_is_not_asked_for_torch() -> None:
    heavy = re.compile(r"torch|triton|transformers|nvidia")
    assert [line for line in PROJECT["dependencies"] if heavy.match(line)] == []


def test_every_bound_that_users_meet_has_a_trial() -> None:
    """As `python -m tests.bounds` finds it; torch and Triton are left as they are."""
    searched = {library.name for library in bounds.libraries()}
    users = {
        name: lines
        for name, lines in PROJECT["optional-dependencies"].items()
        if name not in ("dev", "docs", "measured")  # the last has data, and no code that is used
    }
    assert {*bounds.EXTRAS} == {*bounds.STARTS} == {"", *users} and {*bounds.TRIALS} == searched
    named = [*PROJECT["dependencies"], *(line for lines in users.values() for line in lines)]
    assert searched | set(bounds.AS_THEY_ARE) == {re.split(r"[^\w-]", line)[0] for line in named}


def test_bounds_are_those_that_were_found() -> None:
    rows = [
        [cell.strip() for cell in line.split("|")]
        for line in bounds.PAGE.read_text(encoding="utf-8").splitlines()
        if line.startswith("| ")
    ][1:]
    found = {row[1]: numbers(row[5]) for row in rows}
    stated = {one.name: numbers(one.bound) for one in bounds.libraries()}
    assert found == stated


def test_the_versions_of_python_that_are_promised_are_tested() -> None:
    classified = [line.rpartition(" ")[2] for line in PROJECT["classifiers"] if " 3." in line]
    session = ast.parse((ROOT / "noxfile.py").read_text(encoding="utf-8"))
    (tested,) = (
        ast.literal_eval(one.value)
        for one in session.body
        if isinstance(one, ast.Assign) and ast.unparse(one.targets[0]) == "SUPPORTED"
    )
    assert list(tested) == classified and PROJECT["requires-python"] == f">={tested[0]}"


WITHOUT_TORCH = {"x86_64-apple-darwin"}
"""Platforms for which torch has no wheels, as docs/engine.md says."""
PLATFORMS = (
    *("x86_64-manylinux_2_28", "aarch64-manylinux_2_28", "aarch64-apple-darwin"),
    *("x86_64-pc-windows-msvc", *WITHOUT_TORCH),
)


def refused(platform: str, *extras: str) -> str:
    """Why these extras together have no wheels of the pinned versions; empty: they have."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "uv", "pip", "compile", "-q", "pyproject.toml"),
            *(word for extra in extras for word in ("--extra", extra)),
            *("-c", "constraints.txt", "--python-platform", platform, "--python-version", "3.13"),
            *("--only-binary", ":all:", "--no-binary", "antlr4-python3-runtime"),
        ],
        cwd=ROOT,
        env={**os.environ, "MACOSX_DEPLOYMENT_TARGET": "14.0"},
        capture_output=True,
        text=True,
    )
    return done.stderr if done.returncode else ""


@pytest.mark.slow
@pytest.mark.parametrize("platform", PLATFORMS)
def test_all_extras_together_can_be_had_where_torch_can(platform: str) -> None:
    """Under the newest Python, for which wheels come last."""
    need_torch = {"engine", "gguf"} if platform in WITHOUT_TORCH else set()
    assert refused(platform, *sorted({*PROJECT["optional-dependencies"]} - need_torch)) == ""
    for extra in need_torch:
        assert "torch==2.13.0 has no wheels" in refused(platform, extra)


BESIDE = ("policies", "kernels", "conf", "experiments")
"""Folders of a checkout that are packages of pagedsim."""
HOSTILE = "raise SystemExit('a file of the user was imported')"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel that is built of the sdist."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--outdir", str(folder), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True)
    (made,) = folder.glob("pagedsim-*.whl")
    return made


@pytest.mark.slow
def test_the_wheel_holds_every_module_and_every_configuration_file(
    wheel: Path, tmp_path: Path
) -> None:
    kinds = ("*.py", "*.yaml", "*.html", "*.css", "*.js", "tuned*.json", "vllm*.json")
    data = ("neutral.json", "dark.json", "manual.txt", "serve.txt", "groups.txt", "bench.txt")
    expected = {
        ("" if package == "pagedsim" else "pagedsim/") + path.relative_to(ROOT).as_posix()
        for package in ("pagedsim", *BESIDE)
        for suffix in (*kinds, *data, "py.typed")
        for path in (ROOT / package).rglob(suffix)
        if not path.is_relative_to(ROOT / "experiments" / "results")  # findings are for readers
    }
    held = set(zipfile.ZipFile(wheel).namelist())
    assert expected - held == set()
    beside = {name.partition("/")[0] for name in held} - {"pagedsim"}
    assert [name for name in beside if not name.endswith(".dist-info")] == []
    installed = hub_kernels(tmp_path)
    zipfile.ZipFile(wheel).extractall(installed)
    assert python(KERNELS, tmp_path, installed) == f"{installed} {installed / 'pagedsim'}"


@pytest.mark.slow
def test_a_wheel_records_the_commit_of_the_checkout(wheel: Path, installed: Path) -> None:
    known = answered(asked(ROOT))
    if known is None:
        pytest.skip("not in a checkout")
    with zipfile.ZipFile(wheel) as held:
        assert held.read("pagedsim/commit.txt").decode() == f"{known}\n"
    assert (installed / "pagedsim/commit.txt").read_text() == f"{known}\n"


@pytest.mark.slow
def test_an_installation_works_in_a_folder_with_names_of_ours(wheel: Path, tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    there = tmp_path / "venv/bin"
    pins = ["-c", str(ROOT / "constraints.txt")]
    # Not compiled: what is imported will be.
    subprocess.run([there / "pip", "install", "-q", "--no-compile", *pins, wheel], check=True)
    folder = tmp_path / "foreign"
    for name in BESIDE:
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text(HOSTILE)
    (folder / "tests.py").write_text(HOSTILE)
    first = ("experiment=fcfs_vs_priority", "seeds=1", "workload.requests=50", "tracking=none")
    for command in (["pagedsim"], ["python", "-m", "pagedsim"]):
        done = subprocess.run(
            [there / command[0], *command[1:], *first], cwd=folder, capture_output=True, text=True
        )
        assert (done.returncode, done.stderr) == (0, ""), done.stderr
        assert "report.html" in done.stdout
    script = "import pagedsim as ps; print(ps.simulate(seeds=1, workload=ps.synthetic(requests=9)))"
    done = subprocess.run(
        [there / "python", "-c", script], cwd=folder, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "") and "TTFT" in done.stdout


def install(folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Install this checkout into `folder` under these environment variables alone."""
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(folder)]
    environ = {name: value for name, value in os.environ.items() if name != "PAGEDSIM_COMPILE"}
    return subprocess.run(
        [*command, str(ROOT)], env={**environ, **variables}, capture_output=True, text=True
    )


COMPILER = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "")[:1]
needs_compiler = pytest.mark.skipif(
    not COMPILER or shutil.which(COMPILER[0]) is None, reason="no C compiler here"
)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package alone."""
    folder = tmp_path_factory.mktemp("installed")
    done = install(folder)
    assert done.returncode == 0, done.stderr
    return folder


def check_build(folder: Path, how: str) -> None:
    """Fail unless what is installed there says that it was built so, and runs."""
    script = "import pagedsim as ps; print(ps.simulate(seeds=1, workload=ps.synthetic(requests=9)))"
    version, summary = (
        subprocess.run(
            [sys.executable, *words],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(folder)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for words in (["-m", "pagedsim", "--version"], ["-c", script])
    )
    assert how in version and "TTFT" in summary
    assert bool([*folder.glob("pagedsim/**/*.so")]) == (how == ", compiled\n")


@pytest.mark.slow
def test_an_installation_is_interpreted_and_says_so(installed: Path) -> None:
    check_build(installed, ", interpreted (")


@pytest.mark.slow
@needs_compiler
def test_an_installation_is_compiled_if_requested_and_says_so(tmp_path: Path) -> None:
    done = install(tmp_path, PAGEDSIM_COMPILE="1")
    assert done.returncode == 0, done.stderr
    check_build(tmp_path, ", compiled\n")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("compiler", "error"),
    [
        ("/nonexistent", "no C compiler: there is no '/nonexistent' here; install one, or set CC"),
        ("false", "compiling failed: "),
    ],
)
def test_an_installation_that_cannot_be_compiled_is_refused(
    compiler: str, error: str, tmp_path: Path
) -> None:
    errors = install(tmp_path, CC=compiler, PAGEDSIM_COMPILE="1").stderr
    (line,) = (line.strip() for line in errors.splitlines() if "PAGEDSIM_COMPILE" in line)
    assert line.startswith(f"PAGEDSIM_COMPILE=1: {error}") and "Traceback" not in errors
    assert line.endswith("; or unset it, and nothing has to be compiled")


NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.py"))
AS_A_NOTEBOOK = """
import ast, re, sys
names = sys.modules["__main__"].__dict__
for cell in re.split("(?m)^(?=# %%)", open(sys.argv[1], encoding="utf-8").read()):
    exec(compile(ast.Interactive(ast.parse(cell).body), "<cell>", "single"), names)
import pagedsim
print(pagedsim.__file__)
"""
"""Runs cells in a session without a file, and prints what each statement is worth."""


@pytest.mark.slow
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_on_what_is_installed(
    notebook: Path, installed: Path, tmp_path: Path
) -> None:
    if "ps.LLM" in notebook.read_text(encoding="utf-8"):
        pytest.importorskip("torch")
    done = subprocess.run(
        [sys.executable, "-c", AS_A_NOTEBOOK, str(notebook)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    *shown, file = done.stdout.splitlines()
    assert Path(file).is_relative_to(installed)
    assert len(shown) > 3


# Hugging Face has a package `kernels`, too, by which transformers finds kernels to load.

KERNELS = """
import kernels, pagedsim.kernels.ops
from pathlib import Path
print(Path(kernels.__file__).parents[1], Path(pagedsim.kernels.ops.__file__).parents[1])
"""


def hub_kernels(folder: Path) -> Path:
    """Where a package of that name is installed, as transformers looks for it."""
    place = folder / "site-packages"
    (place / "kernels").mkdir(parents=True)
    (place / "kernels/__init__.py").touch()
    facts = place / "kernels-0.18.2.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: kernels\nVersion: 0.18.2\n")
    return place


def python(code: str, cwd: Path, *path: Path) -> str:
    """What a process prints that finds modules in `cwd` first, and then in `path`."""
    child = subprocess.run(
        [sys.executable, "-c", code],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))},
        capture_output=True,
        text=True,
    )
    assert child.returncode == 0, child.stderr
    return child.stdout.strip()


@pytest.mark.slow
def test_hugging_face_s_kernels_are_not_hidden_by_ours(tmp_path: Path) -> None:
    """Not even in this folder, which has one of that name: it is no package."""
    pytest.importorskip("torch")
    there = hub_kernels(tmp_path)
    assert python(KERNELS, ROOT, there) == f"{there} {ROOT}"


# -- beside the package: its citation and its container -------------------------------------------


CITATION: dict[str, Any] = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")


def test_the_citation_is_of_this_package() -> None:
    assert CITATION["version"] == pagedsim.__version__
    assert CITATION["license"] == PROJECT["license"]
    assert CITATION["title"].startswith(f"{PROJECT['name']}: ")
    assert set(CITATION["keywords"]) < set(PROJECT["keywords"])


# -- the container ---------------------------------------------------------------------------------


def entry_points() -> dict[str, list[str]]:
    """The command of each stage that has one."""
    found: dict[str, list[str]] = {}
    stage = ""
    for line in DOCKERFILE.splitlines():
        if named := re.match(r"FROM \S+ AS (\w+)", line):
            stage = named[1]
        elif line.startswith("ENTRYPOINT "):
            found[stage] = json.loads(line.removeprefix("ENTRYPOINT "))
    return found


@pytest.mark.parametrize(("stage", "words"), entry_points().items())
def test_a_container_s_command_is_a_server(
    stage: str, words: list[str], call: Callable[..., tuple[int, str, str]]
) -> None:
    assert words[0] in PROJECT["scripts"]
    code, shown, errors = call(*words[1:], "--cfg", "job")
    assert (code, errors) == (0, "")
    config = yaml.safe_load(shown)
    assert config["host"] == "0.0.0.0"
    assert stage == ("sim" if "Simulated" in config["backend"]["_target_"] else "engine")
    [extras] = re.findall(rf"AS {stage}\n(?:.+\n)*?RUN pip install .*'\.\[(.+)\]'", DOCKERFILE)
    assert set(extras.split(",")) <= set(PROJECT["optional-dependencies"])
    port = config["port"]
    assert f"EXPOSE {port}\n" in DOCKERFILE
    assert f"http://127.0.0.1:{port}/health" in DOCKERFILE


def test_a_container_serves_without_rights() -> None:
    for stage in DOCKERFILE.split("\nFROM ")[1:]:
        assert stage.startswith("python") or "\nUSER pagedsim\n" in stage


def test_what_the_container_copies_is_there_and_sent_to_the_builder() -> None:
    copied = [
        word for line in re.findall(r"^COPY (.+) \S+$", DOCKERFILE, re.M) for word in line.split()
    ]
    assert [one for one in copied if not (ROOT / one).exists()] == []
    sent = re.findall(r"^!(.+)$", (ROOT / ".dockerignore").read_text(encoding="utf-8"), re.M)
    assert sorted(sent) == sorted(copied)
