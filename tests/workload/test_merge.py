"""Arrivals of several sources as one: what is drawn is enough, however wrong the first guess."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from pagedsim.core import ConfigError
from pagedsim.workload.merge import Source, merge


def every(gap: float, claimed: float, limit: int | None = None) -> Source:
    """A source with an arrival each `gap` seconds that claims to have `claimed` a second."""

    def times(count: int) -> NDArray[np.float64]:
        return gap * np.arange(1, count + 1, dtype=np.float64)

    return Source(times, claimed, limit=limit)


def test_a_source_that_said_too_little_is_asked_again() -> None:
    # A thousand times faster than it claims, so that its first draw ends long before the other.
    fast, slow = every(0.001, 1.0), every(1.0, 1.0)
    merged = merge([slow, fast], 5000, None)
    assert merged.counts == (4, 4996)
    assert merged.arrival[-1] == pytest.approx(4.996)
    assert merge([slow, fast], None, 3.0005).counts == (3, 3000)
    assert merge([every(0.001, 1.0)], None, 3.0005).counts == (3000,)


@given(
    st.lists(st.tuples(st.floats(0.01, 10), st.floats(0.01, 10)), min_size=1, max_size=4),
    st.integers(1, 300),
    st.one_of(st.none(), st.floats(0.5, 30)),
)
def test_the_merged_are_the_first_of_all(
    gaps: list[tuple[float, float]], requests: int, duration: float | None
) -> None:
    sources = [every(gap, claimed) for gap, claimed in gaps]
    first = np.sort(np.concatenate([source.times(requests) for source in sources]))[:requests]
    if duration is not None:
        first = first[first < duration]
    if not len(first):
        with pytest.raises(ConfigError, match="no request arrives in that time"):
            merge(sources, requests, duration)
        return
    merged = merge(sources, requests, duration)
    assert merged.arrival.tolist() == first.tolist()
    assert sum(merged.counts) == len(first)
    assert merged.join(merged.split()).tolist() == first.tolist()


def test_sources_that_end_are_enough() -> None:
    assert merge([every(1.0, 1.0, limit=3), every(2.0, 0.5, limit=2)], 100, None).counts == (3, 2)
