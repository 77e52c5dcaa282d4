"""The router that a configuration describes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pagedsim.core.errors import is_whole
from pagedsim.run.objects import make, takes
from policies.routing.router import Router


def router_of(settings: Any, seed: int) -> Router:
    """What the group `router` describes; a router that draws has its own seed and the run's."""
    if isinstance(settings, Mapping) and settings.get("_target_"):
        own = settings.get("seed", 0)
        if is_whole(own) and own >= 0 and _draws(str(settings["_target_"])):
            settings = {**settings, "seed": own + seed}
    return make("router", settings, Router)


def _draws(target: str) -> bool:
    try:
        return takes(target, "seed")
    except (ValueError, TypeError):  # `make` says what is wrong
        return False
