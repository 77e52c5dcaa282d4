"""Run-time checks of the values returned by hooks of user-defined components.

They are installed once, when a component is built: its class becomes a subclass of the same name in
which each overridden hook checks its return value. pagedsim's own components are left unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from inspect import isdatadescriptor
from numbers import Real
from typing import Any, Final, TypeVar, get_args

from pagedsim.core.batching import Batching
from pagedsim.core.batching.base import AdmissionChanges
from pagedsim.core.compiled import computed
from pagedsim.core.errors import AnswerError, ConfigError, is_number, is_whole, plain, printed
from pagedsim.core.memory import EvictionPolicy, Fit, Memory, Usage
from pagedsim.core.policy_validation import refuse_signatures

T = TypeVar("T")

_MARK: Final = "_vetted"
WRONG: Final = object()
"""The result of a rule for an invalid value."""


@dataclass(frozen=True)
class Rule:
    """The valid values of a hook."""

    allowed: str
    """The text of an error, formatted with the hook's arguments and the `part`."""
    read: Callable[[Any, Any, Sequence[Any]], Any]
    """Returns the value for the caller, or WRONG; gets the part, the value and the arguments."""

    def checked(self, part: Any, hook: str, answer: Any, passed: Sequence[Any]) -> Any:
        """The value for the caller; AnswerError unless it is valid."""
        value = self.read(part, plain(answer), passed)
        if value is WRONG:
            raise AnswerError(
                f"{type(part).__name__}.{hook} gave {printed(answer)}: "
                f"must be {self.allowed.format(*passed, part=part)}"
            )
        return value


@dataclass(frozen=True, eq=False)
class Contract:
    """The rules of a kind of component by hook; hooks without a return value have none.

    Names that are not members of `base` are attributes that its `__init__` sets.
    """

    base: type
    rules: Mapping[str, Rule]


def vet(part: T, contract: Contract) -> T:
    """The same object, with its class replaced by one that checks the answers of the user's hooks.

    Raises ConfigError for hooks that cannot be called as they are, and for attributes that are
    not allowed.
    """
    kind: Any = type(part)
    if is_ours(kind) or _MARK in vars(kind):
        return part
    refuse_signatures(part, contract.base)
    for name, rule in contract.rules.items():
        if callable(getattr(contract.base, name, None)) or computed(kind, name):
            continue  # checked when it is called
        value = getattr(part, name, WRONG)
        where = f"{kind.__name__}.{name}"
        if value is WRONG:
            raise ConfigError(f"{where}: is not set; __init__ must call super().__init__")
        if rule.read(part, plain(value), ()) is WRONG:
            raise ConfigError(f"{where}={printed(value)}: must be {rule.allowed.format(part=part)}")
    object.__setattr__(part, "__class__", _checked(kind, contract))  # it may be frozen
    return part


def class_of(part: object) -> type:
    """The class of a component as its author wrote it, without the checks of `vet`."""
    kind = type(part)
    return kind.__mro__[1] if _MARK in vars(kind) else kind


def raised_in_hook(error: BaseException) -> bool:
    """Whether an error was raised inside a hook that is checked here."""
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == __file__:
            return True
        trace = trace.tb_next
    return False


@cache
def is_ours(kind: Any) -> bool:
    """Whether a class or function is defined in pagedsim; what exec makes has no module."""
    return (kind.__module__ or "").partition(".")[0] == "pagedsim"


def own_modules(kinds: Iterable[Any]) -> set[str]:
    """The modules of those that are not defined in pagedsim."""
    return {kind.__module__ for kind in kinds if kind.__module__ and not is_ours(kind)}


@cache
def _checked(kind: Any, contract: Contract) -> type:
    """A subclass of the user's class, of the same name, that checks the hooks it overrides."""

    def method(hook: str, rule: Rule) -> Callable[..., Any]:
        def call(part: Any, *passed: Any, **named: Any) -> Any:
            answer = getattr(super(checked, part), hook)(*passed, **named)
            return rule.checked(part, hook, answer, (*passed, *named.values()))

        return call

    def attribute(hook: str, rule: Rule) -> property:
        return property(
            lambda part: rule.checked(part, hook, getattr(super(checked, part), hook), ())
        )

    names = ("__module__", "__qualname__", "__doc__")
    members: dict[str, Any] = {name: getattr(kind, name) for name in names}
    members["__slots__"] = ()  # the same layout, so that an object can become one
    members[_MARK] = True
    for hook, rule in contract.rules.items():
        owner = next((base for base in kind.__mro__ if hook in vars(base)), None)
        if owner is None or is_ours(owner):
            continue
        if isdatadescriptor(vars(owner)[hook]):
            members[hook] = attribute(hook, rule)
        elif callable(getattr(kind, hook)):
            members[hook] = method(hook, rule)
    checked: type = type(kind)(kind.__name__, (kind,), members)
    return checked


# -- what answers may be ---------------------------------------------------------------------------


def rule(allowed: str, fine: Callable[[Any], bool], none: bool = False) -> Rule:
    """A rule for values that are used unchanged; with `none`, None is valid, too."""

    def read(part: Any, answer: Any, passed: Sequence[Any]) -> Any:
        return answer if (none and answer is None) or fine(answer) else WRONG

    return Rule(f"{allowed}, or None" if none else allowed, read)


