"""Non-negative least squares against trying every set of coefficients that may be above 0."""

from itertools import combinations

import numpy as np
import pytest

from pagedsim.sim.cost.fitting import Matrix, nnls


def brute_force(a: Matrix, b: Matrix) -> float:
    """The smallest |a·x − b| of all x ≥ 0."""
    best = float(np.linalg.norm(b))
    columns = range(a.shape[1])
    for size in range(1, a.shape[1] + 1):
        for chosen in combinations(columns, size):
            part = a[:, list(chosen)]
            x = np.linalg.lstsq(part, b, rcond=None)[0]
            if (x >= 0).all():
                best = min(best, float(np.linalg.norm(part @ x - b)))
    return best


@pytest.mark.parametrize("seed", range(200))
def test_nnls_finds_the_best_of_all_sets(seed: int) -> None:
    random = np.random.default_rng(seed)
    rows, columns = int(random.integers(1, 12)), int(random.integers(1, 7))
    a = random.normal(size=(rows, columns)) * 10.0 ** random.integers(-6, 7, size=columns)
    b = random.normal(size=rows)
    x = nnls(a, b)
    assert (x >= 0).all()
    assert np.linalg.norm(a @ x - b) <= brute_force(a, b) * (1 + 1e-9) + 1e-9


def test_an_exact_solution_is_found_over_many_powers_of_ten() -> None:
    random = np.random.default_rng(0)
    a = random.uniform(1, 2, (30, 4)) * [1.0, 1e3, 1e6, 1e9]
    x = np.array([1e-2, 0.0, 3e-8, 2e-11])
    assert nnls(a, a @ x) == pytest.approx(x, abs=1e-15)


def test_columns_that_are_alike_or_empty_do_no_harm() -> None:
    a = np.array([[1.0, 1.0, 0.0], [2.0, 2.0, 0.0], [3.0, 3.0, 0.0]])
    b = np.array([2.0, 4.0, 6.0])
    x = nnls(a, b)
    assert (x >= 0).all()
    assert a @ x == pytest.approx(b)
    assert nnls(a, -b) == pytest.approx(np.zeros(3))
