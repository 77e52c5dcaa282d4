"""The benchmark of attention goes its whole way at tiny sizes, and times nothing that is wrong."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from experiments.benchmarks import device, kernels, peers, shapes  # noqa: E402
from experiments.benchmarks.peers import Contender  # noqa: E402
from experiments.benchmarks.shapes import BASE, SHAPES, Case, Problem, grid  # noqa: E402
from pagedsim.kernels.float8 import FORMATS  # noqa: E402

CPU = torch.device("cpu")
DECODE = Case("tiny", 3, 1, 40)
CHUNK = Case("tiny", 2, 8, 24)
BESIDE = Case("tiny", 3, 1, 20, 8, beside=70)
CASES = [
    *(DECODE, CHUNK, Case("tiny", 2, 24, 24, 8)),
    *(replace(DECODE, cache="fp8_e4m3"), replace(CHUNK, cache="fp8_e5m2"), BESIDE),
]
TINY = ["--device", "cpu", "--quick", "--rounds", "1"]


def test_the_whole_way(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kernels.main([*TINY, "--out", str(tmp_path)])
    result = json.loads((tmp_path / "kernels.json").read_text())
    assert {"device", "driver", "cuda", "torch", "triton", "date", "command"} <= set(result)
    assert [one["case"] for one in result["cases"]] == [str(case) for case in grid(quick=True)]
    for one in result["cases"]:
        assert one["seconds"] > 0 and one["error"] <= one["error_allowed"]
        assert one["of_limit"] == pytest.approx(one["limit"]["seconds"] / one["seconds"])
        theirs = {"flex"} if one["kind"] == "chunk" else {"flex", "sdpa"}
        if one["cache"] != "auto" or one["beside"]:
            theirs = set()
        assert {name for name, peer in one["peers"].items() if peer.get("to_ours")} == theirs
    assert (tmp_path / "kernels.png").stat().st_size > 0
    out = capsys.readouterr().out
    assert out.count("\n| ") == 2 + len(result["cases"])  # a head, a rule, a line a case
    assert "sdpa / ours | flex / ours" in out


def test_without_a_gpu_one_line_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as refused:
        kernels.main([])
    assert str(refused.value).startswith("no CUDA device here")
    assert "\n" not in str(refused.value)


def test_rounds_are_checked(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        kernels.main(["--device", "cpu", "--rounds", "0"])
    assert "--rounds: 0: must be a whole number of at least 1;" in capsys.readouterr().err


def test_what_is_wrong_is_not_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = Problem.ours
    monkeypatch.setattr(
        Problem, "ours", lambda self: right(self) * (1 + 1e-3 * (self.case.kind == "decode"))
    )
    with pytest.raises(SystemExit, match="not timed: decode 3 × 40"):
        kernels.main([*TINY, "--peers", "--out", str(tmp_path)])
    for one in json.loads((tmp_path / "kernels.json").read_text())["cases"]:
        assert ("seconds" in one) == (one["kind"] != "decode")
    assert "not timed" in capsys.readouterr().err


def test_a_case_that_ends_in_an_error_leaves_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is tried again when the others are done; a GPU that is lost ends the run at once."""
    first, *others = map(str, grid(quick=True))
    words = [*TINY, "--resume", "--peers", "--out", str(tmp_path)]
    right = Problem.ours

    def fails(problem: Problem) -> Any:
        if str(problem.case) == first:
            raise RuntimeError("out of resource\nand more")
        return right(problem)

    def cases() -> list[dict[str, Any]]:
        return list(json.loads((tmp_path / "kernels.json").read_text())["cases"])

    with monkeypatch.context() as patched:
        patched.setattr(Problem, "ours", fails)
        patched.setattr(kernels, "lost", lambda device: True)
        with pytest.raises(SystemExit, match="can be used no more"):
            kernels.main(words)
        assert cases() == [{"case": first, "failed": "RuntimeError: out of resource"}]
        patched.undo()
        patched.setattr(Problem, "ours", fails)
        with pytest.raises(SystemExit, match=f"^not timed: {re.escape(first)}$"):
            kernels.main(words)
    assert [one["case"] for one in cases()] == [*others, first]
    assert [one["case"] for one in cases() if "seconds" in one] == others
    assert f"{first}: RuntimeError: out of resource, not timed" in capsys.readouterr().err
    kernels.main(words)
    assert all("seconds" in one for one in cases())


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_key_too_few_is_seen(case: Case) -> None:
    problem = Problem(case, torch.float32, CPU)
    assert problem.error(problem.ours()) < problem.allowed
    short = problem.batch
    problem.batch = replace(
        short,
        context_lens=short.context_lens - 1,
        chunks=tuple((length, context - 1) for length, context in short.chunks),
    )
    if case.kind != "prefill":  # where a query would see nothing
        assert problem.error(problem.ours()) > problem.allowed
    assert problem.error(torch.full_like(problem.q, torch.nan)) > problem.allowed


