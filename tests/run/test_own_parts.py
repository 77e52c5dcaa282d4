"""Parts of a user's own: what each hook may answer, and the line that any other answer ends in.

Every case is a run as the command makes it, with one part in which one hook is wrong. The hooks are
read from the classes that users derive from, so a new one needs a case here.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from decimal import Decimal
from inspect import isdatadescriptor, signature
from math import inf, nan
from pathlib import Path
from types import MemberDescriptorType, ModuleType
from typing import Any, NamedTuple

import numpy as np
import pytest
from omegaconf import OmegaConf

from pagedsim.backends.base import StoppableRecorder
from pagedsim.build import make_memory
from pagedsim.core import (
    Batching,
    ConfigError,
    Fit,
    Memory,
    PagedMemory,
    Policy,
    Preemption,
    PrefillFirst,
    Request,
    Scheduler,
)
from pagedsim.core.contracts import BATCHING, MEMORY, vet
from pagedsim.core.errors import AnswerError
from pagedsim.core.memory import Usage
from pagedsim.metrics.arms import Run
from pagedsim.policies.autoscaling import Autoscaler
from pagedsim.policies.preemption import Recompute
from pagedsim.policies.routing.router import Move, Refusal, Router
from pagedsim.run.job import Failure, Job, Outcome, run_job
from pagedsim.sim.cost import CostModel
from pagedsim.workload import mix, synthetic
from pagedsim.workload.arrivals import Arrivals, Poisson
from pagedsim.workload.lengths import Lengths
from pagedsim.workload.predictor import Oracle, Predictor
from tests.run.studies import compose


class Part(NamedTuple):
    """A part that users may write."""

    setting: str
    states: type
    """What says which hooks there are."""
    base: type
    """A whole part, of which a case overrides one hook."""
    words: tuple[str, ...] = ()
    """A run in which all of its hooks are asked."""


class First(Router):
    """Everything goes to the first replica."""

    migrates_every = 0.5

    def route(self, request: Any, replicas: Any, now: float) -> Any:
        return replicas[0]


class Timed(Policy):
    """Of which every hook is asked."""

    rank_changes = "with time"
    displacing = True

    def rank(self, request: Any, state: Any) -> Any:
        return request.prompt_len


class Plain(CostModel):
    """Every step takes as long."""

    def __init__(self, replica: Any) -> None:
        self.replica = replica

    def step_seconds(self, plan: Any) -> Any:
        return 0.01

    def decode_seconds(self, sequences: int, context: int) -> Any:
        return 0.01

    def swap_seconds(self, blocks: int) -> Any:
        return 0.001

    def recompute_seconds(self, tokens: int) -> Any:
        return 0.02

    def explain(self, plan: Any) -> Any:
        raise AssertionError("a simulation asks nothing of it")

    work = explain


class Steady(Autoscaler):
    """Both replicas."""

    def desired(self, view: Any) -> Any:
        return 2


class Alike(Lengths):
    """All requests have the same lengths."""

    drawn = False

    def sample(self, count: int, rng: Any) -> Any:
        return np.full(count, 300), np.full(count, 30)


class Together(Arrivals):
    """All requests arrive at once."""

    drawn = False

    def times(self, count: int, rng: Any) -> Any:
        return np.zeros(count)


PARTS = {
    "policy": Part("policy", Policy, Timed, ("memory=prefix", "preemption=swap")),
    "preemption": Part("preemption", Preemption, Recompute, ("memory.cpu_blocks=50",)),
    "router": Part("router", Router, First, ("fleet.replicas=2",)),
    "predictor": Part("predictor", Predictor, Oracle),
    "cost": Part("cost", CostModel, Plain, ("preemption=cheapest",)),
    "batching": Part("batching", Batching, PrefillFirst),
    "memory": Part(
        "memory",
        Memory,
        PagedMemory,
        ("preemption=swap", "memory.cpu_blocks=50", "workload.n=2"),
    ),
    "autoscaler": Part(
        "fleet.autoscale",
        Autoscaler,
        Steady,
        ("fleet.replicas=2", "fleet.autoscale.interval_s=0.1"),
    ),
    "lengths": Part("workload.lengths", Lengths, Alike),
    "arrivals": Part("workload.arrivals", Arrivals, Together),
}


def hooks(states: type) -> set[str]:
    """What a class offers to override: its public methods, properties and attributes."""
    members = {name: one for name, one in vars(states).items() if not name.startswith("_")}
    return {name for name, one in members.items() if not isinstance(one, MemberDescriptorType)}


NUMBER = "must be a number, or a tuple of numbers"
FINITE = "must be a finite number"
FLAG = "must be True or False"
SWITCH = "must be true or false"
SECONDS = "must be seconds, a number from 0 to 1e+09"
GIVEN = "must be one of the requests that it was given"
REPLICA = (
    "must be one of the replicas that it was given, which may take prompts, a Refusal, or None"
)
MOVES = "must be a list of Move(request, source, target)"
KEEP = "must be one of PreemptionMode.RECOMPUTE, PreemptionMode.SWAP"
SOME = "must be a tuple of some of 'predictor', "
WHY = "must be a text that says why, or None"
TEXTS = "must be a list of texts"
COUNT = "must be a whole number of at least 0"
LENGTH = "must be a whole number of at least 1"
SHARE = "must be a whole number from 0 to 70, the blocks that there are"
BLOCKS = "must be a list of block numbers from 0, below 70"
PAIRS = "must be a list of pairs of blocks, (from, to)"
FITS = "must be one of Fit.NOW, Fit.LATER, Fit.NEVER"
SAMPLED = "must be a prompt and an output length for each of 10 requests: two arrays of whole"
TIMED = "must be an array of 10 numbers of seconds from 0 to 1e+10, none below the one before"
BURST, SHORT_BURST = (synthetic(requests=n, arrivals="burst") for n in (10, 3))
STRANGER = Request("x", prompt=5)
NUMBERS = (None, nan, "soon", Decimal("0.5"), object(), [1, 2], np.array([1, 2]))
"""What is no number."""
WRONG = (
    *NUMBERS,
    inf,
    -inf,
    -1,
    -0.5,
    True,
    np.bool_(True),
    np.float64(nan),
    np.float32(-1),
    1e300,
)
"""What are no seconds."""
NO_COUNTS = (*NUMBERS, -1, 0.5, 2.0, True, inf, np.float64(1))
"""What is no whole number of at least 0."""
NO_LENGTHS = (*NO_COUNTS, 0)
NO_BLOCKS = (None, 3, -1, "ab", [70], [-1], [0.5], ["a"], [None])
NO_PAIRS = (None, 3, "ab", [1], [(1,)], [(1, -1)], [("a", 1)])
NO_LENGTHS_OF_10: tuple[Any, ...] = (
    *(None, 5, "soon", (), np.full(10, 5), (np.full(10, 5),), (np.full(9, 5), np.full(9, 5))),
    *((np.full(11, 5), np.full(11, 5)), (np.full(10, 5.5), np.full(10, 5))),
    *((np.full(10, 5), np.full(10, nan)), (np.zeros(10, int), np.full(10, 5))),
    *((np.full(10, 5), np.full(10, -1)), (np.full(10, 2**31), np.full(10, 5))),
    *((["a"] * 10, [5] * 10), (5, 5), ([[1], [2, 3]], [5] * 10)),
)
NO_TIMES_OF_10: tuple[Any, ...] = (
    *(None, 5, "soon", [], np.zeros(9), np.zeros(11), np.full(10, nan), np.full(10, inf)),
    *(np.full(10, -1.0), np.arange(10)[::-1], ["a"] * 10, np.zeros((10, 1)), np.full(10, 1e11)),
    [*[0.0] * 9, nan],
)
NO_FLAGS = (*NUMBERS, 2, -1, np.float64(0.5), "")

UNCHECKED: Mapping[str, str] = {
    "policy": "paper observe after_step",
    "router": "paper observe",
    "cost": "explain work",
    "batching": "compose validate_limits displace idle",
    "memory": "shared claim admit extend fork release guard unguard retract forget hold filled "
    "check reclaim transferred queued",
}
"""Hooks of which no answer is looked at."""
NO_REASONS = (nan, "", 5, True, [1, 2], np.array([1, 2]))
CHECKED: Sequence[tuple[str, tuple[Any, ...], Mapping[str, str]]] = (
    (SOME, (("luck",), "predictor", None, 3, [["session"]]), {"policy": "needs"}),
    ("must be one of never, while d", (None, "no", []), {"batching": "admission_changes"}),
    ("must be one of 'never', ", (None, "sometimes", []), {"policy": "rank_changes"}),
    (
        SWITCH,
        (None, "no", 1),
        {
            "policy": "by_client sorts_late walks_tree",
            "preemption": "swaps",
            "router": "blind holds",
            "predictor": "drawn",
            "cost": "by_totals",
            "batching": "displaces_by_default grows_first joins_midway requeues_last can_load "
            "hands_transfers",
            "memory": "can_guard can_hold can_offload begins_transfers in_order_of_results",
            "lengths": "drawn",
            "arrivals": "drawn",
        },
    ),
    (SWITCH, ("no", 1), {"policy": "displacing", "memory": "can_swap"}),
    (NUMBER, (*NUMBERS, (1, None), (1, nan), (1, "a")), {"policy": "rank"}),
    ("must be true, false, or requests", (*NUMBERS, 1, inf), {"policy": "stale"}),
    (FINITE, (*NUMBERS, inf, -inf), {"policy": "speed"}),
    (
        FLAG,
        NO_FLAGS,
        {
            "policy": "admit may_preempt",
            "batching": "grow fits sorts_late displacing",
            "memory": "hit_may_change grow cpu_room holds transferring unbegun",
        },
    ),
    (WHY, NO_REASONS, {"policy": "should_reject", "batching": "infeasible refused never_fits"}),
    (GIVEN, (*NUMBERS, STRANGER, True), {"policy": "choose_victim"}),
    (KEEP, ("swap", True, nan, 0), {"policy": "swap_or_recompute"}),
    (KEEP, ("swap", True, nan, 0, None), {"preemption": "swap_or_recompute"}),
    (
        SECONDS,
        WRONG,
        {
            "policy": "pin_prefix_for",
            "cost": "step_seconds decode_seconds swap_seconds recompute_seconds",
        },
    ),
    ("must be a number from 0 to 1e+09", WRONG[:8], {"cost": "server_seconds"}),
    ("must be a number above 0, at most 1", (*WRONG[:8], 0, 1.5), {"cost": "bus_efficiency"}),
    (
        "must be a number of at least 0.001",
        (nan, inf, 0, -1, 1e-9, True),
        {"router": "migrates_every"},
    ),
    (REPLICA, (nan, 0, "replica-0", Refusal, object(), np.array([1, 2])), {"router": "route"}),
    (MOVES, (None, 3, "ab", [None], [Move(STRANGER, 0, 1)]), {"router": "migrate"}),  # type: ignore[arg-type]
    (
        "must be the workload that it was given, with a finite predicted_len above 0, or NaN, for",
        (None, 3, "soon", np.full(10, 5.0), BURST, SHORT_BURST),
        {"predictor": "applied"},
    ),
    (
        "must be an array of 10 finite numbers of tokens above 0",
        (*NUMBERS, True, np.full(10, -1.0), np.zeros(10), np.full(10, inf), ["a"] * 10, [5] * 3),
        {"predictor": "guesses"},
    ),
    (TEXTS, (None, "text", [1]), {"cost": "notices"}),
    ("must have the methods swap_seconds and recompute_seconds", (None, 3), {"cost": "prices"}),
    (LENGTH, NO_LENGTHS, {"batching": "default_tokens longest", "memory": "end_of longest"}),
    (f"{LENGTH}, or None", NO_LENGTHS[1:], {"memory": "need stride"}),
    (
        COUNT,
        NO_COUNTS,
        {
            "batching": "spare margin slack",
            "memory": "cache_changes longest_of blocks_for cpu_free blocks_at_length common "
            "blocks_needed filled_blocks swap_need cached_tokens loadable host_tokens",
            "lengths": "capped",
            "autoscaler": "desired",
        },
    ),
    (f"{COUNT}, or None", NO_COUNTS[1:], {"batching": "closed", "memory": "cpu_peak"}),
    ("must be a list of names", (None, 3, "disk", [1]), {"memory": "lower_tiers"}),
    (SHARE, (*NO_COUNTS, 71), {"memory": "free cached used guarded unheld"}),
    ("must be block numbers from 0, below 70", NO_BLOCKS, {"memory": "known_blocks"}),
    (BLOCKS, NO_BLOCKS, {"memory": "lookup touch"}),
    ("must be a node with a parent and children, or None", (3, "ab"), {"memory": "node_of"}),
    (FITS, (*NUMBERS, True, "now", 0), {"memory": "fit"}),
    (PAIRS, NO_PAIRS, {"memory": "swap_out swap_in"}),
    (
        "must be a Usage of four whole numbers of at least 0",
        (None, 3, (1, 2, 3, 4), Usage(0, 0, 0, -1), Usage("a", 0, 0, 0)),  # type: ignore[arg-type]
        {"memory": "usage"},
    ),
    (SAMPLED, NO_LENGTHS_OF_10, {"lengths": "sample"}),
    ("must be 'open' or 'burst', or 'closed' in a", (None, "closed", 3), {"arrivals": "mode"}),
    (TIMED, NO_TIMES_OF_10, {"arrivals": "times"}),
)
"""What hooks must answer, and some answers that are refused."""


def _cases() -> Iterator[tuple[tuple[str, str], tuple[str, tuple[Any, ...]] | None]]:
    """By part and hook; all answers once for each check of a part, and one for its other hooks."""
    for part, names in UNCHECKED.items():
        yield from (((part, hook), None) for hook in names.split())
    for allowed, answers, parts in CHECKED:
        for part, names in parts.items():
            for number, hook in enumerate(names.split()):
                yield (part, hook), (allowed, answers[:1] if number else answers)


CASES = dict(_cases())
FINE: Mapping[tuple[str, str], tuple[Any, ...]] = {
    ("policy", "rank"): (inf, True, np.float32(1), np.int64(1), np.bool_(True), (1, np.float64(2))),
    ("policy", "speed"): (np.float32(1), np.int64(1)),
    ("policy", "stale"): (np.bool_(True), np.bool_(False), [STRANGER]),
    ("policy", "pin_prefix_for"): (0, np.float32(0.5), np.int64(1)),
    ("predictor", "guesses"): ([5] * 10, np.full(10, 5, np.int32), np.full(10, nan)),
    ("cost", "step_seconds"): (1, np.float32(0.01), np.float64(0.01), np.int64(1)),
    ("cost", "swap_seconds"): (0, np.float32(0.01)),
    ("batching", "default_tokens"): (2048, np.int64(2048)),
    ("batching", "closed"): (None, 0, np.int32(3)),
    ("memory", "lookup"): ((), [], np.array([], int).tolist()),
    ("memory", "fit"): (Fit.NEVER,),
    ("memory", "stride"): (None, 16, np.int64(16)),
    ("lengths", "sample"): (
        ([5] * 10, [7] * 10),
        [np.full(10, 5, np.int64), np.full(10, 7, np.uint8)],
    ),
    ("arrivals", "mode"): ("open", "burst"),
    ("arrivals", "times"): (range(10), [0.5] * 10, np.arange(10, dtype=np.float32)),
}


def test_every_hook_has_a_case() -> None:
    for name, part in PARTS.items():
        cases = {hook for kind, hook in CASES if kind == name}
        set_by_init = set(getattr(part.states, "__mypyc_attrs__", ())) - cases  # if compiled
        assert cases == hooks(part.states) - set_by_init, name


def shown(case: object) -> str:
    return " ".join(repr(case).split()).split(" at 0x")[0]


UNASKED = {
    *(("cost", hook) for hook in ("explain", "work")),
    *(("batching", hook) for hook in ("fits", "displace")),
    *(("memory", hook) for hook in ("cache_changes", "cached", "common", "end_of")),
    *(("memory", hook) for hook in ("guard", "guarded", "unguard", "holds", "hold", "filled")),
    *(("memory", hook) for hook in ("touch", "reclaim", "cached_tokens", "unheld", "node_of")),
    *(("memory", hook) for hook in ("loadable", "host_tokens", "transferring", "transferred")),
    *(("batching", hook) for hook in ("idle",)),
    *(("memory", hook) for hook in ("known_blocks", "usage", "used", "check", "forget")),
}
"""What the run of a part never asks, since other settings do."""


def refused(asked: bool) -> list[Any]:
    """Answers that are not allowed; runs with more than two of a hook are slow tests."""
    return [
        pytest.param(
            *(name, hook, answer, case[0]),
            id=f"{name}.{hook}-{shown(answer)}",
            marks=[pytest.mark.slow] if asked and at > 1 else [],
        )
        for (name, hook), case in CASES.items()
        if isinstance(case, tuple) and asked is ((name, hook) not in UNASKED)
        for at, answer in enumerate(case[1])
    ]


@pytest.fixture(scope="module")
def configs() -> dict[str, Any]:
    """The configuration of each part's run, once composed."""
    return {}


