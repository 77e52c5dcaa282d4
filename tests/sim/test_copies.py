"""Times of copies between GPU and host: as measured where measured, and sane between."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedsim.sim.copies import GB_S, KIB, LAUNCH, PIECES, WHOLE, By, CopyTimes, Lane, dma_rate
from tests.experiments.fidelity.kv_copies import A30, TOGETHER, ratio, together

BUS = 51.2e9  # of PCIe 5 x16, 80 % of 64 GB/s
CELLS = [
    (piece, count, rate)
    for piece, row in GB_S.items()
    for count, rate in zip(PIECES, row, strict=True)
]


@pytest.mark.parametrize(("piece", "pieces", "rate"), CELLS)
def test_rates_are_those_measured(piece: int, pieces: int, rate: float) -> None:
    assert dma_rate(piece, pieces, 1e12) == pytest.approx(rate * 1e9)
    assert dma_rate(piece, pieces, BUS) == pytest.approx(min(rate * 1e9, BUS))


@given(st.floats(1.0, 4.0 * WHOLE), st.integers(1, 10**6), st.sampled_from([12.8e9, BUS, 360e9]))
def test_no_batch_is_faster_than_the_bus_or_slower_than_the_slowest(
    piece: float, pieces: int, bus: float
) -> None:
    assert min(3.8e9, bus) * 0.999 <= dma_rate(piece, pieces, bus) <= bus


@given(st.integers(1, 400_000), st.sampled_from([4, 16, 28, 64, 300, 2048, 5000]))
def test_more_pieces_take_longer(pieces: int, kib: int) -> None:
    times = CopyTimes(kib * KIB, 1, BUS)
    for by in LAUNCH:
        assert LAUNCH[by] < times.seconds(pieces, by) < times.seconds(pieces + 1, by)


def test_small_pieces_are_loaded_by_a_kernel_if_there_are_enough() -> None:
    small, large = CopyTimes(8 * KIB, 4, BUS), CopyTimes(32 * KIB, 4, BUS)
    assert [small.load_by(blocks) for blocks in (1, 3, 4)] == ["dma", "dma", "kernel"]
    assert large.load_by(1000) == "dma"


@pytest.mark.parametrize(("kib", "pieces"), [(kib, n) for kib, row in A30.items() for n in row])
def test_ratio_to_a_kernel_on_pcie_4(kib: int, pieces: int) -> None:
    assert ratio(kib, pieces) == pytest.approx(A30[kib][pieces], rel=0.35)


@pytest.mark.parametrize("by", TOGETHER)
def test_both_directions_at_once(by: By) -> None:
    assert together(by) == pytest.approx(TOGETHER[by], rel=0.05)


def test_copies_of_one_direction_follow_one_another() -> None:
    lane, idle = Lane(), Lane()
    assert lane.submit(1.0, 2.0, "dma", idle) == 3.0
    assert lane.submit(1.5, 2.0, "dma", idle) == 5.0
    assert lane.submit(9.0, 2.0, "dma", idle) == 11.0
    assert idle.until == 0.0
