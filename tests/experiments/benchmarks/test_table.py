"""The table of all benchmarks: its cells, and its copy in experiments/results/performance.md."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from experiments.benchmarks import (
    device,
    engine,
    host,
    kernels,
    profile,
    servers,
    step,
    swap,
    table,
)
from experiments.benchmarks.shapes import BASE, DECODE, HEADLINES, WIDE, Case, grid
from pagedsim.metrics.files import read_json, write_json

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "experiments" / "results" / "performance.md").read_text(encoding="utf-8")
QUICK = ["--device", "cpu", "--quick", "--rounds", "1"]


def cells(text: str) -> dict[str, list[str]]:
    """The columns of a table, by their head."""
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()]
    head, _, *rows = lines
    return {name: [row[at] for row in rows] for at, name in enumerate(head)}


def test_the_page_has_what_the_command_prints() -> None:
    marked = re.search(r"<!-- benchmarks:gpu -->\n((?:\|.*\n)+)", PAGE)
    assert marked, "the page has the table after the marker benchmarks:gpu"
    assert marked[1].rstrip("\n") == table.written(table.measured(device.RESULTS))


def test_cells_without_results_are_empty() -> None:
    columns = cells(table.written({}))
    assert list(columns) == ["", "bar", "goal", "H200", "H100"]
    assert set(columns["H200"]) == set(columns["H100"]) == {""}
    assert len(columns[""]) == len(table.ROWS)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that the benchmarks write, with the name and the cases of a GPU."""
    place = tmp_path_factory.mktemp("results") / "h200"
    for peers, name in (([], "kernels"), (["sdpa"], "peers")):
        kernels.main([*QUICK, "--name", name, "--out", str(place), "--peers", *peers])
    for cache in ("auto", "fp8_e4m3"):
        swap.main([*QUICK, "--kv-cache-dtype", cache, "--out", str(place)])
    step.main([*QUICK, "--out", str(place)])
    profile.main([*QUICK, "--out", str(place)])
    few = ["--out", str(place)]
    engine.main(["--prompts", "3", "--tokens", "3", "--repeats", "1", *few])
    servers.main(["--device", "cpu", *few])
    host.main(["--running", "64", "--steps", "2", "--rounds", "1", *few])
    for name in table.FILES:
        content = read_json(place / f"{name}.json")
        content |= {"device": "NVIDIA H200", "capability": [9, 0]}
        write_json(place / f"{name}.json", as_if(name, content))
    return place


def as_if(name: str, content: dict[str, Any]) -> dict[str, Any]:
    """Give tiny cases the names of the headlines."""
    if name in ("kernels", "peers"):
        content["cases"] = [
            {**content["cases"][0], "case": str(case), "seconds": 1.0 + 0.05 * (case == DECODE)}
            for case in HEADLINES
        ]
    if name == "servers":
        content |= {"absent": {"sglang": "not installed"}}
        content |= {"rates": {servers.AHEAD: 300.0, "vllm": 200.0}}
    for one in content.get("swaps", ()):
        one["model"] = BASE
    for one in content.get("arms", ()):
        one["graphs"] = True
    return content


@pytest.mark.slow
def test_every_cell_is_filled_from_what_the_benchmarks_write(place: Path) -> None:
    columns = cells(table.written(table.measured(place.parent)))
    assert all(columns["H200"]) and "failed" not in columns["H200"]
    assert set(columns["H100"]) == {""}
    told = dict(zip(columns[""], columns["H200"], strict=True))
    assert told["the same, blocks of 16 instead of 128: time"] == "+5.0%"
    times = read_json(place / "step.json")["arms"][0]["to_limit"]
    wanted = f"{times:.2f} ×"
    assert told[next(what for what in told if what.startswith("decode step"))] == wanted
    rates = read_json(place / "engine.json")["rates"]
    peer = told["tokens a second: times transformers' `generate_batch`, a weak peer"]
    assert peer == f"{rates['pagedsim'] / rates[engine.PEER]:.1f} ×"
    assert told["the same, `async_scheduling`: times vLLM's"] == "1.50 ×"
    assert told["the same, `async_scheduling`: times SGLang's"] == "not installed"
    fastest = "decode attention, 64 × 4,096: the fastest peer's time over ours"
    assert told[fastest].endswith(" × (sdpa)")


def test_cells_of_wrong_results_are_not_empty(place: Path, tmp_path: Path) -> None:
    kept = {name: dict(read_json(place / f"{name}.json")) for name in table.FILES}
    untimed = ("seconds", "out", "in")
    kept["servers"] = {"absent": {}, "rates": {}}
    lines_of = {"kernels": "cases", "peers": "cases", "swap": "swaps", "swap-fp8_e4m3": "swaps"}
    for name, lines in {**lines_of, "step": "arms", "host": "steps"}.items():
        kept[name][lines] = [
            {key: value for key, value in one.items() if key not in untimed}
            for one in kept[name][lines]
        ]
    del kept["engine"]["rates"], kept["profile"]["seconds"]
    assert set(cells(table.written({"H200": kept}))["H200"]) == {"failed"}


def test_each_gpu_has_a_column_under_its_name(place: Path) -> None:
    (kept,) = table.measured(place.parent).values()
    columns = cells(table.written({"A100-SXM4-80GB": kept, "H100 80GB HBM3": kept}))
    assert list(columns)[3:] == ["H200", "H100 80GB HBM3", "A100-SXM4-80GB"]
    assert set(columns["H200"]) == {""}


def test_cases_with_a_bar_are_measured() -> None:
    cases = list(grid(quick=False))
    assert set(HEADLINES) <= set(cases)
    eight = {replace(case, cache="auto") for case in HEADLINES if case.cache != "auto"}
    assert eight == {case for case in HEADLINES if case.cache == "auto"} - {WIDE}
    assert Case(BASE, 64, 1, 4096, 16) == DECODE and WIDE.block_size == 128
    assert any((one.model, one.block_size, one.layout) == (BASE, 16, "block")
               for one in swap.swaps(quick=False))  # fmt: skip
    arms = list(step.arms(graphs=True))
    for cache in step.CACHES:
        for ahead in (False, True):
            assert step.Arm(cache, "native", True, ahead) in arms
    assert step.Arm("auto", "native", True, False, sampled=True) in arms
