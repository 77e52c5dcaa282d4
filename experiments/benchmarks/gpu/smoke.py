"""A plugin of pytest: of each test for a GPU one case alone, in a minute or two.

    pytest -m gpu --noconftest -p experiments.benchmarks.gpu.smoke tests/kernels tests/engine

Which tests there are the tree says; of their cases it is the one in the middle, since the first is
often the smallest there can be. Left out are those that take seconds for themselves: marked
slow, of several GPUs, and of benchmarks.
"""

from __future__ import annotations

import pytest

LEFT_OUT = ("experiments", "parallel")
"""Folders under tests/."""


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """After -m has chosen: keep one case of each function."""
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    chosen = {own[len(own) // 2] for own in cases.values() if not _left_out(own[0])}
    kept = [item for item in items if item in chosen]
    others = [item for item in items if item not in chosen]
    items[:] = kept
    if others:
        config.hook.pytest_deselected(items=others)


def _left_out(item: pytest.Item) -> bool:
    folders = item.nodeid.partition("::")[0].split("/")  # from the root of the tree
    slow = item.get_closest_marker("slow") is not None
    return slow or any(name in folders for name in LEFT_OUT)
