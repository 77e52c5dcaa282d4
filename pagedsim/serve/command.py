"""`python -m pagedsim serve`: from a configuration to a listening server."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib.util import find_spec

from pagedsim.core import ConfigError
from pagedsim.core.errors import not_installed
from pagedsim.requirements import refuse_older
from pagedsim.spec.composed import Composed, missing_keys
from pagedsim.spec.run import RunSpec
from pagedsim.spec.study import with_pools
from pagedsim.spec.words import group_of, key_of

ENGINE = "pagedsim.backends.engine.Engine"
OF_A_SERVER = ("backend", "policy", "preemption", "offload", "answer_tokens", "name")
"""Words that change nothing where the servers are there already."""


def completed(words: Sequence[str]) -> list[str]:
    """Validate the command line's overrides; the engine's default model is the tiny one."""
    if several := {"-m", "--multirun"} & set(words):
        raise ConfigError(f"{several.pop()}: a command is one server; start one for each")
    if "backend=http" in words:
        raise ConfigError("backend=http: serve takes sim and engine")
    before = any(key_of(word) == "router.backends" for word in words)
    routed = before or any(group_of(word) == "fleet" for word in words)
    for word in words:
        if group_of(word) == "router" and not routed:
            raise ConfigError(
                f"{word}: is of several servers: fleet.replicas=4, or router.backends=[http://...]"
            )
        if before and group_of(word) in OF_A_SERVER:
            raise ConfigError(f"{word}: changes nothing with router.backends, which have their own")
    if "backend=engine" in words:
        from pagedsim.backends.engine import Engine

        for word in words:
            if group_of(word) in Engine.unread:  # it would have no effect
                why = Engine.unread_since
                raise ConfigError(f"{word}: changes nothing with backend=engine: {why}")
    keys = [word.partition("=")[0] for word in words]
    engine = "backend=engine" in words and not {"model", "backend.model"} & set(keys)
    return ["model=tiny"] * engine + list(words)


def serve(composed: Composed) -> None:
    """Serve until SIGTERM or Ctrl-C."""
    settings = with_pools(
        composed.resolved(missing=True), lambda where, words: composed.changed(words).resolved()
    )
    for missing in missing_keys(settings):
        raise ConfigError(f"{missing}: must be given: {missing}=...")
    # oneDNN caches one primitive per matmul shape, 1024 by default; a server sees ever new shapes,
    # which costs hundreds of MB. The variable is read once, at torch's first computation.
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "128")
    refuse_older("serve")
    on_engine = settings["backend"].get("_target_") == ENGINE
    if on_engine:
        refuse_older("engine")
    routed = settings["router"]["backends"] is not None or not RunSpec(settings).fleet.alone
    try:
        if routed:
            from pagedsim.serve.router.listen import listen_routed
        else:
            from pagedsim.serve.listen import listen
    except ModuleNotFoundError as error:
        if on_engine and find_spec("torch") is None:
            both = error.name, "torch"
            raise not_installed("serve backend=engine", "engine,serve", *both) from error
        raise not_installed("serve", "serve", error.name) from error
    if not routed:
        return listen(settings)
    described = {group_of(change) for change in composed.changes} & {"model", "hardware"}
    listen_routed(settings, len(described) == 2)
