"""What travels to experts and back takes as long as DeepEP's authors measured."""

import pytest

from experiments.fidelity.all_to_all import PUBLISHED, main, simulated


@pytest.mark.parametrize("gpus", PUBLISHED)
def test_travelling_takes_what_was_published(gpus: int) -> None:
    assert simulated(gpus) == pytest.approx(sum(PUBLISHED[gpus]), rel=0.05)


def test_the_table_has_a_row_for_each(capsys: pytest.CaptureFixture[str]) -> None:
    main()
    rows = capsys.readouterr().out.splitlines()
    assert [int(row.split()[0]) for row in rows[1:]] == list(PUBLISHED)
    assert rows[1].split() == ["8", "191", "187", "-2.3", "%"]
