"""How long prompts and answers are: distributions, and the two that papers measure with."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from math import inf
from typing import Any, ClassVar

import numpy as np

from pagedsim.core import ConfigError
from pagedsim.core.contracts import SWITCH, WRONG, Contract, Rule, vet, whole
from pagedsim.core.errors import require_number, require_whole
from pagedsim.workload.limits import LONGEST, Tokens
from pagedsim.workload.lognormal import caps_left, sigma_of, solve_mu
from pagedsim.workload.settings import make
from pagedsim.workload.traces import read_lengths


class Lengths(ABC):
    """A distribution of prompt and answer lengths in tokens."""

    drawn: ClassVar[bool] = True  # whether chance has a part in it

    @abstractmethod
    def sample(self, count: int, rng: np.random.Generator) -> tuple[Tokens, Tokens]:
        """Prompt and output lengths of `count` requests; fewer are the beginning of more."""

    def capped(self, prompt: Tokens, output: Tokens) -> int:
        """How many of the requests that were drawn have a length at which all longer ones end."""
        return 0


def _sampled(part: Any, answer: Any, asked: Sequence[Any]) -> Any:
    """Prompts and answers as 32-bit arrays, if they are one length each for every request."""
    if not isinstance(answer, (tuple, list)) or len(answer) != 2:
        return WRONG
    try:
        columns = [np.asarray(column) for column in answer]
    except (ValueError, OverflowError):  # rows of unlike lengths
        return WRONG
    for column in columns:
        if column.dtype.kind not in "iu" or column.shape != (asked[0],):
            return WRONG
        if ((column < 1) | (column > LONGEST)).any():
            return WRONG
    return tuple(column.astype(np.int32, copy=False) for column in columns)


CONTRACT = Contract(
    Lengths,
    {
        "drawn": SWITCH,
        "sample": Rule(
            "a prompt and an output length for each of {0} requests: two arrays of whole numbers "
            f"from 1 to {LONGEST}",
            _sampled,
        ),
        "capped": whole(0),
    },
)


class Fixed(Lengths):
    """All alike."""

    drawn = False

    def __init__(self, prompt: int, output: int) -> None:
        self.prompt = require_whole("lengths.prompt", prompt, 1, LONGEST)
        self.output = require_whole("lengths.output", output, 1, LONGEST)

    def sample(self, count: int, rng: np.random.Generator) -> tuple[Tokens, Tokens]:
        return np.full(count, self.prompt, np.int32), np.full(count, self.output, np.int32)


class Uniform(Lengths):
    """Every length from min to max, both included, equally often."""

    def __init__(self, prompt_min: int, prompt_max: int, output_min: int, output_max: int) -> None:
        self.low = np.array(
            [
                require_whole("lengths.prompt_min", prompt_min, 1, LONGEST),
                require_whole("lengths.output_min", output_min, 1, LONGEST),
            ]
        )
        self.high = np.array(
            [
                require_whole("lengths.prompt_max", prompt_max, prompt_min, LONGEST),
                require_whole("lengths.output_max", output_max, output_min, LONGEST),
            ]
        )

    def sample(self, count: int, rng: np.random.Generator) -> tuple[Tokens, Tokens]:
        drawn = self.low + rng.random((count, 2)) * (self.high + 1 - self.low)
        tokens = np.minimum(drawn, self.high).astype(np.int32)
        return tokens[:, 0].copy(), tokens[:, 1].copy()


class LogNormal(Lengths):
    """Log-normal lengths, prompt and answer independent.

    `cv` is the coefficient of variation before any cut. With `max_len`, a prompt takes at most
    half of it, and the answer what is left; the means are those of what is drawn after the cut.
    """

    def __init__(
        self,
        prompt_mean: float,
        prompt_cv: float,
        output_mean: float,
        output_cv: float,
        max_len: int | None = None,
    ) -> None:
        require_number("lengths.prompt_mean", prompt_mean, above=1, high=LONGEST)
        require_number("lengths.output_mean", output_mean, above=1, high=LONGEST)
        self.sigma = (
            sigma_of(require_number("lengths.prompt_cv", prompt_cv, low=0.001, high=1000)),
            sigma_of(require_number("lengths.output_cv", output_cv, low=0.001, high=1000)),
        )
        self.max_len = None if max_len is None else require_whole("max_len", max_len, 2, LONGEST)
        # Half, as in vLLM's ShareGPT benchmark (1,024 of 2,048): every answer keeps some room.
        self.prompt_cap = inf if self.max_len is None else self.max_len // 2
        prompt_mu = solve_mu(prompt_mean, self.sigma[0], ((1.0, self.prompt_cap),))
        if prompt_mu is None:
            raise self._out_of_reach("prompt_mean", prompt_mean)
        caps = (
            ((1.0, inf),)
            if self.max_len is None
            else caps_left(prompt_mu, self.sigma[0], self.prompt_cap, self.max_len)
        )
        output_mu = solve_mu(output_mean, self.sigma[1], caps)
        if output_mu is None:
            raise self._out_of_reach("output_mean", output_mean)
        self.mu = (prompt_mu, output_mu)

    def _out_of_reach(self, key: str, mean: float) -> ConfigError:
        cut = f"max_len={self.max_len} cuts prompts at {self.prompt_cap} and answers at the rest"
        half = self.prompt_cap
        return ConfigError(
            f"lengths.{key}={mean:g}: {cut}: no distribution has that mean; raise max_len, or take "
            f"workload=fixed workload.lengths.prompt={half} workload.lengths.output={half}"
        )

    def sample(self, count: int, rng: np.random.Generator) -> tuple[Tokens, Tokens]:
        drawn = rng.standard_normal((count, 2))
        drawn *= self.sigma
        drawn += self.mu
        np.exp(drawn, out=drawn)
        np.rint(drawn, out=drawn)
        prompt = np.clip(drawn[:, 0], 1, min(self.prompt_cap, LONGEST)).astype(np.int32)
        room = LONGEST if self.max_len is None else self.max_len - prompt
        return prompt, np.clip(drawn[:, 1], 1, room).astype(np.int32)

    def capped(self, prompt: Tokens, output: Tokens) -> int:
        if self.max_len is None:
            return 0
        at_cut = (prompt == self.prompt_cap) | (output == self.max_len - prompt)
        return int(np.count_nonzero(at_cut))


class Empirical(Lengths):
    """Pairs drawn with replacement from two columns of a file.

    `path` is any trace that has lengths; with both column names given, any CSV file.
    """

    def __init__(
        self, path: str, prompt_column: str | None = None, output_column: str | None = None
    ) -> None:
        self.prompt, self.output = read_lengths(path, prompt_column, output_column)

    def sample(self, count: int, rng: np.random.Generator) -> tuple[Tokens, Tokens]:
        rows = (rng.random(count) * len(self.prompt)).astype(np.int64)
        return self.prompt[rows], self.output[rows]


class Quantiles(Lengths):
    """Lengths of which percentiles are known, all between two of them equally often; prompt and
    answer independent. With `max_len`, an answer takes what the prompt leaves of it.
    """

    def __init__(
        self,
        prompt: Mapping[float, int],
        output: Mapping[float, int],
        max_len: int | None = None,
    ) -> None:
        self.prompt = _percentiles("lengths.prompt", prompt)
        self.output = _percentiles("lengths.output", output)
        self.max_len = None if max_len is None else require_whole("max_len", max_len, 2, LONGEST)
        if max_len is not None and self.prompt[1][-1] >= max_len:
            raise ConfigError(
                f"lengths.prompt: its longest has {self.prompt[1][-1]:g} tokens: must be below "
                f"max_len={max_len}"
            )

    def sample(self, count: int, rng: np.random.Generator) -> tuple[Tokens, Tokens]:
        chance = 100 * rng.random((count, 2))
        prompt, output = (
            np.rint(np.interp(chance[:, i], *known)).astype(np.int32)
            for i, known in enumerate((self.prompt, self.output))
        )
        return prompt, output if self.max_len is None else np.minimum(output, self.max_len - prompt)

    def capped(self, prompt: Tokens, output: Tokens) -> int:
        if self.max_len is None:
            return 0
        return int(np.count_nonzero(prompt + output == self.max_len))


def _percentiles(where: str, given: object) -> tuple[list[float], list[float]]:
    """Percents and lengths, both rising."""
    if not isinstance(given, Mapping):
        raise ConfigError(f"{where}={given}: must be lengths by percent, as in {{0: 1, 100: 2048}}")
    percents = sorted(require_number(where, _number(percent), 0, 100) for percent in given)
    if len(percents) != len(given) or percents[:1] != [0] or percents[-1:] != [100]:
        raise ConfigError(f"{where}: must have the percents 0 and 100")
    by_percent = {float(_number(percent)): tokens for percent, tokens in given.items()}
    least, lengths = 1, []
    for percent in percents:
        least = require_whole(f"{where}.{percent:g}", by_percent[percent], least, LONGEST)
        lengths.append(float(least))
    return percents, lengths


def _number(percent: Any) -> Any:
    """A key of a configuration, which may be a word."""
    try:
        return float(str(percent))
    except ValueError:
        return percent


def sharegpt(max_len: int | None = None) -> LogNormal:
    """ShareGPT as in the PagedAttention paper: 161.31 tokens in, 337.99 out on average.

    The means are published; the paper's memory figure gives the spread of the answers. A request
    that has its prompt p and exactly its answer o reserved, for o steps, holds o²/2 token-steps
    that are still empty of o(p + o) in all. Figure 2 has Orca (Oracle) at 25.2 % reserved of
    63.4 % in use, so E[o²] = 3.88 E[op]. With max_len=2048 a coefficient of variation of 1.0
    before the cut (0.91 after it) gives 3.87; Orca (Oracle) and paged memory then hold 12.8 and
    32.3 requests at once, where Figure 13 has 13.6 and 30.4. No published number bounds the
    prompts' spread: 1.7 (1.25 after the cut) is their shape in Figure 11, half of them below
    ninety tokens and a few at the limit.
    """
    return LogNormal(161.31, 1.7, 337.99, 1.0, max_len)


def alpaca(max_len: int | None = None) -> LogNormal:
    """Alpaca as in the PagedAttention paper: 19.31 tokens in, 58.45 out on average.

    The answers' spread is between 1.0 and 1.3 by the 72.75 requests that Orca (Oracle) holds at
    once in Figure 13, for 63 to 80 % of its memory in use. The prompts' is the narrow hump of
    Figure 11: instructions of one sentence.
    """
    return LogNormal(19.31, 0.7, 58.45, 1.1, max_len)


SHAPES: Mapping[str, Callable[..., Lengths]] = {
    "fixed": Fixed,
    "uniform": Uniform,
    "lognormal": LogNormal,
    "empirical": Empirical,
    "quantiles": Quantiles,
    "sharegpt": sharegpt,
    "alpaca": alpaca,
}


def make_lengths(lengths: str | Mapping[str, Any] | Lengths, max_len: int | None) -> Lengths:
    """Lengths by name, or from `{"shape": name, ...}`; an object is passed through."""
    if isinstance(lengths, Lengths):
        return vet(lengths, CONTRACT)
    if isinstance(lengths, str):
        lengths = {"shape": lengths}
    if not isinstance(lengths, Mapping):
        raise ConfigError(f"lengths={lengths!r}: must be a shape, or shape: and its settings")
    given = {str(key): value for key, value in lengths.items()}
    if "shape" not in given:
        raise ConfigError(f"lengths: needs shape=, one of {', '.join(SHAPES)}")
    shape = str(given.pop("shape"))
    if "max_len" in given:
        raise ConfigError("lengths.max_len: is a setting of the workload: max_len")
    if shape in ("lognormal", "quantiles", "sharegpt", "alpaca"):
        given["max_len"] = max_len
    return make("lengths.shape", shape, SHAPES, given)
