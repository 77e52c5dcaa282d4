"""The leave-one-out errors of tables of kernels."""

from __future__ import annotations

import numpy as np
import pytest

from pagedsim.experiments.fidelity.kernels import left_out


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
