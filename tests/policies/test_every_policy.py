"""What holds for every policy that has a name, listed from the tree."""

from __future__ import annotations

import ast
from inspect import Parameter, signature
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from pagedsim.build import BATCHINGS, POLICIES, accepts, make_memory, make_policy, make_scheduler
from pagedsim.core import ConfigError, Policy, Request
from pagedsim.core.policy_validation import HOOKS
from pagedsim.spec.run import policy_of

ROOT = Path(__file__).parents[2]
CONF = ROOT / "conf" / "policy"

every_policy = pytest.mark.parametrize("name", POLICIES)


@every_policy
def test_a_policy_option_has_the_defaults_of_its_class(name: str) -> None:
    option: Any = OmegaConf.to_container(OmegaConf.load(CONF / f"{name}.yaml"))
    kind = POLICIES[name]
    assert option.pop("_target_") == f"{kind.__module__}.{kind.__name__}"
    assert option.pop("victim") is None
    defaults = {
        key: parameter.default
        for key, parameter in signature(kind).parameters.items()
        if parameter.kind is not Parameter.VAR_KEYWORD
    }
    assert option == {**defaults, **({"of": "fcfs"} if "of" in defaults else {})}
    assert isinstance(policy_of({"_target_": f"{kind.__module__}.{kind.__name__}"}), kind)


@pytest.mark.parametrize("hook", HOOKS)
def test_a_hook_has_two_users_or_a_reason(hook: str) -> None:
    trees = [ast.parse(path.read_text()) for path in (ROOT / "policies").glob("*.py")]
    users = [
        node.name
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        and any(isinstance(one, ast.FunctionDef) and one.name == hook for one in node.body)
    ]
    page = (ROOT / "docs/decisions/core.md").read_text(encoding="utf-8")
    reasons = page.partition("## Hooks with one user")[2].partition("\n## ")[0]
    assert (len(users) >= 2) != (f"- `{hook}`: " in reasons), users


AROUND = [name for name, kind in POLICIES.items() if accepts(kind, "of")]
"""Those that stand around another."""


@every_policy
@pytest.mark.parametrize("batching", BATCHINGS)
def test_it_serves_all_or_refuses_at_the_start(name: str, batching: str) -> None:
    serve_or_refuse(make_policy(name), batching)


@pytest.mark.parametrize(("outer", "inner"), list(product(AROUND, POLICIES)))
def test_a_wrapper_accepts_every_policy(outer: str, inner: str) -> None:
    serve_or_refuse(make_policy(outer, of=inner), "unified")


def serve_or_refuse(policy: Policy, batching: str) -> None:
    memory = make_memory("prefix", blocks=16, block_size=4, cpu_blocks=8)
    try:
        scheduler = make_scheduler(
            memory=memory, policy=policy, batching=batching, preemption="swap", max_seqs=4
        )
    except ConfigError as error:
        assert "\n" not in str(error)
        return
    for number in range(12):
        scheduler.add(
            Request(
                number,
                list(range(3 + number % 5)),
                priority=number % 2,
                client="abc"[number % 3],
                predicted_len=1.0 + number % 4,
                deadline=50.0,
                session=str(number % 2),
                turn=1 + number // 2,
            ),
            now=0.0,
            output_len=1 + number % 7,
        )
    now, ended = 0.0, 0
    while scheduler.unfinished:
        plan, now = scheduler.plan(now), now + 1
        ended += len(scheduler.commit(plan, now))
        scheduler.check()
        assert now < 500
    assert ended == 12


def test_a_wrapper_accepts_a_policy_or_its_name() -> None:
    inner = make_policy("srpt", displace=False)
    for of in ("srpt", inner, "pagedsim.policies.ordering.SRPT"):
        made: Any = make_policy("aging", of=of)
        assert type(made.inner) is type(inner)
