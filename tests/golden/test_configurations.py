"""Every experiment, its arms and every option resolve to the configurations on record."""

import pytest

from tests.golden.configurations import FOLDER, texts


@pytest.mark.slow
def test_resolved_configurations_are_those_on_record() -> None:
    """`python -m tests.golden.configurations` writes them anew, for a change that is meant."""
    composed = dict(texts())
    recorded = {path.name: path.read_text(encoding="utf-8") for path in FOLDER.glob("*.txt")}
    assert sorted(composed) == sorted(recorded)
    for name, text in composed.items():
        assert text == recorded[name], f"tests/golden/{name}"
