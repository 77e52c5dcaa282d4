"""Every study of a paper once, small but real: what it finds and its numbers are in golden.json.

    UPDATE_GOLDEN=1 pytest tests/experiments/papers/test_golden.py -m ""

writes them anew.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from pagedsim.run import store
from pagedsim.run.objects import make
from pagedsim.run.study import Study
from tests.run.studies import carried_out, command

GOLDEN = Path(__file__).with_name("golden.json")
CHAT = {"fcfs": [1, 4], "srpt": [1, 4]}
RANKED = {
    f"tau {tau}": ["policy=sjf", "predictor=rank", f"predictor.tau={tau}"] for tau in (0.9, 0.1)
}
STUDIES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "agents": (
        "",
        {
            "loads/agents": None,
            "loads/chats/sessions": 60,
            "loads/chats/rates": [0.1, 8],
            "loads/chats/bound": 26,
            "token_bounds": [0.022],
        },
    ),
    "chunk_budget": (
        "workload.requests=24",
        {
            "capacity/cases": ["Mistral-7B"],
            "capacity/tolerance": 0.5,
            "crossing/rates": [0.75],
            "budgets": ["prefill first", "whole prompts", "512 tokens", "2,048 tokens"],
        },
    ),
    "early_rejection": (
        "model=llama-2-7b tensor_parallel=1 workload.rate=8 workload.cv=1 workload.requests=40 "
        "workload.lengths.prompt_mean=500 fleet.pools.prefill.replicas=1 "
        "fleet.pools.decode.replicas=1",
        {"cases": {"a": ["router.tbt=0.035"]}, "shown": "a", "warm_up": 0.0},
    ),
    "kv_tiers": (
        "workload.sessions=12",
        {"cases": ["13B on one GPU"], "sizes": {"gib": [8, 64]}},
    ),
    "migration": ("workload.requests=40", {"rates": [10, 20]}),
    "paper_fig2": ("workload.requests=120 workload.rate=40 backend.every=16", {"warm_up": 1.0}),
    "paper_fig12": (
        "",
        {
            "systems": ["FasterTransformer", "Orca (Oracle)", "paged"],
            "loads": ["ShareGPT"],
            "loads/ShareGPT/rates": {
                "FasterTransformer": [0.1, 4],
                "Orca (Oracle)": [0.5, 24],
                "paged": [1, 32],
            },
            "variants/a longer trace": None,
            "variants/prompts computed beside decodes/Alpaca": None,
            "warm_up": 5.0,
            "bound": 0.06,
            "bounds": [0.05],
        },
    ),
    "paper_fig13": (
        "",
        {
            "loads": ["ShareGPT, 2/s"],
            "loads/ShareGPT, 2/s/warm_up": 10,
            "variants": {"longer steps": {"ShareGPT, 2/s": ["workload.rate=4"]}},
        },
    ),
    "paper_fig14_15": (
        "",
        {
            "cases": ["n = 1", "n = 6", "beam = 6"],
            "variants": ["beam = 6, copies ten times as slow"],
            "beams": ["beam = 6"],
            "curves": {"beam = 6": {"paged": [4, 20], "Orca (Oracle)": [2, 8]}},
            "settled": 0.1,
        },
    ),
    "paper_fig16": (
        "",
        {
            "cases": ["80 tokens"],
            "variants": ["80 tokens, at most 128 sequences"],
            "settled": 0.1,
        },
    ),
    "paper_fig18": ("", {"sizes": [1, 16, 32, 128], "variants": ["no kernel overhead"]}),
    "paper_fig19": ("workload.requests=40", {"sizes": [1, 16, 64]}),
    "past_future": (
        "workload.max_len=2048 memory.blocks=200",
        {
            "loads": ["decode-heavy"],
            "loads/decode-heavy": {
                "overrides": ["workload.requests=60"],
                "users": [6, 16],
                "warm_up": 0,
            },
        },
    ),
    "prefix_routing": (
        "",
        {
            "stages": [{"rate": rate, "seconds": 1} for rate in (15, 20, 60)],
            "others": ["least_requests"],
            "variants": ["stack=vllm-2024"],
        },
    ),
    "size_based": (
        "workload.requests=60",
        {
            "curves": {"ShareGPT": {"rates": CHAT, "bound": 0.05}},
            "bursts": {"burst": {"overrides": ["workload.arrivals=burst"], "arms": RANKED}},
            "payers/rates": [4],
        },
    ),
    "staleness": (
        "workload.requests=40",
        {"ages": [0, 0.1], "routers": ["memory", "least_requests"]},
    ),
}
"""Overrides of the command, and changes of the study's settings by path: None removes, a list of
names keeps those entries alone."""


def settings_of(folder: Path, name: str) -> Any:
    """The settings of a study, with fewer arms, and 30 requests or 15 s in any override."""
    words, changes = STUDIES[name]
    study = command(folder, f"experiment={name}", *words.split()).config["study"]
    for path, value in changes.items():
        *outer, last = path.split("/") if "2/s" not in path else _split_load(path)
        inner: Any = study
        for part in outer:
            inner = inner[part]
        if value is None:
            del inner[last]
        elif isinstance(value, list) and isinstance(inner[last], dict):
            inner[last] = {key: inner[last][key] for key in value}
        else:
            inner[last] = value
    text = re.sub(r"(workload\.requests=|\"requests\": )\d+", r"\g<1>30", json.dumps(study))
    text = re.sub(r"workload\.duration=\d+", "workload.duration=15", text)
    return json.loads(text, object_pairs_hook=_numbers)


def _split_load(path: str) -> list[str]:
    return path.replace("2/s", "2|s").replace("/", "\n").replace("2|s", "2/s").split("\n")


def _numbers(pairs: list[tuple[str, Any]]) -> dict[Any, Any]:
    """Keys that were numbers before they were JSON."""
    number = re.compile(r"-?\d+(\.\d+)?$")
    return {(json.loads(key) if number.match(key) else key): value for key, value in pairs}


@pytest.mark.slow
@pytest.mark.usefixtures("hydra")
@pytest.mark.parametrize("name", STUDIES)
def test_a_small_study_gives_what_it_gave(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "of_target", lambda path: None)  # takes seconds, and no run is kept
    study = make("study", settings_of(tmp_path, name), Study)
    words = (f"experiment={name}", *STUDIES[name][0].split(), "seeds=1", "jobs=1", "report=false")
    found = carried_out(tmp_path, *words, study=study)
    rows = {row["what"]: row["ours"] for row in found["rows"]}
    made = {"finding": found["finding"], "rows": rows, "notes": found["notes"]}
    golden = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}
    if os.environ.get("UPDATE_GOLDEN"):
        golden[name] = made
        GOLDEN.write_text(
            json.dumps(dict(sorted(golden.items())), indent=1, ensure_ascii=False) + "\n"
        )
    assert made == golden[name]
