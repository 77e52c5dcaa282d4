"""What holds for every router that has a name: its option and answers, in fleets, and the page."""

from __future__ import annotations

import ast
import re
from dataclasses import replace
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from pagedsim.build import ROUTERS, make_router
from pagedsim.core import ConfigError, Request
from pagedsim.policies.routing.router import Refusal, Router
from pagedsim.spec.objects import make, seeded
from tests.policies.routing.fakes import Fake, Fleet, fleet, named

ROOT = Path(__file__).parents[3]
CONF = ROOT / "conf" / "router"
PAGE = (ROOT / "docs" / "routing.md").read_text(encoding="utf-8")
FILES = sorted((ROOT / "policies" / "routing").glob("*.py"))

every_router = pytest.mark.parametrize("name", ROUTERS)


def option(name: str) -> Any:
    return OmegaConf.to_container(OmegaConf.load(CONF / f"{name}.yaml"))


def seeded_router(settings: Any, seed: int) -> Router:
    return make("router", seeded("router", settings, seed), Router)


def defined() -> set[str]:
    """The classes of the tree that answer `route`."""
    return {
        node.name
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef)
        and any(isinstance(one, ast.FunctionDef) and one.name == "route" for one in node.body)
    }


def test_every_router_of_the_tree_has_a_name() -> None:
    assert {kind.__name__ for kind in ROUTERS.values()} == defined() - {"Router"}


@every_router
def test_a_router_option_has_the_defaults_of_its_class(name: str) -> None:
    said, kind = option(name), ROUTERS[name]
    assert said.pop("_target_") == f"{kind.__module__}.{kind.__name__}"
    assert said == {key: one.default for key, one in signature(kind).parameters.items()}
    lines = (CONF / f"{name}.yaml").read_text(encoding="utf-8").splitlines()
    assert re.match(r"# [A-Z].*\.$", lines[0]), lines[0]
    assert [line for line in lines[2:] if "# " not in line] == []


@every_router
def test_it_stands_on_the_page(name: str) -> None:
    assert re.search(rf"^\|[^|]*`{name}`", PAGE, re.MULTILINE)


# -- answers ---------------------------------------------------------------------------------------


def requests(count: int) -> list[Request]:
    """Some that share beginnings, with sessions of clients."""
    return [
        Request(n, [n % 5 * 1000 + at for at in range(200 + 30 * (n % 7))], client=f"c{n % 9}")
        for n in range(count)
    ]


def unlike() -> Fleet:
    """Of other sizes, speeds and numbers than their places."""
    return Fleet(
        [
            Fake(3, total_blocks=50, free_blocks=50, speed=0.5, max_seqs=4),
            Fake(5, block_size=32, speed=2.0),
            Fake(8, total_blocks=4000, free_blocks=4000, max_batched_tokens=64),
        ]
    )


def answers(router: Router, there: Fleet, count: int = 60, dies: int | None = None) -> list[int]:
    """The replicas named while requests pile up and leave, each one of `there`."""
    found = []
    for number, request in enumerate(requests(count)):
        if number == dies:
            there = replace(there, fakes=there.fakes[1:])
        answer = router.route(request, there, now=number * 0.1)
        assert not isinstance(answer, Refusal)
        assert isinstance(answer, Fake) and answer in there.fakes
        found.append(answer.index)
        answer.waiting, answer.owed_tokens = answer.waiting + 1, answer.owed_tokens + 200
        answer.free_blocks -= 2
        if number % 3 == 2:
            for one in there.fakes:
                one.waiting = one.owed_tokens = 0
    return found


@every_router
def test_it_never_names_a_dead_replica(name: str) -> None:
    found = answers(make_router(name), unlike(), dies=30)
    assert 3 not in found[30:]


@every_router
def test_routing_is_reproducible_by_seed(name: str) -> None:
    first, again, other = (
        answers(seeded_router(option(name), seed), fleet({}, {}, {}, {})) for seed in (0, 0, 1)
    )
    assert first == again
    assert (first != other) is (name in DRAWS)


DRAWS = {"random", "power_of_two", "llm_d", "dynamo", "lmetric"}
"""Those that draw, among all or among equals."""


def test_those_that_draw_have_a_seed() -> None:
    assert {name for name in ROUTERS if "seed" in option(name)} == DRAWS


# -- settings --------------------------------------------------------------------------------------


def bad(value: Any) -> Any:
    """What no setting of that kind may be."""
    return {bool: 7}.get(type(value), "many" if not isinstance(value, str) else 7)


@pytest.mark.parametrize(
    ("name", "key"),
    [(name, key) for name in ROUTERS for key in option(name) if key != "_target_"],
)
def test_a_bad_setting_is_one_line(name: str, key: str) -> None:
    settings = option(name)
    settings[key] = bad(settings[key])
    with pytest.raises(ConfigError) as error:
        seeded_router(settings, 0)
    text = str(error.value)
    assert text.startswith(
        f"router.{key}={settings[key]!r}".replace("'7'", "7")
    ) or text.startswith(f"router.{key}={settings[key]}:"), text
    assert "\n" not in text


def test_a_custom_router_is_made_from_its_path() -> None:
    path = "pagedsim.policies.routing.simple.Central"
    assert isinstance(make_router(path, slots=2), ROUTERS["central"])
    made = make_router("central")
    assert make_router(made) is made


# The router that docs/routing.md shows


def shown() -> str:
    """The router of the section that promises ten lines."""
    marked = re.search(r"<!-- test:router -->\n```python\n(.*?)^```", PAGE, re.DOTALL | re.M)
    assert marked, "the page shows a router after the marker test:router"
    return marked[1]


def router() -> Router:
    names: dict[str, Any] = {}
    exec(compile(shown(), "routing.md", "exec"), names)
    made = names["ByLength"]()
    assert isinstance(made, Router)
    return made


def test_it_takes_ten_lines() -> None:
    assert len([line for line in shown().splitlines() if line.strip()]) <= 10


def test_it_sends_long_prompts_here_and_short_ones_there() -> None:
    there = fleet({"running": 2}, {"running": 1}, {"running": 1}, {})
    assert named(router(), there, 1000) == 1
    assert named(router(), there, 999) == 3
    assert named(router(), fleet({}), 1000) == 0