@pytest.fixture
def served(
    configs: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Any]:
    """Serve some requests with a part of which one member is another."""

    def run(name: str, members: Mapping[str, Any]) -> Outcome:
        part = PARTS[name]
        if name not in configs:
            words = ["experiment=single", "workload=fixed", "workload.requests=10"]
            words += ["memory.blocks=70", "workload.arrivals=burst", "server.max_model_len=1024"]
            config = compose("config", overrides=[*words, *part.words])
            configs[name] = OmegaConf.to_container(config, resolve=True)
        config = deepcopy(configs[name])
        module: Any = ModuleType("mine")
        module.__file__ = "mine.py"
        own = {"admission_changes": "never"} if name == "batching" else {}
        module.Mine = type("Mine", (part.base,), {"__module__": "mine", **own, **members})
        monkeypatch.setitem(sys.modules, "mine", module)
        where, _, key = part.setting.rpartition(".")
        inside = config[where] if where else config
        # Beside the class, a memory's settings are the server's, and an autoscaler's the fleet's.
        beside = inside[key] if name in ("memory", "autoscaler") else {}
        inside[key] = {**beside, "_target_": "mine.Mine"}
        return run_job(Job("mine", 0, config, tmp_path / "run"), StoppableRecorder())

    yield run


def answering(part: Part, hook: str, answer: Any) -> Mapping[str, Any]:
    """A member that answers so, of the kind that the hook is."""
    stated = vars(part.states)[hook]
    if callable(stated):
        return {hook: lambda self, *asked: answer}
    return {hook: property(lambda self: answer)} if isdatadescriptor(stated) else {hook: answer}


