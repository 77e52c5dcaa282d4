"""What benchmarks time is no zeros, and what they leave is whole and says how it was measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from experiments.benchmarks import results, swap  # noqa: E402
from experiments.benchmarks.device import Copy, facts, noise  # noqa: E402
from pagedsim.engine.mover import Mover  # noqa: E402

CPU = torch.device("cpu")
LINE = {"device": "d", "code": "c", "tiles": "t", "dtype": "x", "rounds": 3, "quick": True}


def packs(content: Any) -> bool:
    """Whether half of its bytes are one value, as zeros are."""
    return int(content.flatten().view(torch.uint8).bincount().max()) > content.nbytes // 2


def test_what_is_copied_is_of_all_kinds() -> None:
    bytes_of_all_kinds = noise(2**16, CPU)
    assert len(bytes_of_all_kinds) == 2**16 and len(bytes_of_all_kinds.unique()) == 256
    assert not packs(Copy(CPU, tiny=True)._here) and packs(torch.zeros(2**16))


def test_what_is_swapped_is_of_all_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    move = Mover.move

    def looked_at(self: Mover, *given: object) -> None:
        seen[:] = [packs(self.cache.gpu), packs(self.cache.cpu)]
        move(self, *given)  # type: ignore[arg-type]

    monkeypatch.setattr(Mover, "move", looked_at)
    one = next(iter(swap.swaps(quick=True)))
    assert swap.measure(one, torch.bfloat16, CPU, swap.LITTLE, 1)["right"]
    assert seen == [False, False]


def test_facts_say_what_a_number_means() -> None:
    told = facts(CPU, "experiments.benchmarks.swap", ["--rounds", "3", "--out", "/some/where"])
    assert told["command"] == "python -m experiments.benchmarks.swap --rounds 3"
    assert told["code"] and told["tiles"] == "default"
    assert {"device", "driver", "torch", "triton", "date"} <= set(told)


def test_lines_that_were_measured_the_same_way_are_taken_over(tmp_path: Path) -> None:
    assert results.before(tmp_path, "a", LINE, "lines") == []
    results.keep(tmp_path, "a", {**LINE, "lines": [{"case": 1}]})
    assert results.before(tmp_path, "a", LINE, "lines") == [{"case": 1}]
    for key in results.SAME:
        assert results.before(tmp_path, "a", {**LINE, key: "other"}, "lines") == []
    assert results.before(None, "a", LINE, "lines") == []
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]
