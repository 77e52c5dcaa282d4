"""A run in numbers: what the tables of requests and steps come down to.

| key | definition |
|---|---|
| ttft | first_token - arrival |
| tpot | (finished - first_token) / (output_tokens - 1), for requests of two tokens or more |
| itl | every gap between two tokens of one request (see `gap.py`) |
| e2e | finished - arrival |
| normalized_latency | e2e / output_tokens |
| queue_time | scheduled - arrival |
| requests_per_s, output_tokens_per_s | of finished requests, over the makespan |
| goodput_per_s | finished requests within every bound of the SLO, over the makespan |
| makespan | first arrival to last finish; to the last step's end, if anybody is unfinished |
| kv_utilisation_mean | used_blocks / total_blocks over the makespan; nothing is used in no step |
| kv_waste_mean | 1 - tokens / slots of the blocks in use, over the time of steps of decodes alone |
| kv_shared_mean | shared_blocks / (used_blocks + shared_blocks), both summed over time |
| batch_size_mean | decode_seqs + prefill_requests over the time of steps |
| mfu, mbu | FLOP (bytes) / time of steps / peak |
| in_system_mean | finished requests that have arrived and are not finished, over the makespan |

`output_tokens` are those of one sequence; only rates of tokens count those of all `sequences`. A
latency has the keys `_mean`, `_p50`, `_p90` and `_p99`, in seconds, and counts requests that
finished; whoever was rejected, aborted or left unfinished is only counted. Where there is nothing
to measure the value is NaN. `clients` holds the same for each client, with rates over the makespan
of the whole run, so that they add up.

How much memory is wasted is told only where every block belongs to one sequence: where a prefix is
found in the cache, or requests have several sequences, a slot holds tokens of several, and
`kv_waste_mean` is NaN.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from pagedsim.core.errors import require_number
from pagedsim.metrics.catalogue import LATENCIES
from pagedsim.metrics.gap import token_gaps, weighted_mean, weighted_percentiles
from pagedsim.metrics.steps import Batches

Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]

_PERCENTS = (50.0, 90.0, 99.0)
_TOTALS = ("preemptions", "recomputed_tokens", "swapped_blocks", "cached_tokens")
_STATES = ("finished", "rejected", "aborted", "unfinished")
_TIMES = ("arrival", "scheduled", "first_token", "finished")
_NAN = float("nan")


@dataclass(frozen=True)
class Slo:
    """A service level objective: bounds in seconds that a request must meet, all of them."""

    ttft: float | None = None
    tpot: float | None = None
    e2e: float | None = None

    def __post_init__(self) -> None:
        for name in ("ttft", "tpot", "e2e"):
            if (bound := getattr(self, name)) is not None:
                require_number(f"slo.{name}", bound, 0)

    def met(self, latency: dict[str, Floats]) -> Mask:
        """Which requests met it; one without a TPOT has no TPOT to miss."""
        met = ~np.isnan(latency["e2e"])
        for name in ("ttft", "tpot", "e2e"):
            if (bound := getattr(self, name)) is not None:
                met &= ~(latency[name] > bound)
        return met


class LittlesLaw(NamedTuple):
    """Two ways to the same number, which holds however the requests were scheduled."""

    number: float
    """Requests in the system, averaged over time."""
    rate_times_time: float
    """Requests per second times the mean time that one stays."""


def littles_law(requests: pa.Table) -> LittlesLaw:
    """Both sides of Little's law over the finished requests; NaN for none."""
    done = _is(requests, "state", "finished")
    arrival, finished = _column(requests, "arrival")[done], _column(requests, "finished")[done]
    if not len(arrival) or (span := float(finished.max() - arrival.min())) == 0:
        return LittlesLaw(_NAN, _NAN)
    times = np.concatenate((arrival, finished))
    order = np.argsort(times, kind="stable")
    present = np.cumsum(np.where(order < len(arrival), 1.0, -1.0))
    number = float(present[:-1] @ np.diff(times[order])) / span
    return LittlesLaw(number, len(arrival) / span * float(np.mean(finished - arrival)))