@pytest.mark.parametrize(("name", "hook", "answer", "allowed"), refused(asked=True))
def test_an_answer_that_is_not_allowed(
    served: Any, name: str, hook: str, answer: Any, allowed: str
) -> None:
    if name == "router" and isinstance(answer, list) and isinstance(answer[0], Move):
        answer = [Move(STRANGER, None, None)]  # type: ignore[arg-type]
    outcome = served(name, answering(PARTS[name], hook, answer))
    assert isinstance(outcome, Failure), outcome
    assert outcome.expected
    refuses(str(outcome), hook, answer, allowed)


def refuses(line: str, hook: str, answer: Any, allowed: str) -> None:
    """Whether a line names the hook, what it answered and what is allowed."""
    assert "\n" not in line
    assert allowed in line
    said, plainly = shown(answer)[:100], str(answer).split(" at 0x")[0]
    told = (f"Mine.{hook} gave {said}", f"Mine.{hook}={said}", f"Mine.{hook}={plainly}")
    assert line.startswith(told), line


@pytest.mark.parametrize(("name", "hook", "answer", "allowed"), refused(asked=False))
def test_an_answer_that_is_not_allowed_where_other_settings_ask(
    name: str, hook: str, answer: Any, allowed: str
) -> None:
    members = {"__module__": "mine", **answering(PARTS[name], hook, answer)}
    mine = type("Mine", (PARTS[name].base,), members)
    made = vet(mine(70, 16), MEMORY) if name == "memory" else vet(mine(), BATCHING)
    stated = vars(PARTS[name].states)[hook]
    with pytest.raises(AnswerError) as error:
        asked = getattr(made, hook)
        asked(*[None] * (len(signature(stated).parameters) - 1))
    refuses(str(error.value), hook, answer, allowed)


