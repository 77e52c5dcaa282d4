"""Names under which benchmarks of a device import parts of the harness."""

from __future__ import annotations

from typing import Any

from experiments.benchmarks import harness
from experiments.benchmarks.harness import non_negative_int as at_least_zero
from experiments.benchmarks.harness import positive_float as above_zero
from experiments.benchmarks.harness import positive_int as at_least_one
from experiments.benchmarks.harness import positive_ints as each_at_least_one

__all__ = ["Parser", "above_zero", "at_least_one", "at_least_zero", "each_at_least_one"]


class Parser(harness.Parser):
    """A parser with argparse's arguments."""

    def __init__(self, description: str | None, formatter_class: Any = None) -> None:
        super().__init__(description)
