"""Cost models around another one: recorded step durations, and decodes alone."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path

from pagedsim.core import ConfigError, PagedsimError, StepPlan
from pagedsim.core.errors import require_number
from pagedsim.sim.cost.base import Breakdown, CostModel, ModelledPrices, Term, kind_of
from pagedsim.sim.cost.roofline import Roofline
from pagedsim.sim.cost.work import Work
from pagedsim.sim.replica import Replica


class Replay(CostModel):
    """A step takes as long as the recorded step of the same number.

    Recorded times include transfers over the bus, so swaps add nothing. Prices needed in advance
    (`preemption=cheapest`) come from `estimate`.
    """

    by_totals = False

    def __init__(
        self,
        durations: Sequence[float] | Mapping[int, float],
        estimate: CostModel,
        source: str = "the recording",
    ) -> None:
        numbered = durations if isinstance(durations, Mapping) else dict(enumerate(durations))
        for step, seconds in numbered.items():
            require_number(f"{source}: seconds of step {step}", seconds, 0)
        if not numbered:
            raise ConfigError(f"{source}: holds no steps")
        self.durations = dict(numbered)
        self.estimate = estimate
        self.source = source

    @classmethod
    def load(
        cls, path: str | PathLike[str], replica: Replica, estimate: CostModel | None = None
    ) -> Replay:
        """Load a run's steps.parquet (step, start, end), or a JSON list of seconds.

        `estimate` defaults to a roofline.
        """
        read = _parquet if Path(path).suffix == ".parquet" else _json
        return cls(read(path), estimate or Roofline(replica), str(path))

    def step_seconds(self, plan: StepPlan) -> float:
        try:
            return self.durations[plan.number]
        except KeyError:
            first, last = min(self.durations), max(self.durations)
            raise PagedsimError(
                f"{self.source}: has steps {first} to {last}, "
                f"but the run needs a step {plan.number}"
            ) from None

    def decode_seconds(self, sequences: int, context: int) -> float:
        raise PagedsimError("cost=replay: indexes steps by their number, not by their totals")

    def swap_seconds(self, blocks: int) -> float:
        return 0.0

    def recompute_seconds(self, tokens: int) -> float:
        return self.estimate.recompute_seconds(tokens)

    def work(self, plan: StepPlan) -> Work:
        return self.estimate.work(plan)

    def explain(self, plan: StepPlan) -> Breakdown:
        term = Term(f"step {plan.number}", self.step_seconds(plan), "recorded")
        return Breakdown(kind_of(plan), (term,), self.work(plan))

    def prices(self) -> ModelledPrices:
        return self.estimate.prices()


def _json(path: str | PathLike[str]) -> list[float]:
    try:
        values = json.loads(Path(path).read_text())
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path}: is not JSON: {error}") from error
    if not isinstance(values, list):
        raise ConfigError(f"{path}: must be a list of seconds (or a steps.parquet)")
    return values


def _parquet(path: str | PathLike[str]) -> dict[int, float]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = ["step", "start", "end"]
    try:
        read = pq.read_table(path)
    except FileNotFoundError as error:
        raise ConfigError(f"{path}: cannot be read: No such file or directory") from error
    except (OSError, pa.ArrowInvalid) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    if missing := [name for name in columns if name not in read.column_names]:
        raise ConfigError(f"{path}: has no column {', '.join(missing)}")
    if "replica" in read.column_names:
        count = len(read["replica"].unique())
        raise ConfigError(f"{path}: has steps of {count} replicas; must be those of one server")
    table = read.select(columns).to_pydict()
    return {
        step: end - start
        for step, start, end in zip(*(table[name] for name in columns), strict=True)
    }


class Decodes(CostModel):
    """Steps take the time of their decodes alone."""

    def __init__(self, whole: CostModel) -> None:
        self._whole = whole
        self.by_totals = whole.by_totals
        self.bus_efficiency = whole.bus_efficiency

    @property
    def notices(self) -> list[str]:
        return ["prompts take no time, as if they came computed", *self._whole.notices]

    def step_seconds(self, plan: StepPlan) -> float:
        return self._whole.step_seconds(_without_chunks(plan)) if plan.decode_count else 0.0

    def decode_seconds(self, sequences: int, context: int) -> float:
        return self._whole.decode_seconds(sequences, context)

    def swap_seconds(self, blocks: int) -> float:
        return self._whole.swap_seconds(blocks)

    def recompute_seconds(self, tokens: int) -> float:
        return 0.0

    def explain(self, plan: StepPlan) -> Breakdown:
        return self._whole.explain(_without_chunks(plan))

    def work(self, plan: StepPlan) -> Work:
        return self._whole.work(_without_chunks(plan))


def _without_chunks(plan: StepPlan) -> StepPlan:
    part = StepPlan(plan.number, plan.now, plan.ahead)
    part._decodes = plan.decodes
    part._decode_count, part._decode_context = plan.decode_count, plan.decode_context
    return part