def request_latencies(requests: pa.Table) -> dict[str, Floats]:
    """Every latency that is one value a request; NaN for those that did not finish."""
    arrival, scheduled, first, finished = (_column(requests, name) for name in _TIMES)
    tokens = _column(requests, "output_tokens").astype(np.float64)
    done = _is(requests, "state", "finished")

    def share(time: Floats, of: Floats) -> Floats:
        return np.divide(time, of, out=np.full(len(time), _NAN), where=done & (of > 0))

    return {
        "ttft": np.where(done, first - arrival, _NAN),
        "tpot": share(finished - first, tokens - 1),
        "e2e": np.where(done, finished - arrival, _NAN),
        "normalized_latency": share(finished - arrival, tokens),
        "queue_time": np.where(done, scheduled - arrival, _NAN),
    }


def summarise(
    requests: pa.Table,
    steps: Batches,
    *,
    total_blocks: int,
    block_size: int,
    max_seqs: int,
    slo: Slo | None = None,
    flops: float | None = None,
    bytes: float | None = None,
    peak_flops: float | None = None,
    peak_bandwidth: float | None = None,
) -> dict[str, Any]:
    """The summary of one run, as the module's table defines it.

    `flops` and `bytes` are what the run's steps took in all; with the peak of the hardware they
    give `mfu` and `mbu`, which are left out otherwise, as `goodput_per_s` is without an `slo`.
    """
    served = _Served(requests, steps, slo)
    summary = served.measure(np.ones(requests.num_rows, dtype=bool))
    clients = pc.unique(requests["client"]).to_pylist()
    if len(clients) == 1:
        groups = {clients[0]: dict(summary)}
    else:
        groups = {c: served.measure(_is(requests, "client", c)) for c in _by_urgency(requests)}
    summary["makespan"] = served.makespan
    summary["in_system_mean"] = littles_law(requests).number
    use = _use(steps, block_size)
    batch = _ratio(use.sequences, use.busy)
    summary["kv_utilisation_mean"] = _ratio(use.blocks, served.makespan * total_blocks)
    summary["kv_shared_mean"] = _ratio(use.shared, use.blocks + use.shared)
    summary["kv_waste_mean"] = _NAN if _shared(requests) else _ratio(use.waste, use.known)
    summary |= {"batch_size_mean": batch, "batch_fill_mean": _ratio(batch, max_seqs)}
    if flops is not None and peak_flops:
        summary["mfu"] = _ratio(flops, use.busy * peak_flops)
    if bytes is not None and peak_bandwidth:
        summary["mbu"] = _ratio(bytes, use.busy * peak_bandwidth)
    summary |= {"total_blocks": total_blocks, "block_size": block_size, "max_seqs": max_seqs}
    return summary | {"clients": groups}


class _Served:
    """The requests of a run, and what was measured of each."""

    def __init__(self, requests: pa.Table, steps: Batches, slo: Slo | None) -> None:
        self.columns = {
            name: _column(requests, name)
            for name in ("first_token", "finished", "output_tokens", "sequences", *_TOTALS)
        }
        self.states = {state: _is(requests, "state", state) for state in _STATES}
        self.latency = request_latencies(requests)
        self.met = slo.met(self.latency) if slo is not None else None
        self.ends, last = _ends(steps)
        finished = self.columns["finished"][self.states["finished"]]
        over = float(finished.max()) if len(finished) else _NAN
        if self.states["unfinished"].any():
            over = last
        begun = _column(requests, "arrival")
        self.makespan = over - float(begun.min()) if len(begun) else _NAN

    def measure(self, mask: Mask) -> dict[str, Any]:
        """The metrics of the requests in `mask`."""
        done = mask & self.states["finished"]
        summary: dict[str, Any] = {"requests": int(mask.sum())}
        summary |= {state: int(np.sum(mask & which)) for state, which in self.states.items()}
        for name in LATENCIES:
            values, weights = self._gaps(done) if name == "itl" else self._values(name, done)
            summary[f"{name}_mean"] = weighted_mean(values, weights)
            for percent, value in zip(
                _PERCENTS, weighted_percentiles(values, weights, _PERCENTS), strict=True
            ):
                summary[f"{name}_p{percent:.0f}"] = float(value)
        tokens = int((self.columns["output_tokens"] * self.columns["sequences"])[done].sum())
        summary["requests_per_s"] = _ratio(int(done.sum()), self.makespan)
        summary["output_tokens_per_s"] = _ratio(tokens, self.makespan)
        if self.met is not None:
            summary["goodput_per_s"] = _ratio(int(np.sum(self.met & mask)), self.makespan)
        return summary | {name: int(self.columns[name][mask].sum()) for name in _TOTALS}

    def _values(self, name: str, done: Mask) -> tuple[Floats, Floats]:
        values = self.latency[name][done]
        values = values[~np.isnan(values)]
        return values, np.ones(len(values))

    def _gaps(self, done: Mask) -> tuple[Floats, Floats]:
        several = done & (self.columns["output_tokens"] > 1)
        names = ("first_token", "finished", "output_tokens", "preemptions")
        return token_gaps(self.ends, *(self.columns[name][several] for name in names))


