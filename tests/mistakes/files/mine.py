"""Classes of a user, right and wrong, for the lists of mistakes."""

from __future__ import annotations

from typing import Any

from pagedsim.core import PagedMemory, Policy, PolicyWrapper, Request, ServerState
from pagedsim.policies.autoscaling import Autoscaler
from pagedsim.policies.routing.router import Router


class Longest(Policy):
    def __init__(self, factor: float = 1.0) -> None:
        self.factor = factor

    def rank(self, request: Request, state: ServerState) -> float:
        return -self.factor * request.prompt_len


class Around(PolicyWrapper):
    pass


class Drawing(Policy):
    def __init__(self, seed: int = 0) -> None:
        self.seed = seed


class Picky(Policy):
    def __init__(self, share: float) -> None:
        if share > 1:
            raise ValueError(f"share={share} is more than all")


class Failing(Policy):
    def rank(self, request: Request, state: ServerState) -> float:
        return 1 / (request.prompt_len - request.prompt_len)


class Texting(Policy):
    def rank(self, request: Request, state: ServerState) -> Any:
        return "first"


class Lucky(Policy):
    needs = ("luck",)  # type: ignore[assignment]


class Narrow(Policy):
    def rank(self, request: Request) -> float:  # type: ignore[override]
        return 0.0


class Sizeless(PagedMemory):
    def __init__(self, blocks: int) -> None:
        super().__init__(blocks, 16)


class Undecided(Autoscaler):
    pass


class Crooked(Router):
    def route(self, request: Any, replicas: Any, now: float) -> Any:
        return replicas[7]


class Stranger:
    pass


class Uncopied(Policy):
    def __init__(self) -> None:
        self.answers = (text for text in "ab")


number = 3


def local() -> type[Policy]:
    """A class that no other process finds."""

    class Local(Policy):
        pass

    return Local