@pytest.mark.parametrize(
    ("name", "hook", "answer"),
    [
        pytest.param(*key, answer, id=f"{key[0]}.{key[1]}-{shown(answer)}")
        for key, answers in FINE.items()
        for answer in answers
    ],
)
def test_an_answer_that_is_allowed(served: Any, name: str, hook: str, answer: Any) -> None:
    outcome = served(name, answering(PARTS[name], hook, answer))
    assert isinstance(outcome, Run), outcome


METHODS = [key for key in CASES if callable(vars(PARTS[key[0]].states)[key[1]])]


@pytest.mark.parametrize(("name", "hook"), METHODS)
def test_a_hook_that_takes_something_else(served: Any, name: str, hook: str) -> None:
    outcome = served(name, {hook: lambda self, a, b, c, d, e, f: None})
    assert isinstance(outcome, Failure)
    assert outcome.expected
    assert f"Mine.{hook}(self, a, b, c, d, e, f): must be {hook}(self" in str(outcome)
    outcome = served(name, {hook: 7})
    assert f"Mine.{hook}=7: must be a method" in str(outcome)


FAILING = """
def hook(self, *asked):
    return helper()


def helper():
    raise error("x")
"""


ASKED = [one for one in METHODS if one not in UNASKED]


@pytest.mark.parametrize(
    ("name", "hook", "error"),
    [(*one, KeyError) for one in ASKED]
    + [(*one, error) for one in dict(ASKED).items() for error in (SystemExit, StopIteration)],
)
def test_an_error_in_a_hook_names_the_part_and_the_place(
    served: Any, name: str, hook: str, error: type[BaseException]
) -> None:
    made: dict[str, Any] = {"error": error}
    exec(compile(FAILING.replace("hook", hook), "mine.py", "exec"), made)
    outcome = served(name, {hook: made[hook]})
    assert isinstance(outcome, Failure), outcome
    assert not outcome.expected
    line = str(outcome)
    assert line.startswith(f"{PARTS[name].setting}=mine.Mine failed: ")
    assert f"(mine.py:7, in helper, called from {hook})" in line
    assert "helper" in outcome.trace


