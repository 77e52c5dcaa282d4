"""A plugin of pytest: of each test for a GPU the first case alone, in a minute or two.

    pytest -m gpu --noconftest -p experiments.benchmarks.gpu.smoke tests/kernels tests/engine

Which tests there are the tree says. Left out are those that take seconds for themselves: marked
slow, of several GPUs, and of benchmarks.
"""

from __future__ import annotations

import pytest

LEFT_OUT = ("experiments", "parallel")
"""Folders under tests/."""


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """After -m has chosen: keep the first case of each function."""
    seen = set[str]()
    kept: list[pytest.Item] = []
    others: list[pytest.Item] = []
    for item in items:
        function = item.nodeid.partition("[")[0]
        chosen = function not in seen and not _left_out(item)
        seen.add(function)
        (kept if chosen else others).append(item)
    items[:] = kept
    if others:
        config.hook.pytest_deselected(items=others)


def _left_out(item: pytest.Item) -> bool:
    return item.get_closest_marker("slow") is not None or any(
        part in item.path.parts for part in LEFT_OUT
    )