def whole(least: int, none: bool = False) -> Rule:
    """A rule for whole numbers of at least so many."""

    def fine(answer: Any) -> bool:
        return is_whole(answer) and answer >= least

    return rule(f"a whole number of at least {least}", fine, none)


def _flag(part: Any, answer: Any, passed: Sequence[Any]) -> Any:
    return bool(answer) if isinstance(answer, Real) and answer in (0, 1) else WRONG


FLAG = Rule("True or False", _flag)
SWITCH = rule("true or false", lambda value: isinstance(value, bool))
"""For attributes of a class."""
WHY = rule("a text that says why", lambda answer: isinstance(answer, str) and answer != "", True)


def _share(part: Any, answer: Any, passed: Sequence[Any]) -> Any:
    return answer if is_whole(answer) and 0 <= answer <= part.total else WRONG


def _blocks(part: Any, answer: Any, passed: Sequence[Any]) -> Any:
    fine = _all(answer, lambda block: is_whole(block) and 0 <= block < part.total)
    return tuple(map(int, answer)) if fine else WRONG


def _known(part: Any, answer: Any, passed: Sequence[Any]) -> Any:
    blocks = tuple(answer) if isinstance(answer, Iterable) else answer  # it may be a generator
    return _blocks(part, blocks, passed)


def _all(answer: Any, fine: Callable[[Any], bool]) -> bool:
    """Whether a value is a sequence whose elements are all `fine`."""
    a_list = isinstance(answer, Sequence) and not isinstance(answer, (str, bytes))
    return a_list and all(fine(item) for item in answer)


def _is_pair(item: Any) -> bool:
    fine = isinstance(item, tuple) and len(item) == 2
    return fine and all(is_whole(block) and block >= 0 for block in item)


def _is_usage(answer: Any) -> bool:
    return isinstance(answer, Usage) and all(is_whole(slots) and slots >= 0 for slots in answer)


_COUNT, _LENGTH = whole(0), whole(1)
_SHARE = Rule("a whole number from 0 to {part.total}, the blocks that there are", _share)
_BLOCKS = Rule("a list of block numbers from 0, below {part.total}", _blocks)
_PAIRS = rule("a list of pairs of blocks, (from, to)", lambda answer: _all(answer, _is_pair))

BATCHING = Contract(
    Batching,
    {
        **dict.fromkeys(
            (
                *("displaces_by_default", "grows_first", "joins_midway", "requeues_last"),
                *("can_load", "hands_transfers"),
            ),
            SWITCH,
        ),
        "admission_changes": rule(
            f"one of {', '.join(get_args(AdmissionChanges))}",
            lambda answer: isinstance(answer, str) and answer in get_args(AdmissionChanges),
        ),
        **dict.fromkeys(("default_tokens", "longest"), _LENGTH),
        **dict.fromkeys(("infeasible", "refused", "never_fits"), WHY),
        **dict.fromkeys(("spare", "margin", "slack"), _COUNT),
        **dict.fromkeys(("grow", "fits", "sorts_late", "displacing"), FLAG),
        "closed": whole(0, none=True),
    },
)
MEMORY = Contract(
    Memory,
    {
        **dict.fromkeys(("block_size", "total"), _LENGTH),
        "cpu_total": _COUNT,
        "lower_tiers": rule(
            "a list of names", lambda value: _all(value, lambda name: isinstance(name, str))
        ),
        **dict.fromkeys(
            (
                "can_swap",
                "can_guard",
                "can_hold",
                "can_offload",
                "in_order_of_results",
                "begins_transfers",
            ),
            SWITCH,
        ),
        **dict.fromkeys(
            ("shared", "cache_changes", "cached_tokens", "loadable", "host_tokens"), _COUNT
        ),
        **dict.fromkeys(("end_of", "longest"), _LENGTH),
        **dict.fromkeys(("longest_of", "blocks_for", "blocks_at_length", "common"), _COUNT),
        **dict.fromkeys(("free", "cached", "used", "guarded", "unheld"), _SHARE),
        "known_blocks": Rule("block numbers from 0, below {part.total}", _known),
        "cpu_free": _COUNT,
        "cpu_peak": whole(0, none=True),
        **dict.fromkeys(("lookup", "touch"), _BLOCKS),
        "node_of": rule(
            "a node with a parent and children",
            lambda answer: hasattr(answer, "parent") and hasattr(answer, "children"),
            none=True,
        ),
        **dict.fromkeys(("hit_may_change", "grow", "cpu_room", "holds"), FLAG),
        "fit": rule(f"one of {', '.join(map(str, Fit))}", lambda answer: isinstance(answer, Fit)),
        **dict.fromkeys(("need", "stride"), whole(1, none=True)),
        **dict.fromkeys(("blocks_needed", "filled_blocks", "swap_need"), _COUNT),
        **dict.fromkeys(("swap_out", "swap_in"), _PAIRS),
        **dict.fromkeys(("transferring", "unbegun"), FLAG),
        "usage": rule("a Usage of four whole numbers of at least 0", _is_usage),
    },
)
EVICTION = Contract(
    EvictionPolicy,
    {
        "rank": rule(
            "a number, or a tuple of numbers",
            lambda answer: (
                is_number(answer) or (isinstance(answer, tuple) and all(map(is_number, answer)))
            ),
        ),
        "segment": rule(
            "a whole number from 0 to 99", lambda answer: is_whole(answer) and 0 <= answer < 100
        ),
    },
)
