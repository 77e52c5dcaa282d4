"""Results of benchmarks as rows of a table."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from pagedsim.core import ConfigError, PagedsimError
from pagedsim.experiments.fidelity.add_row import main
from pagedsim.fidelity.step_tables.tables import read_table

VLLM: dict[str, Any] = {
    **{"date": "20260901-101500", "backend": "vllm", "model_id": "amd/Llama-3.1-405B-FP8-KV"},
    **{"num_prompts": 160, "request_rate": "inf", "max_concurrency": 16, "completed": 160},
    **{"total_input_tokens": 160 * 900, "total_output_tokens": 160 * 180},
    **{"mean_ttft_ms": 412.3456, "mean_tpot_ms": 21.5},
}
"""What `vllm bench serve --save-result` writes, as far as a row is concerned."""
GIVEN = ("gpu=AMD Instinct MI300X", "tensor_parallel=8", "precision=fp8", "shortest=0.8")
SERVER = "server=vllm-0.33 memory=paged"


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def saved(*results: dict[str, Any], name: str = "result.json") -> str:
    Path(name).write_text("\n".join(map(json.dumps, results)))
    return name


def test_a_result_becomes_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    main(["mine.csv", saved(VLLM), *GIVEN, SERVER])
    (cell,) = read_table("mine.csv").cells
    assert (cell.model.name, cell.hardware.name) == ("llama-3.1-405b", "mi300x")
    # Means of 900 and 180, drawn evenly from 0.8 of the longest up to it.
    assert (cell.prompt, cell.output, cell.at_once) == (1000, 200, 16)
    assert cell.measured["ttft"] == pytest.approx(0.412346)
    assert cell.measured["tpot"] == pytest.approx(0.0215)
    assert cell.protocol is not None and (cell.protocol.rounds, cell.protocol.shortest) == (10, 0.8)
    assert cell.protocol.server == ("server=vllm-0.33", "memory=paged")
    assert cell.backend == "vllm"
    said = capsys.readouterr().out.splitlines()
    assert said[-1] == "python -m pagedsim experiment=truth 'study.tables=[mine.csv]'"


def test_results_are_added_once(capsys: pytest.CaptureFixture[str]) -> None:
    main(["mine.csv", saved(VLLM), *GIVEN, SERVER])
    first = Path("mine.csv").read_text()
    main(["mine.csv", "result.json", *GIVEN, SERVER])
    assert Path("mine.csv").read_text() == first
    assert "mine.csv has this result, as 20260901-101500-c16" in capsys.readouterr().out
    # As --append-result writes them; the second with all requests at once, and metadata.
    again = VLLM | {"gpu": "h200", "shortest": "1"}
    burst = again | {"max_concurrency": None, "mean_tpot_ms": 30}
    main(["mine.csv", saved(again, burst), *GIVEN[1:3], SERVER, "max_seqs=64"])
    with Path("mine.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert Path("mine.csv").read_text().startswith(first)
    assert [row["gpu"] for row in rows] == ["AMD Instinct MI300X", "h200"]
    assert (rows[1]["concurrency"], rows[1]["rounds"], rows[1]["max_seqs"]) == ("160", "1", "64")
    assert (rows[1]["input_tokens"], rows[1]["output_tokens"]) == ("900", "180")


def test_listed_lengths_say_whether_they_are_fixed() -> None:
    fixed = {"input_lens": [898, 902] * 80, "output_lens": [180] * 160}
    main(["mine.csv", saved(VLLM | fixed), *GIVEN[:3], SERVER])
    assert read_table("mine.csv").cells[0].protocol.shortest == 1.0  # type: ignore[union-attr]
    drawn = saved(VLLM | fixed | {"output_lens": [90, 270] * 80})
    with pytest.raises(PagedsimError, match=r"^result\.json: shortest= must be given: lengths are"):
        main(["mine.csv", drawn, *GIVEN[:3], SERVER])


def test_a_table_keeps_its_own_columns() -> None:
    main(["mine.csv", saved(VLLM), *GIVEN, SERVER])
    lines = Path("mine.csv").read_text().splitlines()
    Path("mine.csv").write_text(f"{lines[0]},who\n{lines[1]},Ann\n")
    main(["mine.csv", saved(VLLM | {"mean_tpot_ms": 1}), *GIVEN, SERVER])
    with Path("mine.csv").open() as file:
        assert [row["who"] for row in csv.DictReader(file)] == ["Ann", ""]


@pytest.mark.parametrize(
    ("changes", "words", "says"),
    [
        (
            {"request_rate": 4.0},
            GIVEN,
            "result.json: request_rate=4.0: must be inf, without a ramp",
        ),
        ({"ramp_up_strategy": "linear"}, GIVEN, "result.json: request_rate=inf: must be inf, with"),
        ({"completed": 150}, GIVEN, "result.json: completed=150: must be num_prompts=160: failed"),
        ({"mean_tpot_ms": None}, GIVEN, "result.json: mean_tpot_ms=: must be a time above 0"),
        ({}, (*GIVEN, "gpus=8"), "unknown column 'gpus': did you mean 'gpu'? choose from gpu, "),
        ({}, (*GIVEN, "shortest=0"), "result.json: shortest=0: must be a share above 0, 1 at most"),
        ({}, (*GIVEN, "gpu=T800"), "result.json: gpu=T800: unknown; choose from"),
        (
            {},
            (*GIVEN, "precision="),
            "result.json: precision=: must be fp8, as model=amd/Llama-3.1",
        ),
    ],
)
def test_what_is_wrong_is_named(changes: dict[str, Any], words: tuple[str, ...], says: str) -> None:
    with pytest.raises(ConfigError) as error:
        main(["mine.csv", saved(VLLM | changes), *words, SERVER])
    assert str(error.value).startswith(says)
    assert not Path("mine.csv").exists()


def test_all_that_is_missing_is_asked_for_at_once() -> None:
    with pytest.raises(PagedsimError) as error:
        main(["mine.csv", saved(VLLM)])
    asked = [line.split(" must be given: ")[0] for line in str(error.value).split("; result")]
    assert [line.split()[-1] for line in asked] == [
        *("gpu=", "tensor_parallel=", "server=", "shortest=")
    ]


@pytest.mark.parametrize(
    ("files", "says"),
    [
        (("mine.csv",), "mine.csv: must be TABLE.csv RESULT.json ..."),
        (("result.json", "mine.csv"), "result.json mine.csv: must be TABLE.csv RESULT.json ..."),
        (("mine.csv", "none.json"), "result=none.json: there is no such file"),
        (
            ("mine.csv", "other.json"),
            "other.json: has no mean_ttft_ms: must be a result of vllm be",
        ),
        (("mine.csv", "half.json"), "half.json: is not JSON: "),
        (("batch.csv", "result.json"), "batch.csv: has no column tensor_parallel, input_to"),
    ],
)
def test_files_that_are_no_tables_or_results(files: tuple[str, ...], says: str) -> None:
    saved(VLLM)
    saved({"finding": []}, name="other.json")
    Path("half.json").write_text('{"mean_ttft_ms": ')
    Path("batch.csv").write_text("model,gpu,gpus\na,b,1\n")
    with pytest.raises(ConfigError) as error:
        main([*files, *GIVEN, SERVER])
    assert str(error.value).startswith(says)
