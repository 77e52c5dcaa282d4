"""Whether the package is compiled, and that a user's classes do not mind."""

import hashlib
import re
from importlib.machinery import EXTENSION_SUFFIXES
from inspect import isabstract
from pathlib import Path
from typing import Any

import pytest

from pagedsim.core import Batching, Memory, PagedMemory, Request, Unified
from pagedsim.core.memory import PrefixMemory
from pagedsim.run.provenance import LISTED, TO_COMPILE, built
from pagedsim.sglang import RadixMemory, SGLang
from pagedsim.sim.cost import CostModel, Roofline
from pagedsim.sim.environment import Environment

ROOT = Path(__file__).parents[1]
SOURCE = "pagedsim/core/one.py"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """An installation of which one module is compiled."""
    file = tmp_path / SOURCE
    file.parent.mkdir(parents=True)
    file.write_text("ONE = 1\n")
    file.with_name("one" + EXTENSION_SUFFIXES[0]).touch()
    (tmp_path / LISTED).write_text(f"{hashlib.sha256(file.read_bytes()).hexdigest()} {SOURCE}\n")
    return tmp_path


def test_an_installation_says_that_it_is_compiled(root: Path) -> None:
    assert built(root) == "compiled"


def test_without_extensions_it_is_interpreted_and_says_what_compiles(root: Path) -> None:
    (root / LISTED).unlink()
    (root / "pagedsim/core" / f"one{EXTENSION_SUFFIXES[0]}").unlink()
    assert built(root) == f"interpreted ({TO_COMPILE})"


def test_a_source_that_was_changed_since_is_named(root: Path) -> None:
    (root / SOURCE).write_text("ONE = 2\n")
    assert built(root).startswith(f"not what was installed: {SOURCE} has changed since")


def test_an_extension_that_is_gone_is_named(root: Path) -> None:
    (root / "pagedsim/core" / f"one{EXTENSION_SUFFIXES[0]}").unlink()
    assert built(root).startswith(f"not what was installed: {SOURCE} is compiled no longer")


def test_stray_extensions_are_reported(root: Path) -> None:
    (root / LISTED).unlink()
    assert built(root).startswith("not what was installed: has extensions that no install made")


def test_what_compiles_is_what_checks_types() -> None:
    needed = re.findall(r"mypy==[0-9.]+", (ROOT / "hatch_build.py").read_text())
    assert needed == re.findall(r"^mypy==[0-9.]+$", (ROOT / "constraints.txt").read_text(), re.M)


class Few(PagedMemory):
    """A memory of a user's."""

    can_swap = False


class Eager(Unified):
    """A batching of a user's."""

    joins_midway = False


def test_classes_of_a_user_derive_from_ours() -> None:
    few, prefix = Few(8, 4), PrefixMemory(8, 4)
    for _ in range(2):  # the second time an ABC answers from memory
        found = [isinstance(one, PagedMemory) for one in (few, prefix)]
        found += [isinstance(one, PrefixMemory) for one in (few, prefix)]
        found += [issubclass(Roofline, kind) for kind in (CostModel, Memory)]
        found += [isinstance(few, RadixMemory), isinstance(Eager(), SGLang)]
        found += [isinstance(few, Memory), isinstance(Eager(), Batching)]
        assert found == [True, True, False, True, True, False, False, False, True, True]
    assert not few.can_swap and prefix.can_swap and not Eager().joins_midway


def test_what_is_abstract_says_so() -> None:
    assert isabstract(Memory) and isabstract(Batching) and isabstract(CostModel)
    assert not isabstract(Few) and not isabstract(Unified) and not isabstract(Roofline)
    assert CostModel.__abstractmethods__ == {"step_seconds"}
    assert Memory.__abstractmethods__ == {"free", "admit", "extend", "release"}
    assert Batching.__abstractmethods__ == {"compose"}


def test_what_a_user_s_class_lacks_is_named() -> None:
    half: Any = type("Half", (Memory,), {"admit": PagedMemory.admit, "free": 1})
    assert isabstract(half) and half.__abstractmethods__ == {"extend", "release"}
    with pytest.raises(TypeError, match="abstract"):
        half(8, 4).release(Request("a", 1))
    assert isabstract(type("Free", (CostModel,), {}))


def test_the_environment_may_be_subclassed() -> None:
    assert type("Paced", (Environment,), {})().now == 0