class Uncalled(PagedMemory):
    """Its `__init__` leaves that of its base out."""

    def __init__(self, blocks: int, block_size: int, cpu_blocks: int = 0) -> None:
        self.room = blocks


class Frozen(Poisson):
    """A frozen dataclass of the user's."""

    def times(self, count: int, rng: Any) -> Any:
        return super().times(count, rng) - 1e9


def test_a_memory_that_does_not_call_the_init_of_its_base() -> None:
    line = "Uncalled.block_size: is not set; __init__ must call super().__init__"
    with pytest.raises(ConfigError, match=line.replace("(", r"\(").replace(")", r"\)")):
        make_memory(f"{__name__}.Uncalled", blocks=70, block_size=16)


def test_what_is_checked_is_the_same_object_and_ours_stay_as_they_are() -> None:
    mine, ours = PrefillFirst(), PagedMemory(70, 16)
    scheduler = Scheduler(memory=ours, batching=mine)
    assert scheduler.memory is ours and type(ours) is PagedMemory and type(mine) is PrefillFirst
    own = type("Mine", (PagedMemory,), {"blocks_needed": lambda self, request, tokens: -1})(70, 16)
    scheduler = Scheduler(memory=own, batching=PrefillFirst())
    assert scheduler.memory is own
    assert isinstance(own, PagedMemory) and type(own).__name__ == "Mine"
    assert type(vet(own, MEMORY)) is type(own)
    with pytest.raises(AnswerError, match=r"Mine\.blocks_needed gave -1"):
        own.blocks_needed(Request("a", prompt=5), 5)


def test_arrivals_that_are_frozen_stay_checked_at_another_rate() -> None:
    classes: dict[str, dict[str, Any]] = {
        "a": {"arrivals": Frozen(2.0)},
        "b": {"arrivals": Poisson(1.0)},
    }
    with pytest.raises(AnswerError, match=r"Frozen\.times gave array"):
        mix(classes=classes, requests=10, rate=6.0)
