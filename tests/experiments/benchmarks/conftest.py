"""What the tests of benchmarks share."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _logging_comes_back() -> Iterator[None]:
    """A benchmark may silence the warnings of its process, in which other tests read them."""
    before = logging.root.manager.disable
    yield
    logging.disable(before)
