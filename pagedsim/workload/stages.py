"""Stages of constant rate over repeated prompts with shared prefixes, as load generators run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagedsim.core import ConfigError
from pagedsim.core.errors import refuse_settings, require_number, require_whole
from pagedsim.workload.arrivals import Poisson
from pagedsim.workload.draws import stream
from pagedsim.workload.limits import LONGEST, MOST, refuse_late
from pagedsim.workload.tokens import PrefixedPrompts
from pagedsim.workload.workload import Workload


@dataclass(frozen=True)
class Stage:
    """A request rate held for a number of seconds."""

    rate: float
    seconds: float

    @property
    def requests(self) -> int:
        """Number of requests, at least one."""
        return max(round(self.rate * self.seconds), 1)


def shared_prefix(
    *,
    stages: object,
    pause: float,
    groups: int,
    questions: int,
    prefix_len: int,
    question_len: int,
    output_len: int,
    seed: int = 0,
) -> Workload:
    """Poisson arrivals at each stage's rate, `pause` seconds after the last of the stage before.

    Prompts are of `groups` with a common prefix of `prefix_len` tokens, each with `questions`
    different suffixes of `question_len`. All are sent round robin over all stages, in an order that
    is shuffled once.

    >>> shared_prefix(stages=[{"rate": 2, "seconds": 5}], pause=0, groups=3, questions=2,
    ...               prefix_len=30, question_len=10, output_len=5)
    Workload(10 requests over 5.35877 s, 40 tokens in and 5 out on average)
    """
    found = stages_of(stages)
    require_number("pause", pause, low=0)
    for name, value in (("groups", groups), ("questions", questions)):
        require_whole(name, value, 1, 1_000_000)
    lengths = {"prefix_len": prefix_len, "question_len": question_len, "output_len": output_len}
    for name, value in lengths.items():
        require_whole(name, value, 1, LONGEST)
    arrival = _arrivals(found, pause, stream(seed, "arrivals"))
    refuse_late("stages", arrival[-1])
    order = stream(seed, "prompts").permutation(groups * questions)
    asked = order[np.arange(len(arrival)) % len(order)].astype(np.int32)
    prompt_len = np.full(len(arrival), prefix_len + question_len, np.int32)
    shared = np.full(len(arrival), prefix_len, np.int32)
    prompts = PrefixedPrompts(asked // questions, shared, prompt_len, own=asked)
    return Workload.of(arrival, prompt_len, output_len, prompts=prompts)


def stages_of(stages: object) -> list[Stage]:
    """Stages from settings; raises ConfigError that names an invalid one."""
    if not isinstance(stages, Sequence) or isinstance(stages, str) or not stages:
        raise ConfigError(f"stages={stages!r}: must be a list with at least one {{rate, seconds}}")
    return [_stage(f"stages.{place}", one) for place, one in enumerate(stages)]


def _stage(where: str, settings: Any) -> Stage:
    if not isinstance(settings, dict):
        raise ConfigError(f"{where}={settings!r}: must be {{rate, seconds}}")
    refuse_settings("a stage", settings, Stage, where)
    for name, value in settings.items():
        require_number(f"{where}.{name}", value, above=0)
    stage = Stage(**settings)
    if stage.rate * stage.seconds > MOST:
        raise ConfigError(
            f"{where}: {stage.rate * stage.seconds:g} requests: must be at most {MOST}"
        )
    return stage


def _arrivals(
    stages: Sequence[Stage], pause: float, rng: np.random.Generator
) -> NDArray[np.float64]:
    parts, begin = [], 0.0
    for stage in stages:
        times = begin + Poisson(stage.rate).times(stage.requests, rng)
        parts.append(times)
        begin = float(times[-1]) + pause
    return np.concatenate(parts)
