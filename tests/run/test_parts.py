"""Objects from a configuration: limits by default, and messages of failures."""

from __future__ import annotations

from fractions import Fraction

import pytest

from pagedsim.core import ConfigError, Policy, PolicyWrapper
from pagedsim.run.job import failure_of
from pagedsim.run.parts import Parts, build
from pagedsim.spec.objects import make, said_of
from tests.run.studies import settings_of


def parts(*overrides: str) -> Parts:
    return build(settings_of("experiment=single", "workload.requests=5", *overrides), seed=0)


@pytest.mark.parametrize("memory", ["paged", "reserved_max", "reserved_pow2"])
def test_the_longest_request_leaves_room_for_its_own_activations(memory: str) -> None:
    """A step of 131,072 tokens takes so much of an A10 that no such request fits beside it."""
    made = parts("model=llama-3.1-8b", "hardware=a10", f"memory={memory}")
    longest = made.run.scheduler.max_model_len
    assert 1024 < longest < 131_072
    assert made.run.scheduler.memory.longest >= longest
    assert made.run.scheduler.max_batched_tokens >= longest


def test_a_cpu_pool_only_where_something_swaps() -> None:
    assert parts().run.scheduler.memory.cpu_total == 0
    block = 16 * 2 * 32 * 4096 * 2  # tokens, keys and values, layers, hidden, bytes
    assert parts("preemption=swap").run.scheduler.memory.cpu_total == 4 * 2**30 // block
    assert parts("preemption=swap", "memory.cpu_blocks=7").run.scheduler.memory.cpu_total == 7


# -- policies around others ------------------------------------------------------------------------

AGING = "pagedsim.policies.aging.Aging"


def named(policy: Policy) -> list[str]:
    """What stands around what."""
    inside = named(policy.inner) if isinstance(policy, PolicyWrapper) else []
    return [type(policy).__name__, *inside]


@pytest.mark.parametrize(
    ("of", "names"),
    [
        ("sjf", ["Aging", "SJF"]),
        ("{_target_: pagedsim.policies.ordering.SJF}", ["Aging", "SJF"]),
        (f"{{_target_: {AGING}, of: {{_target_: {AGING}, of: sjf}}}}", ["Aging"] * 3 + ["SJF"]),
    ],
)
def test_a_policy_stands_around_another_to_any_depth(of: str, names: list[str]) -> None:
    made = parts("policy=aging", f"policy.of={of}", "predictor=oracle")
    assert named(made.run.scheduler.policy) == names


# -- objects ---------------------------------------------------------------------------------------


class Nested(Policy):
    def __init__(self, inner: object, many: list[object]) -> None:
        self.inner, self.many = inner, many


class Half(Fraction):
    def __new__(cls, of: int) -> Half:
        return super().__new__(cls, of, 2)


def test_what_is_nested_is_made_first() -> None:
    half = {"_target_": f"{Half.__module__}.Half", "of": 1}
    path = f"{Nested.__module__}.Nested"
    made = make("policy", {"_target_": path, "inner": half, "many": [half, 3]}, Nested)
    assert [str(made.inner), *map(str, made.many)] == ["1/2", "1/2", "3"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("rate=-1: must be above 0", "workload.rate=-1: must be above 0"),
        ("lengths.prompt=0: no", "workload.lengths.prompt=0: no"),
        ("path.csv:3: not a number", "path.csv:3: not a number"),  # a file called like the key
        ("unknown format 'x'", "unknown format 'x'"),
    ],
)
def test_an_error_names_the_whole_key(text: str, said: str) -> None:
    settings = {"rate": 1, "path": "path.csv", "lengths": {"prompt": 0}}
    with pytest.raises(ConfigError) as error, said_of("workload", settings):
        raise ConfigError(text)
    assert str(error.value) == said


def test_a_fault_of_the_program_says_where() -> None:
    try:
        [][1]
    except IndexError as error:
        failure = failure_of(
            error, {"policy": {"_target_": "pagedsim.policies.ordering.FCFS"}}, 1.5
        )
    assert failure.reason.startswith("IndexError: list index out of range (tests/run/")
    assert failure.reason.endswith("in test_a_fault_of_the_program_says_where)")
    assert str(failure) == f"{failure.reason} at 1.5 s of simulated time"
    assert not failure.expected
    assert "[][1]" in failure.trace
