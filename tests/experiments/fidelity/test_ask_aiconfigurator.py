"""What the script that asks AIConfigurator says, and what the committed answers hold."""

from __future__ import annotations

import csv
import gzip
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from pagedsim.experiments.fidelity import ask_aiconfigurator


@pytest.mark.skipif(
    importlib.util.find_spec("aiconfigurator") is not None, reason="the package is there"
)
def test_without_the_package_it_says_what_to_install_in_one_line(tmp_path: Path) -> None:
    script = [sys.executable, ask_aiconfigurator.__file__, "rows.csv", str(tmp_path / "out.csv.gz")]
    said = subprocess.run(script, capture_output=True, text=True)
    assert said.returncode == 1 and said.stdout == "" and not list(tmp_path.iterdir())
    (line,) = said.stderr.splitlines()
    assert "No module named 'aiconfigurator'" in line
    assert "pip install aiconfigurator==0.12.0" in line


def test_every_row_was_asked_in_both_ways_and_has_an_answer_or_a_reason() -> None:
    with gzip.open(ask_aiconfigurator.ANSWERS, "rt") as lines:
        answers = list(csv.DictReader(lines))
    asked = {(answer["id"], answer["asked"]) for answer in answers}
    ids = {answer["id"] for answer in answers}
    assert len(ids) == 5221  # as silicon_sample.csv of 0.12.0
    assert len(answers) == len(asked) == 2 * len(ids)
    for answer in answers:
        if answer["reason"]:
            assert not any(answer[name] for name in ("ttft_ms", "tpot_ms", "data")), answer
        else:
            assert answer["data"] in ("silicon", "hybrid"), answer
            assert float(answer["ttft_ms"]) > 0 and float(answer["tpot_ms"]) > 0, answer


def test_a_checkpoint_brings_the_quantisation_that_the_columns_lack() -> None:
    row = dict.fromkeys(ask_aiconfigurator.NUMBERS["agg"], "1") | {
        **{"mode": "agg", "system": "h200_sxm", "backend": "trtllm", "isl": "1024"},
        **{"model_path": "meta-llama/Llama-3.1-70B", "gemm_quant_mode": "fp8"},
        "moe_quant_mode": "fp8",
    }
    ways = ask_aiconfigurator.ways(row, "1.3.0rc20")
    columns, checkpoint = ways["columns"], ways["checkpoint"]
    assert columns["isl"] == checkpoint["isl"] == 1024
    assert columns["model_path"] == "meta-llama/Meta-Llama-3.1-70B"
    assert columns["gemm_quant_mode"] == "fp8"
    assert checkpoint["model_path"] == "nvidia/Llama-3.1-70B-Instruct-FP8"
    assert checkpoint["gemm_quant_mode"] is None and checkpoint["moe_quant_mode"] is None