class _Use(NamedTuple):
    """Sums over steps, weighted by how long each took."""

    busy: float = 0.0
    """Their time."""
    blocks: float = 0.0
    shared: float = 0.0
    sequences: float = 0.0
    known: float = 0.0
    """The time of those in which all who hold memory decode."""
    waste: float = 0.0
    """In that time."""

    @classmethod
    def of(cls, part: pa.RecordBatch, block_size: int) -> _Use:
        """Of some steps."""
        seconds = _column(part, "end") - _column(part, "start")
        used, decodes = _column(part, "used_blocks"), _column(part, "decode_seqs")
        served = decodes + _column(part, "prefill_requests")
        # Of a prompt that is not whole it is not recorded how many of its tokens are in memory.
        plain = (decodes > 0) & (decodes == _column(part, "running")) & (used > 0)
        waste = 1 - _column(part, "decode_context")[plain] / (used[plain] * float(block_size))
        return cls(
            float(seconds.sum()),
            float(seconds @ used),
            float(seconds @ _column(part, "shared_blocks")),
            float(seconds @ served),
            float(seconds[plain].sum()),
            float(seconds[plain] @ waste),
        )


def _ends(steps: Batches) -> tuple[Floats, float]:
    """When steps in which somebody decoded ended; and when the last of all did."""
    decodes, last = [np.empty(0)], _NAN
    for part in steps.to_batches():
        ends = _column(part, "end")
        decodes.append(ends[_column(part, "decode_seqs") > 0])
        last = float(ends[-1])
    return np.concatenate(decodes), last


def _use(steps: Batches, block_size: int) -> _Use:
    """How full memory and batch were."""
    parts = steps.to_batches()
    return _Use(
        *(sum(sums) for sums in zip(_Use(), *(_Use.of(p, block_size) for p in parts), strict=True))
    )


def _shared(requests: pa.Table) -> bool:
    """Whether any block may have held tokens of several sequences."""
    found, sequences = _column(requests, "cached_tokens"), _column(requests, "sequences")
    return bool((found > 0).any() or (sequences > 1).any())


def _by_urgency(requests: pa.Table) -> list[str]:
    """The clients, those with the smallest priorities first."""
    mean = requests.group_by("client").aggregate([("priority", "mean")]).to_pydict()
    pairs = zip(mean["priority_mean"], mean["client"], strict=True)
    return [client for _, client in sorted(pairs)]


def _ratio(some: float, of: float) -> float:
    return some / of if of else _NAN


def _is(table: pa.Table, name: str, word: str) -> Mask:
    column = table[name]
    if not len(column):
        return np.zeros(0, dtype=bool)
    return np.asarray(pc.equal(column, word).to_numpy())


def _column(table: pa.Table, name: str) -> NDArray[Any]:
    return np.asarray(table[name].to_numpy())
