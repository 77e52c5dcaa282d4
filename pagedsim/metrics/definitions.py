"""Definitions of all metrics, for summaries, tables, plots and pages.

A metric is a decorated function, in the order of the summary; its docstring is its explanation in
reports. `latency` is for one value per request, `tally` for one number of a group of requests,
`whole` for one of the run. Their arguments are in `tables.py`, the column names in `recorder.py`
and `steps.py`. Metrics of sessions are in `sessions.py`, those of memory, batches and hardware in
`use.py`.

`output_tokens` are those of one sequence; token rates and service count all `sequences`. Latencies
are of finished requests; rejected, aborted and unfinished ones are only counted. A metric without
data is NaN.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pagedsim.metrics.gap import token_gaps
from pagedsim.metrics.metric import LESS, MORE, NEITHER, Metrics
from pagedsim.metrics.service import jain
from pagedsim.metrics.sessions import SESSIONS
from pagedsim.metrics.tables import NAN, Floats, Requests, RunTables, Served, ratio
from pagedsim.metrics.use import USE

METRICS = Metrics()


class LittlesLaw(NamedTuple):
    """Both sides of Little's law, which are equal under any scheduling."""

    number: float
    """Requests in the system, averaged over time."""
    rate_times_time: float
    """Arrival rate times mean time in system."""


def littles_law(requests: Requests) -> LittlesLaw:
    """Both sides of Little's law over the finished requests; NaN for none."""
    done = requests.are("finished")
    arrival, finished = requests["arrival"][done], requests["finished"][done]
    if not len(arrival) or (span := float(finished.max() - arrival.min())) == 0:
        return LittlesLaw(NAN, NAN)
    times = np.concatenate((arrival, finished))
    order = np.argsort(times, kind="stable")
    present = np.cumsum(np.where(order < len(arrival), 1.0, -1.0))
    number = float(present[:-1] @ np.diff(times[order])) / span
    return LittlesLaw(number, len(arrival) / span * float(np.mean(finished - arrival)))


@METRICS.tally("Requests sent", "count", NEITHER)
def requests(served: Served) -> int:
    """Requests that arrived."""
    return int(served.mask.sum())


@METRICS.tally("Finished", "count", MORE)
def finished(served: Served) -> int:
    """Requests served to their end."""
    return served.count("finished")


@METRICS.tally("Rejected", "count", LESS)
def rejected(served: Served) -> int:
    """Requests that could never have been served."""
    return served.count("rejected")


@METRICS.tally("Aborted", "count", LESS)
def aborted(served: Served) -> int:
    """Requests given up on the way."""
    return served.count("aborted")


@METRICS.tally("Unfinished", "count", LESS)
def unfinished(served: Served) -> int:
    """Requests still alive at the run's end."""
    return served.count("unfinished")


@METRICS.latency("TTFT")
def ttft(each: Requests) -> Floats:
    """Time to first token: from arrival to the first token."""
    return np.asarray(each["first_token"] - each["arrival"])


@METRICS.latency("TPOT")
def tpot(each: Requests) -> Floats:
    """Time per output token: from the first token to the last, divided by the tokens after the
    first; one value a request of two or more tokens."""
    return _divided(each["finished"] - each["first_token"], _tokens(each) - 1)


@METRICS.spread("ITL")
def itl(served: Served) -> tuple[Floats, Floats]:
    """Inter-token latency: every gap between two tokens of one request; one value a token."""
    if (times := served.run.token_times) is not None:
        gaps = times.gaps(served.finished)
        return gaps, np.ones(len(gaps))
    several = served.finished & (served.requests["output_tokens"] > 1)
    names = ("first_token", "finished", "output_tokens", "preemptions")
    found = []
    for rows, ends in served.run.by_replica():
        some = rows[several[rows]]
        first, last, tokens, preemptions = (served.requests[name][some] for name in names)
        begun = served.run.begun[some]
        found.append(token_gaps(ends, first, last, tokens, preemptions, begun))
    if len(found) == 1:
        return found[0]
    values, counts = zip(*found, strict=True)
    return np.concatenate(values), np.concatenate(counts)


@METRICS.latency("E2E")
def e2e(each: Requests) -> Floats:
    """End to end: from arrival to the last token."""
    return np.asarray(each["finished"] - each["arrival"])


@METRICS.latency("E2E per token")
def normalized_latency(each: Requests) -> Floats:
    """E2E divided by the tokens generated."""
    return _divided(e2e(each), _tokens(each))


@METRICS.latency("Queue time")
def queue_time(each: Requests) -> Floats:
    """From arrival until first scheduled."""
    return np.asarray(each["scheduled"] - each["arrival"])


METRICS.update(SESSIONS)


@METRICS.tally("Requests", "1/s", MORE)
def requests_per_s(served: Served) -> float:
    """Requests finished, over the makespan."""
    return served.per_second(served.count("finished"))


@METRICS.tally("Output tokens", "1/s", MORE)
def output_tokens_per_s(served: Served) -> float:
    """Tokens generated for finished requests, over the makespan."""
    return served.per_second(int(served.requests.generated[served.finished].sum()))


@METRICS.tally("Goodput", "1/s", MORE)
def goodput_per_s(served: Served) -> float | None:
    """Requests that met every bound of the service level objective, those of their own client
    where it has any, over the makespan."""
    met = _met(served)
    return None if met is None else served.per_second(met)


