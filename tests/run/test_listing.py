"""Every experiment in conf/ says which backends serve it, and is refused with that on another."""

from __future__ import annotations

import pytest

from pagedsim.run.help import Experiment, experiments
from tests.conftest import Call

EVERY = experiments()
ONE_SIDED = [one for one in EVERY if len(one.backends) == 1]


@pytest.mark.parametrize("one", EVERY, ids=lambda one: one.name)
def test_each_has_a_title_and_known_backends(one: Experiment) -> None:
    assert one.title or one.name in ("parity",)
    assert set(one.backends) <= {"sim", "engine", "http"} and one.backends
    assert bool(one.why) == (len(one.backends) == 1)


@pytest.mark.parametrize("one", ONE_SIDED, ids=lambda one: one.name)
def test_on_another_backend_it_is_refused_with_what_it_takes(one: Experiment, call: Call) -> None:
    (takes,) = one.backends
    other = "engine" if takes == "sim" else "sim"
    code, out, errors = call(f"experiment={one.name}", f"backend={other}", "tracking=none")
    assert (code, out) == (1, "")
    assert errors == (
        f"pagedsim: backend={other}: experiment={one.name} takes backend={takes}: {one.why}\n"
    )


def test_the_manual_page_lists_each_with_its_backends(call: Call) -> None:
    _, page, _ = call("--help")
    lines = page.split("\nEXPERIMENTS", 1)[1].split("\nSETTINGS", 1)[0].splitlines()
    told = {line.split()[0]: line for line in lines if line.startswith("  ") and line[2] != " "}
    assert list(told) == [one.name for one in EVERY]
    for one in EVERY:
        assert ", ".join(one.backends) in told[one.name]
