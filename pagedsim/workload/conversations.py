"""Workloads of sessions: people who chat, and agents that call a model on the way to a result."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from pagedsim.core import ConfigError
from pagedsim.core.errors import refuse_settings, require_number
from pagedsim.workload.arrivals import Arrivals, make_arrivals
from pagedsim.workload.choices import SharedPrefixes, make_prefixes, weights_of
from pagedsim.workload.draws import Draw, make_draw
from pagedsim.workload.labels import Labels
from pagedsim.workload.lengths import Lengths, make_lengths
from pagedsim.workload.programs import Program, sessions_of
from pagedsim.workload.settings import within
from pagedsim.workload.shapes import Chain, make_shape
from pagedsim.workload.workload import Workload


def chat_sessions(
    *,
    sessions: int | None = None,
    duration: float | None = None,
    arrivals: str | Arrivals = "poisson",
    rate: float | None = None,
    cv: float | None = None,
    users: int | None = None,
    think_time: float | None = None,
    turns: float | Mapping[str, Any] | Draw = 1,
    think: float | Mapping[str, Any] | Draw = 0.0,
    lengths: str | Mapping[str, Any] | Lengths = "sharegpt",
    max_len: int | None = None,
    prefixes: Mapping[str, Any] | SharedPrefixes | None = None,
    priority: float | Mapping[float, float] = 0.0,
    client: str | Mapping[str, float] = "",
    deadline: float | None = None,
    seed: int = 0,
) -> Workload:
    """Conversations of several turns, each asked `think` seconds after the last answer.

    A turn's prompt is all that was said before, and as many new tokens as `lengths` say of
    prompts. Sessions begin as `arrivals` says, `rate` of them a second; with closed, each of
    `users` begins one `think_time` seconds after the end of the last. A session ends before the
    turn that would pass `max_len`. The other settings are those of `synthetic`; labels are drawn
    for a session, and all its requests have them.

    >>> fixed = {"shape": "fixed", "prompt": 10, "output": 5}
    >>> chat_sessions(sessions=2, arrivals="burst", turns=3, lengths=fixed)
    Workload(6 requests of 2 sessions at once, 25 tokens in and 5 out on average)
    """
    only = Program(
        shape=Chain(turns),
        lengths=make_lengths(lengths, max_len),
        pause=make_draw("think", think),
        prefixes=make_prefixes(prefixes),
        labels=Labels(priority, client, deadline),
    )
    process = make_arrivals(arrivals, rate=rate, cv=cv, users=users, think_time=think_time)
    return sessions_of([only], process, sessions, duration, max_len, seed)


def agents(
    *,
    programs: object,
    sessions: int | None = None,
    duration: float | None = None,
    arrivals: str | Arrivals = "poisson",
    rate: float | None = None,
    cv: float | None = None,
    users: int | None = None,
    think_time: float | None = None,
    max_len: int | None = None,
    seed: int = 0,
) -> Workload:
    """Agents' programs, each a session: calls one after another, or at once, with tools between.

    Each of the `programs` has a `share` of the sessions and a `shape`: chain (`turns`), map_reduce
    (`width`) or tree (`breadth`, `depth`, `keep`). `tool` is the time between answers and the calls
    that go on from them; `lengths`, `prefixes`, `priority`, `client` (its name, unless it says
    otherwise) and `deadline` are as in `chat_sessions`, and so are the other settings here.
    """
    if not isinstance(programs, Mapping) or not programs:
        raise ConfigError("programs: must be a mapping of names to settings, with at least one")
    made = [_program(str(name), settings, max_len) for name, settings in programs.items()]
    weights_of("programs.share", {one.name: one.share for one in made})
    process = make_arrivals(arrivals, rate=rate, cv=cv, users=users, think_time=think_time)
    return sessions_of(made, process, sessions, duration, max_len, seed)


def _program(name: str, settings: Any, max_len: int | None) -> Program:
    with within(f"programs.{name}"):
        if not isinstance(settings, Mapping):
            raise ConfigError(f"{settings!r}: must be a mapping of settings")
        given = {"client": name} | {str(key): value for key, value in settings.items()}
        if "shape" not in given:
            raise ConfigError("shape: must be given: chain, map_reduce or tree")
        refuse_settings("a program", given, partial(_made, name=name), hidden=("name", "max_len"))
        return _made(name=name, max_len=max_len, **given)


def _made(
    *,
    name: str,
    shape: str,
    max_len: int | None = None,
    share: float = 1.0,
    tool: float | Mapping[str, Any] | Draw = 0.0,
    lengths: str | Mapping[str, Any] | Lengths = "sharegpt",
    prefixes: Mapping[str, Any] | SharedPrefixes | None = None,
    priority: float | Mapping[float, float] = 0.0,
    client: str | Mapping[str, float] = "",
    deadline: float | None = None,
    **of_shape: Any,
) -> Program:
    return Program(
        name=name,
        shape=make_shape(str(shape), of_shape),
        lengths=make_lengths(lengths, max_len),
        pause=make_draw("tool", tool),
        prefixes=make_prefixes(prefixes),
        labels=Labels(priority, client, deadline),
        share=require_number("share", share, low=0),
    )
