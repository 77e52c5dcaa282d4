"""Cost model linear in the features of a step, with coefficients fitted to measurements."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from inspect import signature
from math import inf
from operator import gt
from os import PathLike
from pathlib import Path
from typing import Any

from pagedsim.core import ConfigError, StepPlan
from pagedsim.core.errors import require_number, require_whole, unknown
from pagedsim.sim.cost.base import (
    BUS_EFFICIENCY,
    Breakdown,
    CostModel,
    Term,
    kind_of,
    move_seconds,
)
from pagedsim.sim.cost.fitting import (
    FEATURES,
    KINDS,
    SWAP,
    Coefficients,
    Sample,
    features_of,
    fit_kinds,
    fit_swaps,
)
from pagedsim.sim.cost.roofline import slowdown
from pagedsim.sim.cost.terms import lengthened
from pagedsim.sim.replica import Replica

UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}


class Fitted(CostModel):
    """One set of coefficients for each kind of step: all prefill, all decode, or mixed.

    `decode_large` replaces `decode` from `large_batch` sequences on. Without a set for mixed
    steps, one costs the larger of the two constants and what prefill and decode add to theirs.
    `limits` are the largest measured values of features, `fitted_for` what was measured (model,
    hardware, tensor_parallel, kv_cache_dtype, quantization, async_scheduling); `notices` reports
    larger steps and different setups. `swap` has the time of moving blocks one way, `constant` and
    per block (`blocks`); without it, transfers follow the hardware's data sheet. `block_tokens`
    makes decodes read slower from smaller blocks than those of `fitted_block_size`, and faster from
    larger ones (see `slowdown`). In a pipeline each stage takes its fraction of the time, as in
    DistServe's simulator.
    """

    def __init__(
        self,
        replica: Replica,
        *,
        prefill: Mapping[str, float],
        decode: Mapping[str, float],
        decode_large: Mapping[str, float] | None = None,
        large_batch: int | None = None,
        mixed: Mapping[str, float] | None = None,
        swap: Mapping[str, float] | None = None,
        unit: str = "ms",
        limits: Mapping[str, float] | None = None,
        fitted_for: Mapping[str, object] | None = None,
        source: str = "",
        bus_efficiency: float = BUS_EFFICIENCY,
        block_tokens: float = 0.0,
        fitted_block_size: int | None = None,
    ) -> None:
        if unit not in UNITS:
            raise unknown("cost.unit", unit, UNITS)
        if (decode_large is None) != (large_batch is None):
            raise ConfigError("cost.decode_large and cost.large_batch: give both or neither")
        scale = UNITS[unit]
        if large_batch is not None:
            require_whole("cost.large_batch", large_batch, 1)
        require_number("cost.bus_efficiency", bus_efficiency, above=0, high=1)
        read = _reading(replica.block_size, block_tokens, fitted_block_size)
        limits = _numbers("cost.limits", limits or {}, "feature", FEATURES[1:])
        known = (*_identity(replica), QUANTIZATION, AHEAD)
        fitted_for = _mapping("cost.fitted_for", fitted_for or {}, "key", known)
        self._prefill = _coefficients("cost.prefill", prefill, scale)
        self._decode = _coefficients("cost.decode", decode, scale).reading(read)
        large = _coefficients("cost.decode_large", decode_large or {}, scale)
        self._decode_large = large.reading(read)
        self._beside = self._prefill.beside(self._decode)
        self._beside_large = self._prefill.beside(self._decode_large)
        if mixed is not None:
            beside = _coefficients("cost.mixed", mixed, scale).reading(read)
            self._beside = self._beside_large = beside
        super().__init__(replica)
        self.settings: dict[str, Any] = {
            "unit": unit,
            "prefill": dict(prefill),
            "decode": dict(decode),
            "decode_large": decode_large and dict(decode_large),
            "large_batch": large_batch,
            "mixed": mixed and dict(mixed),
            "swap": swap and dict(swap),
            "limits": limits,
            "fitted_for": fitted_for,
            "source": source,
            "bus_efficiency": bus_efficiency,
            "block_tokens": block_tokens,
            "fitted_block_size": fitted_block_size,
        }
        if replica.expert_parallel > 1:
            raise ConfigError(
                f"expert_parallel={replica.expert_parallel}: must be 1, since a fit does not "
                "model it; use cost=roofline"
            )
        stages = replica.pipeline_parallel
        self._slowest = replica.most_layers / replica.model.layers
        self._few = stages
        """Steps with fewer decodes have fewer micro-batches than stages."""
        self._large_batch = inf if large_batch is None else large_batch * stages
        self._line = _line(self._staged(self._decode, stages, prompts=False))
        self._line_large = _line(self._staged(self._decode_large, stages, prompts=False))
        self._most = tuple(limits.get(name, inf) for name in FEATURES[1:])
        self._max_count = limits.get("decode_count", inf)
        self._max_context = limits.get("decode_context", inf)
        self.bus_efficiency = bus_efficiency
        self._start, self._move = 0.0, move_seconds(replica, bus_efficiency)
        if swap is not None:
            moves = _numbers("cost.swap", swap, "coefficient", SWAP)
            self._start, self._move = (scale * moves.get(name, 0.0) for name in SWAP)
        self._beyond = self._ahead = False

    @classmethod
    def fit(
        cls,
        samples: Iterable[Sample],
        replica: Replica,
        *,
        ahead: bool = False,
        **settings: Any,
    ) -> Fitted:
        """Fit recorded steps.

        Each kind needs more steps than it has coefficients; without enough prefill or decode steps
        the fit of mixed steps is used. `ahead`: the steps ran with async scheduling.
        """
        rows = list(samples)
        fits = fit_kinds(rows)
        sets = {kind: kind_fit.coefficients for kind, kind_fit in fits.items()}
        for kind in ("prefill", "decode"):
            if kind not in sets:
                if "mixed" not in sets:
                    need = len(KINDS[kind]) + 1
                    raise ConfigError(f"samples: need at least {need} {kind} or mixed steps")
                sets[kind] = {name: sets["mixed"][name] for name in KINDS[kind]}
        if swaps := fit_swaps(rows, fits):
            sets["swap"] = swaps.coefficients
        return cls(
            replica,
            unit="s",
            limits={name: max(getattr(row, name) for row in rows) for name in FEATURES[1:]},
            fitted_for=_identity(replica) | {AHEAD: ahead},
            prefill=sets["prefill"],
            decode=sets["decode"],
            mixed=sets.get("mixed"),
            swap=sets.get("swap"),
            **settings,
        )

    @classmethod
    def load(cls, path: str | PathLike[str], replica: Replica, **settings: Any) -> Fitted:
        """Load the JSON file written by `save`."""
        try:
            content = json.loads(Path(path).read_text())
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
        except ValueError as error:
            raise ConfigError(f"{path}: is not JSON: {error}") from error
        if not isinstance(content, dict):
            raise ConfigError(f"{path}: must hold an object, not a {type(content).__name__}")
        for key in content:
            if key not in SETTINGS:
                raise unknown(f"key in {path}:", key, SETTINGS)
        for key in ("prefill", "decode"):
            if not isinstance(content.get(key), dict):
                raise ConfigError(f"{path}: has no {key} coefficients")
        try:
            return cls(replica, **(content | settings))
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from error

    def save(self, path: str | PathLike[str]) -> None:
        """Write the coefficients in their unit, with all settings."""
        known = {key: value for key, value in self.settings.items() if value}
        Path(path).write_text(json.dumps(known, indent=2) + "\n")

    def slowed(self, factor: float) -> Fitted:
        """The same model for a machine slower by a factor; data-sheet times are unchanged."""
        sets = ("prefill", "decode", "decode_large", "mixed", "swap")
        slower = {
            name: {key: value * factor for key, value in self.settings[name].items()}
            for name in sets
            if self.settings[name]
        }
        return Fitted(self.replica, **(self.settings | slower))

    def step_seconds(self, plan: StepPlan) -> float:
        if plan.ahead:
            self._ahead = True
        if not plan.prefill_tokens:
            return self.decode_seconds(plan.decode_count, plan.decode_context)
        if any(map(gt, features_of(plan), self._most)):
            self._beyond = True
        constant, token, attend, context, sequence, read = self._coefficients(plan)
        return (
            constant
            + plan.prefill_tokens * token
            + plan.prefill_attention * attend
            + plan.prefill_context * context
            + plan.decode_count * sequence
            + plan.decode_context * read
        )

    def decode_seconds(self, sequences: int, context: int) -> float:
        if sequences > self._max_count or context > self._max_context:
            self._beyond = True
        if not sequences:
            return 0.0
        if sequences < self._few:
            constant, sequence, read = _line(self._staged(self._decode, sequences, prompts=False))
        else:
            small = sequences < self._large_batch
            constant, sequence, read = self._line if small else self._line_large
        return constant + sequences * sequence + context * read

    def _staged(self, whole: Coefficients, tokens: int, prompts: bool) -> Coefficients:
        """Coefficients of a step split into micro-batches and stages as in `Split`."""
        passes = min(tokens, self.replica.pipeline_parallel)
        long = lengthened(passes, self._slowest, prompts)
        constant, *others = whole
        return Coefficients(constant * long, *(value * long / passes for value in others))

    def swap_seconds(self, blocks: int) -> float:
        return self._start + blocks * self._move if blocks else 0.0

    def recompute_seconds(self, tokens: int) -> float:
        if not tokens:
            return 0.0
        constant, token, attend, context, _, _ = self._staged(self._prefill, tokens, prompts=True)
        return constant + tokens * token + tokens * tokens * attend + tokens * context

    def explain(self, plan: StepPlan) -> Breakdown:
        terms: list[Term] = []
        if plan.prefill_tokens or plan.decode_count:
            parts = zip(FEATURES, self._coefficients(plan), (1, *features_of(plan)), strict=True)
            terms = [Term(name.replace("_", " "), rate * of, "fitted") for name, rate, of in parts]
        return Breakdown(kind_of(plan), tuple(terms), self.work(plan))

    def _coefficients(self, plan: StepPlan) -> Coefficients:
        large, tokens = plan.decode_count >= self._large_batch, plan.prefill_tokens
        if not tokens:
            coefficients = self._decode_large if large else self._decode
        elif not plan.decode_count:
            coefficients = self._prefill
        else:
            coefficients = self._beside_large if large else self._beside
        if self._few == 1:
            return coefficients
        return self._staged(coefficients, tokens + plan.decode_count, prompts=bool(tokens))

    @property
    def notices(self) -> list[str]:
        fitted_for = self.settings["fitted_for"]
        lines = [
            f"step times are fitted for {key}={fitted_for[key]}, but {key}={value} is served"
            for key, value in _identity(self.replica).items()
            if key != QUANTIZATION and fitted_for.get(key, value) != value
        ]
        weights, served = fitted_for.get(QUANTIZATION), self.replica.quantization
        if fitted_for and weights != served:
            lines.append(
                f"step times are fitted for {QUANTIZATION}={weights or 'null'}, but "
                f"{QUANTIZATION}={served or 'null'} is served"
            )
        if (fitted := bool(fitted_for.get(AHEAD))) != self._ahead:
            lines.append(
                f"step times are fitted for {AHEAD}={str(fitted).lower()}, and no host time is "
                f"{'added' if fitted else 'hidden'}"
            )
        if self._few > 1:
            lines.append(
                f"pipeline_parallel={self._few}: each stage is taken to need its part of the "
                "fitted times, and nothing for what it hands on"
            )
        if self._beyond:
            most = ", ".join(f"{k} {v:,.0f}" for k, v in self.settings["limits"].items())
            lines.append(f"some steps are larger than any that was fitted ({most})")
        return lines


AHEAD = "async_scheduling"
"""In `fitted_for`: whether steps ran with async scheduling."""
QUANTIZATION = "quantization"
"""In `fitted_for`, for quantised weights only."""

SETTINGS = tuple(signature(Fitted).parameters)[1:]


def _coefficients(where: str, values: object, scale: float) -> Coefficients:
    """Coefficients of a configuration, scaled to seconds."""
    numbers = _numbers(where, values, "coefficient", FEATURES)
    return Coefficients(**{key: value * scale for key, value in numbers.items()})


def _reading(block_size: int, block_tokens: float, fitted_block_size: int | None) -> float:
    """Slowdown of decode reads for this block size, relative to the fitted one."""
    require_number("cost.block_tokens", block_tokens, 0)
    if fitted_block_size is None:
        if block_tokens:
            raise ConfigError(
                f"cost.block_tokens={block_tokens}: needs cost.fitted_block_size, too"
            )
        return 1.0
    require_whole("cost.fitted_block_size", fitted_block_size, 1)
    return slowdown(block_size, block_tokens) / slowdown(fitted_block_size, block_tokens)


def _line(decode: Coefficients) -> tuple[float, float, float]:
    return decode.constant, decode.decode_count, decode.decode_context


def _identity(replica: Replica) -> dict[str, object]:
    weights = {} if replica.quantization is None else {QUANTIZATION: replica.quantization}
    return weights | {
        "model": replica.model.name,
        "hardware": replica.hardware.name,
        "tensor_parallel": replica.tensor_parallel,
        "kv_cache_dtype": replica.kv_format,
    }


def _mapping(where: str, values: object, kind: str, known: Iterable[str]) -> dict[str, Any]:
    """Copy a mapping; raises ConfigError for keys other than `known`."""
    if not isinstance(values, Mapping):
        raise ConfigError(f"{where}={values!r}: must be a mapping")
    for key in values:
        if key not in known:
            raise unknown(f"{kind} in {where}:", str(key), known)
    return dict(values)


def _numbers(where: str, values: object, kind: str, known: Iterable[str]) -> dict[str, float]:
    """Copy a mapping to non-negative numbers; raises ConfigError for other values or keys."""
    numbers = _mapping(where, values, kind, known)
    for key, value in numbers.items():
        require_number(f"{where}.{key}", value, 0)
    return numbers