@METRICS.tally("SLO attainment", "share", MORE)
def slo_attainment(served: Served) -> float | None:
    """Requests that met every bound of the service level objective, as a share of those that
    arrived."""
    met = _met(served)
    return None if met is None else ratio(met, int(served.mask.sum()))


@METRICS.tally("Preemptions", "count", LESS)
def preemptions(served: Served) -> float:
    """Times a request lost its memory."""
    return served.total("preemptions")


@METRICS.tally("Retries", "count", LESS)
def retries(served: Served) -> float | None:
    """Times a request began anew, for its replica had died."""
    return served.total("retries") if served.requests.has("retries") else None


@METRICS.tally("Recomputed tokens", "count", LESS)
def recomputed_tokens(served: Served) -> float:
    """Tokens whose keys and values were thrown away and computed again."""
    return served.total("recomputed_tokens")


@METRICS.tally("Swapped blocks", "count", LESS)
def swapped_blocks(served: Served) -> float:
    """Blocks copied between GPU and CPU, out and in."""
    return served.total("swapped_blocks")


@METRICS.tally("Cached tokens", "count", MORE)
def cached_tokens(served: Served) -> float:
    """Prompt tokens found in the prefix cache at first admission."""
    return served.total("cached_tokens")


@METRICS.tally("Prefix hits", "share", MORE)
def hit_rate(served: Served) -> float:
    """Cached tokens, as a share of the prompt tokens of all requests that were not rejected."""
    wanted = served.mask & ~served.requests.are("rejected")
    prompts = served.requests["prompt_tokens"][wanted].sum()
    return ratio(served.total("cached_tokens"), float(prompts))


@METRICS.whole("Loaded tokens", "count", NEITHER)
def loaded_tokens(run: RunTables) -> int | None:
    """Tokens that were found in the tiers below the GPU and loaded; again where a request that
    lost its memory comes back."""
    return None if run.tiers is None else sum(use.loaded_tokens for use in run.tiers.values())


@METRICS.whole("Written blocks", "count", LESS)
def written_blocks(run: RunTables) -> int | None:
    """Blocks that were written to the tiers below the GPU, swaps left out."""
    return None if run.tiers is None else sum(use.written_blocks for use in run.tiers.values())


@METRICS.whole("Swapped at once", "count", LESS)
def swapped_peak(run: RunTables) -> int | None:
    """The most blocks that were on the CPU at once."""
    return run.swapped_peak


@METRICS.tally("Service", "count", NEITHER)
def service(served: Served) -> float:
    """What requests got, finished or not: 1 for each token of a prompt whose first token came,
    and 2 for each token generated."""
    return float(served.run.service[served.mask].sum())


@METRICS.tally("QoE", "share", MORE)
def qoe(served: Served) -> float:
    """Quality of experience (Andes): of the time that a reader spent until each token, the share
    that was no delay against an answer that begins after qoe.ttft and comes at
    qoe.tokens_per_s; mean over finished requests."""
    values = served.run.qoe[served.finished]
    return float(np.mean(values)) if len(values) else NAN


@METRICS.whole("Service gap", "count", LESS)
def service_gap(run: RunTables) -> float | None:
    """The largest difference between the service that two clients got within any time in which
    both had requests in the queue that had not been scheduled; of more than 32 clients, those
    farthest from the mean are compared."""
    return run.service_over_time.gap_while_waiting() if len(run.clients) > 1 else None


@METRICS.whole("Service Jain", "share", MORE)
def service_jain(run: RunTables) -> float | None:
    """Jain's index of the clients' service a second while they had requests in the queue that had
    not been scheduled: 100 % where all are alike; clients that never had any are left out."""
    return jain(run.service_over_time.rates_while_waiting()) if len(run.clients) > 1 else None


@METRICS.whole("Makespan", "s", LESS)
def makespan(run: RunTables) -> float:
    """From the first arrival to the last finish."""
    return run.makespan


@METRICS.whole("In system", "count", NEITHER)
def in_system_mean(run: RunTables) -> float:
    """Finished requests that are waiting or being served, averaged over the makespan."""
    return littles_law(run.requests).number


METRICS.update(USE)


@METRICS.whole("Load imbalance", "share", LESS)
def load_imbalance(run: RunTables) -> float | None:
    """Tokens that the steps of the busiest replica computed, of prompts and answers, as a share of
    the mean over all replicas of its role: 100 % is even. Of several roles it is the largest."""
    if run.lanes is None:
        return None
    return float(np.fmax.reduce(run.lanes.load))


@METRICS.whole("Imbalance over time", "share", LESS)
def imbalance_over_time(run: RunTables) -> float | None:
    """How unevenly requests, waiting or served, lie on the replicas of a role: the standard
    deviation of their numbers as a share of the mean, over all moments, each counted by the
    requests that are there then. Replicas that differ in speed are not even at their best."""
    return None if run.lanes is None else run.lanes.imbalance()


def _met(served: Served) -> int | None:
    """Number of requests that met the SLO; None without one."""
    if served.run.slo is None:
        return None
    latencies = {one.__name__: served.requests.each(one) for one in (ttft, tpot, e2e)}
    met = served.run.slo.met(latencies, lambda client: served.requests.where("client", client))
    return int(np.sum(met & served.mask))


def _tokens(each: Requests) -> Floats:
    return each["output_tokens"].astype(np.float64)


def _divided(times: Floats, by: Floats) -> Floats:
    return np.divide(times, by, out=np.full(len(times), NAN), where=by > 0)
