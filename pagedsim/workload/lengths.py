"""Prompt and output length distributions, including the papers' ShareGPT and Alpaca.

Clipping a log-normal tail at `max_len` lowers its mean, so the location parameter is solved for:
the mean after the cut is the requested one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from math import erfc, exp, inf, log, sqrt
from typing import Any, ClassVar

import numpy as np

from pagedsim.core import ConfigError
from pagedsim.core.contracts import SWITCH, WRONG, Contract, Rule, vet, whole
from pagedsim.core.errors import require_number, require_whole
from pagedsim.workload.limits import LONGEST, Tokens, make
from pagedsim.workload.traces import read_lengths

Weighted = tuple[tuple[float, float], ...]
"""(weight, cap): a mixture of caps, the weights summing to 1."""


def sigma_of(cv: float) -> float:
    """Standard deviation of the logarithm, from the coefficient of variation."""
    return sqrt(log(1 + cv**2))


def mean_of(mu: float, sigma: float, caps: Weighted) -> float:
    """Mean of min(X, cap) in whole tokens, at least 1, for log-normal X.

    It is asked for some hundred times for a study, so the probabilities that X is below a bound,
    erfc((mu - log(bound)) / (sigma * sqrt(2))) / 2, are written out.
    """
    # Rounding changes the mean only for short lengths, which are therefore summed one by one.
    few = min([16, *[int(cap) for _, cap in caps if cap < inf]])
    scale, moved = sigma * sqrt(2), mu + sigma**2
    mean = below = 0.0
    for count in range(1, few + 1):
        before, below = below, erfc((mu - log(count + 0.5)) / scale) / 2
        mean += count * (below - before)
    whole = exp(mu + sigma**2 / 2)
    counted = erfc((moved - log(few + 0.5)) / scale) / 2
    for weight, cap in caps:
        if cap == inf:
            mean += weight * (whole * max(1.0 - counted, 0.0))
            continue
        above = 1 - max(erfc((mu - log(cap)) / scale) / 2, below)
        middle = max(erfc((moved - log(cap)) / scale) / 2 - counted, 0.0)
        mean += weight * (whole * middle + cap * above)
    return mean


@cache  # all arms and seeds of a study need the same value
def solve_mu(mean: float, sigma: float, caps: Weighted) -> float | None:
    """The location parameter that gives this mean, or None if none does."""
    low, high = log(mean) - 8 * sigma - 2, log(mean) + 8 * sigma + 2
    for _ in range(60):
        middle = (low + high) / 2
        if mean_of(middle, sigma, caps) < mean:
            low = middle
        else:
            high = middle
    mu = (low + high) / 2
    return mu if abs(mean_of(mu, sigma, caps) / mean - 1) < 1e-6 else None


def caps_left(mu: float, sigma: float, first_cap: float, total: float) -> Weighted:
    """Caps left by a first draw clipped at `first_cap` out of `total`, as a mixture."""
    points, reach = 161, 6.0
    grid = [reach * (2 * i / (points - 1) - 1) for i in range(points)]
    weights = [exp(-z * z / 2) for z in grid]
    scale = sum(weights)
    drawn = [min(max(exp(mu + sigma * z), 1.0), first_cap) for z in grid]
    return tuple((weight / scale, total - x) for weight, x in zip(weights, drawn, strict=True))


class Lengths(ABC):
    """A joint distribution of prompt and output lengths in tokens."""

    drawn: ClassVar[bool] = True  # whether it is random

    @abstractmethod
    def sample(self, count: int, rng: np.random.Generator) -> tuple[Tokens, Tokens]:
        """Prompt and output lengths; a smaller `count` must give a prefix of a larger."""

    def capped(self, prompt: Tokens, output: Tokens) -> int:
        """Number of sampled requests whose prompt or output is at the cap."""
        return 0


def _sampled(part: Any, answer: Any, asked: Sequence[Any]) -> Any:
    """Validate sampled lengths: a prompt and an output length per request, as 32-bit arrays."""
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
    """Constant lengths."""

    drawn = False

    def __init__(self, prompt: int, output: int) -> None:
        self.prompt = require_whole("lengths.prompt", prompt, 1, LONGEST)
        self.output = require_whole("lengths.output", output, 1, LONGEST)

    def sample(self, count: int, rng: np.random.Generator) -> tuple[Tokens, Tokens]:
        return np.full(count, self.prompt, np.int32), np.full(count, self.output, np.int32)


class Uniform(Lengths):
    """Uniform integer lengths between min and max, inclusive."""

    def __init__(self, prompt_min: int, prompt_max: int, output_min: int, output_max: int) -> None:
        low, high = (prompt_min, output_min), (prompt_max, output_max)
        names = ("prompt", "output")
        for name, least in zip(names, low, strict=True):
            require_whole(f"lengths.{name}_min", least, 1, LONGEST)
        for name, least, most in zip(names, low, high, strict=True):
            require_whole(f"lengths.{name}_max", most, least, LONGEST)
        self.low, self.high = np.array(low), np.array(high)

    def sample(self, count: int, rng: np.random.Generator) -> tuple[Tokens, Tokens]:
        drawn = self.low + rng.random((count, 2)) * (self.high + 1 - self.low)
        tokens = np.minimum(drawn, self.high).astype(np.int32)
        return tokens[:, 0].copy(), tokens[:, 1].copy()


class LogNormal(Lengths):
    """Log-normal lengths, prompt and output independent.

    `cv` is the coefficient of variation before clipping. With `max_len`, a prompt is clipped at
    half of it and the output at the remainder; the means are those after clipping.
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
        # Half, as in vLLM's ShareGPT benchmark (1,024 of 2,048), leaves room for every output.
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
        cap = self.prompt_cap
        return ConfigError(
            f"lengths.{key}={mean:g}: {cut}: no distribution has that mean; raise max_len, or take "
            f"workload=fixed workload.lengths.prompt={cap} workload.lengths.output={cap}"
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
    """(prompt, output) pairs sampled with replacement from a file.

    `path` is any trace with lengths, or any CSV file if both column names are given.
    """

    def __init__(
        self, path: str, prompt_column: str | None = None, output_column: str | None = None
    ) -> None:
        self.prompt, self.output = read_lengths(path, prompt_column, output_column)

    def sample(self, count: int, rng: np.random.Generator) -> tuple[Tokens, Tokens]:
        rows = (rng.random(count) * len(self.prompt)).astype(np.int64)
        return self.prompt[rows], self.output[rows]


class Quantiles(Lengths):
    """Lengths interpolated linearly between given percentiles, prompt and output independent.

    With `max_len`, the output is clipped at what the prompt leaves.
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
    """Percents and lengths, both increasing."""
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
    """Convert a configuration key, which may be a string, to a number."""
    try:
        return float(str(percent))
    except ValueError:
        return percent


def sharegpt(max_len: int | None = None) -> LogNormal:
    """ShareGPT as in the PagedAttention paper: 161.31 prompt and 337.99 output tokens on average.

    The means are published; the paper's memory figure gives the spread of the outputs. A request
    that reserves its prompt p and exactly its output o for o steps leaves o²/2 of o(p + o)
    token-steps empty. Figure 2 has Orca (Oracle) at 25.2 % reserved of
    63.4 % in use, so E[o²] = 3.88 E[op]. With max_len=2048 a coefficient of variation of 1.0
    before the cut (0.91 after it) gives 3.87; Orca (Oracle) and paged memory then hold 12.8 and
    32.3 requests at once, where Figure 13 has 13.6 and 30.4. No published number bounds the
    prompts' spread: 1.7 (1.25 after the cut) is their shape in Figure 11, half of them below
    ninety tokens and a few at the limit.
    """
    return LogNormal(161.31, 1.7, 337.99, 1.0, max_len)


def alpaca(max_len: int | None = None) -> LogNormal:
    """Alpaca as in the PagedAttention paper: 19.31 prompt and 58.45 output tokens on average.

    The outputs' coefficient of variation is between 1.0 and 1.3, from the 72.75 requests that Orca
    (Oracle) batches in Figure 13, for 63 to 80 % of its memory in use. The prompts' is read off
    the narrow peak in Figure 11: one-sentence instructions.
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
    """Lengths by name or from `{"shape": name, ...}`; objects pass through."""
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