def test_peers_that_fail_or_are_wrong_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(problem: Problem) -> Contender:
        raise RuntimeError("no such thing\nand more")

    def wrong(problem: Problem) -> Contender:
        return Contender(lambda: problem.q, lambda out: out)

    table: dict[str, Any] = {"fails": fails, "wrong": wrong, "cannot": lambda problem: None}
    monkeypatch.setattr(kernels, "PEERS", {**table, "sdpa": peers.sdpa})
    able, failures = kernels.contenders(
        Problem(DECODE, torch.float32, CPU), ["fails", "wrong", "cannot", "sdpa"]
    )
    assert list(able) == ["sdpa"]
    assert failures["fails"] == "no such thing"
    assert failures["wrong"].startswith("off by")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_work_counted_pair_by_pair(case: Case) -> None:
    shape = case.shape
    pairs = sum(
        key <= context - case.queries + query
        for context in case.contexts
        for query in range(case.queries)
        for key in range(context)
    )
    assert case.flop == 2 * 2 * shape.head_dim * shape.heads * pairs
    problem = Problem(case, torch.float32, CPU)
    if not case.beside:
        k, v = problem.dense
        assert k.dtype.itemsize == (4 if case.cache == "auto" else 1)
        assert case.moved(torch.float32) == k.nbytes + v.nbytes + 2 * problem.q.nbytes


def test_one_context_may_be_longer_than_the_others() -> None:
    problem = Problem(BESIDE, torch.float32, CPU)
    alone = [Problem(replace(BESIDE, batch=1, beside=0), torch.float32, CPU)]
    alone.append(Problem(Case("tiny", 1, 1, 70, 8), torch.float32, CPU))
    assert BESIDE.flop == 3 * alone[0].case.flop + alone[1].case.flop
    assert [len(own) for own in problem.blocks] == [3, 3, 3, 9]
    assert len(set(torch.cat(problem.blocks).tolist())) == 18
    problem.batch.context_lens[-1] -= 1
    assert problem.error(problem.ours()) > problem.allowed


def test_limits_are_those_of_copy_and_product() -> None:
    limits = kernels.Limits(CPU, torch.float32, tiny=True)
    fast, slow = 1e-9, 1.0
    bound = limits.of(DECODE, torch.float32, {"copy": slow, "product": fast})
    assert bound["bound"] == "bytes"
    assert bound["seconds"] == pytest.approx(DECODE.moved(torch.float32) / (2 * device.FEW_COPIED))
    bound = limits.of(DECODE, torch.float32, {"copy": fast, "product": slow})
    assert bound["bound"] == "flop"
    assert bound["seconds"] == pytest.approx(DECODE.flop / (2 * kernels.SHORT_SIDE**3))


def test_the_grid_has_every_model_and_the_decode_that_counts() -> None:
    cases = list(grid(quick=False))
    assert {case.model for case in cases} == set(SHAPES)
    for cache in ("auto", "fp8_e4m3"):
        kinds = {case.kind for case in cases if case.cache == cache}
        assert kinds == {"decode", "prefill", "chunk"}
    assert {case.cache for case in cases} == {"auto", *FORMATS}
    assert set(shapes.HEADLINES) <= set(cases)
    assert [str(case) for case in cases[:3]] == [
        "decode 64 × 4,096, 32/8×128, block 16, fp8_e4m3",
        "decode 1 × 131,072, 32/8×128, block 16, fp8_e4m3",
        "decode 63 × 1,024 and one of 131,072, 32/8×128, block 16, fp8_e4m3",
    ]
    assert Case(BASE, 64, 1, 4096, 16) == cases[3]
    assert len(set(cases)) == len(cases)


def test_a_case_too_large_for_the_gpu_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(kernels, "_fits", lambda case, *_: case.kind != "chunk")
    kernels.main([*TINY, "--peers", "--out", str(tmp_path)])
    result = json.loads((tmp_path / "kernels.json").read_text())
    assert len(result["left_out"]) == 2 and len(result["cases"]) == 8
    assert "left out, for want of memory: chunk" in capsys.readouterr().out


def test_room_counts_the_tensors() -> None:
    problem = Problem(DECODE, torch.float32, CPU)
    k, v = problem.dense
    layer = k.nbytes + v.nbytes
    assert DECODE.room(torch.float32) >= layer + shapes.LAYERS * layer
    eight = Problem(replace(DECODE, context=48, cache="fp8_e4m3"), torch.float32, CPU)
    assert eight.case.room(torch.float32) >= layer + eight.kv.nbytes
