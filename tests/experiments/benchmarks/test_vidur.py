"""The comparison with Vidur, with a stand-in for Vidur."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from experiments.benchmarks.simulator import run_vidur, vidur, vidur_words


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The files of Vidur that are read."""
    for name, text in {
        "vidur/main.py": "",
        "vidur/config/__init__.py": "class SimulationConfig:\n"
        "    seed = 1\n    create_from_cli_args = classmethod(lambda cls: cls())",
        "vidur/utils/random.py": "def set_seeds(seed): pass",
        "vidur/entities/__init__.py": "class Batch:\n    _id = 6",
        "vidur/simulator.py": "class Simulator:\n    _time = 2.5\n"
        "    def __init__(self, config): pass\n    def run(self): print('runs')",
        "data/profiling/README": "",
    }.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def test_bad_words_end_in_one_line(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, said in (
        (["--vidur", "nowhere"], "--vidur nowhere: no checkout of Vidur, it has no vidur/main.py"),
        (["--vidur", str(checkout)], "--python no/python: no such file"),
        (["--trace", "no.csv"], "argument --trace: no.csv: there is no such file"),
    ):
        rest = {"--vidur": "nowhere", "--python": "no/python", "--trace": __file__}
        more = [word for pair in rest.items() if pair[0] not in words for word in pair]
        with pytest.raises(SystemExit):
            vidur([*words, *more])
        assert said in capsys.readouterr().err


def test_its_simulation_is_timed(checkout: Path) -> None:
    words = vidur_words(Path("trace.csv"), ["--seed", "2"])
    assert words[-2:] == ["--seed", "2"] and "--no-metrics_config_store_plots" in words
    took, run = run_vidur(checkout, Path(sys.executable), words)
    assert took >= run.seconds >= 0 and run[1:] == (7, 2.5)
