"""A plugin of pytest: what has passed is kept, and left out of the next run.

    pytest -p experiments.benchmarks.gpu.record --record FILE.json ...

A test runs again when the code that it runs has changed. What failed, or was under way when
pytest was stopped, comes last.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from experiments.benchmarks.device import digest

BEGUN, PASSED = "begun", "passed"
LONGEST = 4000
"""Characters that are kept of what is said of a failure, its last ones."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Where the record is."""
    parser.addoption("--record", required=True, help="a .json, of what has passed")


def pytest_configure(config: pytest.Config) -> None:
    """Each process reads the record, and one of them writes it."""
    record = Record(Path(config.getoption("--record")), writes=not hasattr(config, "workerinput"))
    config.pluginmanager.register(record)


class Record:
    """What became of each test when it ran last."""

    def __init__(self, path: Path, writes: bool) -> None:
        self._path, self._writes = path, writes
        self.tests: dict[str, dict[str, Any]] = (
            json.loads(path.read_text()) if path.exists() else {}
        )

    @pytest.hookimpl(wrapper=True)
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> Iterator[None]:
        """After all others have chosen."""
        yield
        known = {item: self._known(item.nodeid) for item in items}
        done = [item for item, outcome in known.items() if outcome == PASSED]
        left = [item for item in items if known[item] != PASSED]
        items[:] = sorted(left, key=lambda item: known[item] is not None)
        if done:
            config.hook.pytest_deselected(items=done)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """It may be the last that is heard of it."""
        self._put(nodeid, outcome=BEGUN)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep how the test itself went, or what went wrong around it."""
        if report.when == "call" or not report.passed:
            said = {} if report.passed else {"said": report.longreprtext[-LONGEST:]}
            seconds = round(report.duration, 2)
            self._put(report.nodeid, outcome=report.outcome, seconds=seconds, **said)

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Where all has passed before, nothing was left to run."""
        if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and self.tests:
            session.exitstatus = pytest.ExitCode.OK

    def _known(self, nodeid: str) -> str | None:
        """How it went, with this code."""
        one = self.tests.get(nodeid, {})
        return one.get("outcome") if one.get("code") == _code(nodeid) else None

    def _put(self, nodeid: str, **found: Any) -> None:
        if self._writes:
            self.tests[nodeid] = {**found, "code": _code(nodeid)}
            part = self._path.with_suffix(".part")  # the record is whole at any moment
            part.write_text(json.dumps(self.tests, indent=1))
            part.replace(self._path)


def _code(nodeid: str) -> str:
    return digest(nodeid.partition("::")[0].removesuffix(".py").replace("/", "."))
