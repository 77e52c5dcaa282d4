"""A plugin of pytest for a machine that lasts minutes.

    pytest -m gpu --noconftest -p pagedsim.experiments.benchmarks.gpu_plugin --one-case tests
    pytest -p pagedsim.experiments.benchmarks.gpu_plugin --record FILE.json ...

`--one-case` runs one case of each test, the middle one, since the first is often the smallest. It
leaves out slow tests, tests of several GPUs, and those of benchmarks.

`--record` keeps the outcome of each test, and leaves out those that passed with the same code.
Tests that failed, or were running when pytest was stopped, come last.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from pagedsim.experiments.benchmarks.harness import digest

BEGUN, PASSED = "begun", "passed"
LONGEST = 4000
"""Characters kept of the report of a failure, its last ones."""
LEFT_OUT = ("experiments", "parallel")
"""Folders under tests/ without a smoke test."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add both options."""
    parser.addoption("--one-case", action="store_true", help="one case of each test")
    parser.addoption("--record", help="a .json of what has passed")


def pytest_configure(config: pytest.Config) -> None:
    """Read the record in each process; one of them writes it."""
    if (path := config.getoption("--record")) is not None:
        record = Record(Path(path), writes=not hasattr(config, "workerinput"))
        config.pluginmanager.register(record)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep one case of each test, after -m has chosen."""
    if config.getoption("--one-case"):
        cases: dict[str, list[pytest.Item]] = {}
        for item in items:
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
        chosen = {own[len(own) // 2] for own in cases.values() if not _left_out(own[0])}
        keep_items(config, items, [item for item in items if item in chosen])


def _left_out(item: pytest.Item) -> bool:
    folders = item.nodeid.partition("::")[0].split("/")  # from the root of the tree
    slow = item.get_closest_marker("slow") is not None
    return slow or any(name in folders for name in LEFT_OUT)


def keep_items(
    config: pytest.Config, items: list[pytest.Item], kept: Sequence[pytest.Item]
) -> None:
    """Deselect all other items."""
    among = set(kept)
    if others := [item for item in items if item not in among]:
        config.hook.pytest_deselected(items=others)
    items[:] = kept


class Record:
    """The last outcome of each test."""

    def __init__(self, path: Path, writes: bool) -> None:
        self._path, self._writes = path, writes
        self.tests: dict[str, dict[str, Any]] = (
            json.loads(path.read_text()) if path.exists() else {}
        )

    @pytest.hookimpl(wrapper=True)
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> Iterator[None]:
        """Leave out tests that passed, after all other hooks."""
        yield
        known = {item: self._known(item.nodeid) for item in items}
        left = [item for item in items if known[item] != PASSED]
        keep_items(config, items, sorted(left, key=lambda item: known[item] is not None))

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Note that a test runs, in case pytest is stopped in it."""
        self._put(nodeid, outcome=BEGUN)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep the outcome of a test, or of its setup or teardown if that failed."""
        if report.when == "call" or not report.passed:
            said = {} if report.passed else {"said": report.longreprtext[-LONGEST:]}
            seconds = round(report.duration, 2)
            self._put(report.nodeid, outcome=report.outcome, seconds=seconds, **said)

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Succeed where all tests have passed before."""
        if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and self.tests:
            session.exitstatus = pytest.ExitCode.OK

    def _known(self, nodeid: str) -> str | None:
        """The outcome with this code."""
        one = self.tests.get(nodeid, {})
        return one.get("outcome") if one.get("code") == _code(nodeid) else None

    def _put(self, nodeid: str, **found: Any) -> None:
        if self._writes:
            self.tests[nodeid] = {**found, "code": _code(nodeid)}
            part = self._path.with_suffix(".part")  # the record is complete at any moment
            part.write_text(json.dumps(self.tests, indent=1))
            part.replace(self._path)


def _code(nodeid: str) -> str:
    return digest(nodeid.partition("::")[0].removesuffix(".py").replace("/", "."))
