"""What `python -m tests.mutants` counts as caught, and what it says of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mutants import Mutant, Source, verdict

MODULE = "def answer() -> int:\n    return 41\n"
TEST = "from module import answer\n\n\ndef test_it():\n    assert answer() > 40\n"


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        ("42", "survived"),
        ("0", "caught  "),
        ("__import__('os').abort()", "caught (SIGABRT)"),
        ("len(bytes(2**28))", "caught (memory limit)"),
        ("__import__('time').sleep(60)", "caught (time limit)"),
    ],
)
def test_verdicts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str, found: str) -> None:
    monkeypatch.setattr("tests.mutants.ROOT", tmp_path)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    (tmp_path / "module.py").write_text(MODULE)
    (tmp_path / "test_module.py").write_text(TEST)
    begin = MODULE.index("41")
    mutant = Mutant(Path("module.py"), 2, begin, begin + 2, answer.encode())
    seconds = 0.5 if "sleep" in answer else 60
    assert str(verdict(mutant, tmp_path, ["test_module.py"], seconds, memory=0.25)) == found
    assert (tmp_path / "module.py").read_text() == MODULE


def test_mutants_of_a_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.mutants.ROOT", tmp_path)
    text = 'def at(a: int = 1) -> bool:\n    """2 < 3"""\n    print(a)\n    return a < 5\n'
    (tmp_path / "module.py").write_text(text)
    found = sorted(str(mutant) for mutant in Source(Path("module.py")).mutants())
    assert found == [
        "module.py:3: print(a) -> None",
        "module.py:4: 5 -> (5 + 1)",
        "module.py:4: a < 5 -> a >= 5",
    ]
