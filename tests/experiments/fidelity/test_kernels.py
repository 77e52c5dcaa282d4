"""What commands say of tables of kernels: leave-one-out errors, and transfers to experts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pagedsim.experiments.fidelity import families, kernels
from pagedsim.experiments.fidelity.kernels import left_out
from pagedsim.fidelity.sheets import hardware_named, model_named
from tests.experiments.fidelity import all_to_all


def test_a_point_is_predicted_by_its_neighbours_of_the_same_shape() -> None:
    sizes = np.array([1.0, 4.0, 16.0, 64.0, 1.0, 4.0, 16.0, 64.0])
    shape = np.array([1.0] * 4 + [2.0] * 4)
    columns = {"m": sizes, "n": shape, "latency": shape * sizes**0.5}
    assert left_out(columns, "m") == pytest.approx(np.zeros(4))
    columns["latency"][5] *= 1.25
    # That point by a fifth, and the next by half of the excess, in logarithms.
    errors = left_out(columns, "m").tolist()
    assert errors == pytest.approx([0, 0, 0.2, 1.25**0.5 - 1])
    assert left_out(columns, "n").tolist() == []


def test_lines_may_be_straight() -> None:
    columns = {"step": np.array([2.0, 4.0, 16.0]), "latency": np.array([5.0, 7.0, 19.0])}
    columns["heads"] = np.ones(3)
    assert left_out(columns, "step", straight=True) == pytest.approx([0.0])
    assert left_out(columns, "step") > 0.01


def test_transfers_to_experts_are_held_against_what_was_published_and_tables(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A table whose times are four fifths of those simulated, and a row of experts that are there
    twice."""
    model, h100 = model_named("deepseek-v3"), hardware_named("h100")
    shape = {"hidden_size": model.hidden, "num_topk": 8, "num_experts": 256}
    rows = [
        {**shape, "node_num": nodes, "num_token": tokens, "dispatch_avg_t_us": "0.0"}
        | {"combine_avg_t_us": 0.8 * all_to_all.simulated(h100, model, 8 * nodes, tokens)}
        for nodes in (1, 2)
        for tokens in (1, 64, 4096)
    ]
    rows.append({**rows[-1], "node_num": 8, "num_experts": 288})
    place = tmp_path / "h100_sxm" / "comm" / "sglang" / "0.5.12"
    place.mkdir(parents=True)
    pq.write_table(pa.Table.from_pylist(rows), place / "wideep_deepep_ll_perf.parquet")
    all_to_all.main([str(tmp_path)])
    published, measured = capsys.readouterr().out.split("\n\n")
    assert [int(line.split()[1]) for line in published.splitlines()[2:]] == [*all_to_all.PUBLISHED]
    assert measured.splitlines()[2:] == [
        f"| h100 | 0.5.12 | {nodes} | 3 | 25.0 % | +25.0 % |" for nodes in (1, 2)
    ]


@pytest.mark.parametrize("main", [all_to_all.main, families.main, kernels.main])
def test_a_folder_without_tables_is_one_line(
    main: Callable[[list[str]], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([str(tmp_path)])
    out, err = capsys.readouterr()
    assert not out and f"{tmp_path}: has no <GPU>/" in err.splitlines()[-1]
