"""The benchmark of a CPU, with the tiny model: all give the same tokens, or nothing is timed."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("transformers")

from experiments.benchmarks import cpu

FEW = ["--model", "tiny", "--batches", "1,2", "--rounds", "1"]


@pytest.mark.slow
def test_every_form(capsys: pytest.CaptureFixture[str]) -> None:
    cpu.main(FEW)
    told = capsys.readouterr().out
    for form in cpu.FORMS:
        assert f"tiny, {form}, threads=1" in told
    rows = re.findall(r"^\| (\d) \| ([^|]+) \|", told, re.MULTILINE)
    three = [cpu.OURS, cpu.PADDED, cpu.BATCHED]
    own = [(count, name) for count in "12" for name in three]
    assert rows == own * 2 + [("1", cpu.OURS), ("2", cpu.OURS)]
    assert len(re.findall(r"^A step of one request takes [\d.]+ ms, ", told, re.MULTILINE)) == 3


def test_other_tokens_are_not_timed() -> None:
    import torch

    answers = {cpu.OURS: [[1, 2], [3, 4]], cpu.PADDED: [[1, 2], [3, 5]]}
    with pytest.raises(SystemExit, match=r"^2 requests: 50% of the answers are those of transf"):
        cpu.check(answers, torch.float32, 2)
    cpu.check(answers, torch.bfloat16, 2)


def test_what_cannot_be_is_one_line() -> None:
    with pytest.raises(SystemExit, match=r"^--forms=int4: must be of float32, bfloat16, int8$"):
        cpu.main([*FEW, "--forms", "int4"])
    with pytest.raises(SystemExit, match=r"^model=none.gguf: no such file$"):
        cpu.main(["--model", "none.gguf", "--forms", "float32"])
