"""Definitions of all metrics, for summaries, tables, plots and pages.

A metric is a decorated function, in the order of the summary; its docstring is its explanation in
reports. `latency` is for one value per request, `group` for one number of a group of requests,
`run` for one of the run. Their arguments are in `tables.py`, the column names in `recorder.py`
and `steps.py`.

`output_tokens` are those of one sequence; token rates and service count all `sequences`. Latencies
are of finished requests; rejected, aborted and unfinished ones are only counted. A metric without
data is NaN. A session is finished when all its requests are; one with a rejected, aborted, unsent
or unfinished request is not counted.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pagedsim.metrics.metric import LESS, MORE, NEITHER, Metrics
from pagedsim.metrics.service import jain
from pagedsim.metrics.steps import CAME_FROM, HOST
from pagedsim.metrics.tables import (
    NAN,
    WORKING_SET,
    Floats,
    RequestGroup,
    Requests,
    RunTables,
    StepPart,
    ratio,
)

METRICS = Metrics()


@METRICS.group("Requests sent", "count", NEITHER)
def requests(group: RequestGroup) -> int:
    """Requests that arrived."""
    return int(group.mask.sum())


@METRICS.group("Finished", "count", MORE)
def finished(group: RequestGroup) -> int:
    """Requests served to their end."""
    return group.count("finished")


@METRICS.group("Rejected", "count", LESS)
def rejected(group: RequestGroup) -> int:
    """Requests that could never have been served."""
    return group.count("rejected")


@METRICS.group("Aborted", "count", LESS)
def aborted(group: RequestGroup) -> int:
    """Requests given up on the way."""
    return group.count("aborted")


@METRICS.group("Unfinished", "count", LESS)
def unfinished(group: RequestGroup) -> int:
    """Requests still alive at the run's end."""
    return group.count("unfinished")


@METRICS.latency("TTFT")
def ttft(requests: Requests) -> Floats:
    """Time to first token: from arrival to the first token."""
    return np.asarray(requests["first_token"] - requests["arrival"])


@METRICS.latency("TPOT")
def tpot(requests: Requests) -> Floats:
    """Time per output token: from the first token to the last, divided by the tokens after the
    first; one value a request of two or more tokens."""
    return _divided(requests["finished"] - requests["first_token"], _tokens(requests) - 1)


@METRICS.distribution("ITL")
def itl(group: RequestGroup) -> Floats | tuple[Floats, Floats]:
    """Inter-token latency: every gap between two tokens of one request; one value a token."""
    if (times := group.run.token_times) is not None:
        return times.gaps(group.finished)
    return group.run.stretches.gaps(group.finished)


@METRICS.latency("E2E")
def e2e(requests: Requests) -> Floats:
    """End to end: from arrival to the last token."""
    return np.asarray(requests["finished"] - requests["arrival"])


@METRICS.latency("E2E per token")
def normalized_latency(requests: Requests) -> Floats:
    """E2E divided by the tokens generated."""
    return _divided(e2e(requests), _tokens(requests))


@METRICS.latency("Queue time")
def queue_time(requests: Requests) -> Floats:
    """From arrival until first scheduled."""
    return np.asarray(requests["scheduled"] - requests["arrival"])


class SessionTimes(NamedTuple):
    """Finished sessions: duration, time without a request at the server, tokens generated."""

    seconds: Floats
    away: Floats
    tokens: Floats


@METRICS.group("Sessions finished", "count", MORE)
def sessions_finished(group: RequestGroup) -> int | None:
    """Sessions all of whose requests were served to their end."""
    spans = _session_times(group)
    return None if spans is None else len(spans.seconds)


@METRICS.distribution("Session time")
def session_time(group: RequestGroup) -> Floats | None:
    """From the first arrival of a finished session to its last answer."""
    spans = _session_times(group)
    return None if spans is None else spans.seconds


@METRICS.distribution("Session at server")
def session_served_time(group: RequestGroup) -> Floats | None:
    """The part of a finished session in which any of its requests waited or was served: without
    the time in which its user thinks or its tools run."""
    spans = _session_times(group)
    return None if spans is None else spans.seconds - spans.away


@METRICS.distribution("Session per token")
def session_time_per_token(group: RequestGroup) -> Floats | None:
    """Session time divided by the tokens generated in the session, those of all sequences of all
    its requests: one value a finished session that generated any."""
    if (spans := _session_times(group)) is None:
        return None
    some = spans.tokens > 0
    return spans.seconds[some] / spans.tokens[some]


@METRICS.group("Sessions", "1/s", MORE)
def sessions_per_s(group: RequestGroup) -> float | None:
    """Sessions finished, over the makespan."""
    spans = _session_times(group)
    return None if spans is None else group.per_second(len(spans.seconds))


@METRICS.group("Requests", "1/s", MORE)
def requests_per_s(group: RequestGroup) -> float:
    """Requests finished, over the makespan."""
    return group.per_second(group.count("finished"))


@METRICS.group("Output tokens", "1/s", MORE)
def output_tokens_per_s(group: RequestGroup) -> float:
    """Tokens generated for finished requests, those of all their sequences and beams, over the
    makespan."""
    return group.per_second(int(group.requests.generated[group.finished].sum()))


@METRICS.group("Goodput", "1/s", MORE)
def goodput_per_s(group: RequestGroup) -> float | None:
    """Requests that met every bound of the service level objective, those of their own client
    where it has any, over the time from the first arrival to the last; over the makespan where all
    arrive at once, or once others are answered (closed loop)."""
    met = _met(group)
    return None if met is None else group.run.per_second_of_arrivals(met)


@METRICS.group("SLO attainment", "share", MORE)
def slo_attainment(group: RequestGroup) -> float | None:
    """Requests that met every bound of the service level objective, as a share of those that
    arrived."""
    met = _met(group)
    return None if met is None else ratio(met, int(group.mask.sum()))


@METRICS.group("Preemptions", "count", LESS)
def preemptions(group: RequestGroup) -> float:
    """Times a request lost its memory."""
    return group.total("preemptions")


@METRICS.group("Retries", "count", LESS)
def retries(group: RequestGroup) -> float | None:
    """Times a request began anew, for its replica had died."""
    return None if group.requests.optional("retries") is None else group.total("retries")


@METRICS.group("Recomputed tokens", "count", LESS)
def recomputed_tokens(group: RequestGroup) -> float:
    """Tokens whose keys and values a request had computed, lost with its memory or its replica, and
    computed again; what a prefix cache still had of them does not count."""
    return group.total("recomputed_tokens")


@METRICS.group("Swapped blocks", "count", LESS)
def swapped_blocks(group: RequestGroup) -> float:
    """Blocks copied between GPU and CPU, out and in."""
    return group.total("swapped_blocks")


@METRICS.group("Cached tokens", "count", MORE)
def cached_tokens(group: RequestGroup) -> float:
    """Prompt tokens found in the prefix cache at first admission."""
    return group.total("cached_tokens")


@METRICS.group("Prefix hits", "share", MORE)
def hit_rate(group: RequestGroup) -> float:
    """Cached tokens, as a share of the prompt tokens of all requests that were not rejected."""
    wanted = group.mask & ~group.requests.in_state("rejected")
    prompts = group.requests["prompt_tokens"][wanted].sum()
    return ratio(group.total("cached_tokens"), float(prompts))


@METRICS.group("GPU hits", "count", NEITHER)
def gpu_hit_tokens(group: RequestGroup) -> float:
    """Tokens found in the GPU's prefix cache at any admission: with the hits below it and prefilled
    tokens, all that requests needed before they could decode, again after preemptions."""
    return group.total("gpu_hit_tokens")


@METRICS.group("Host hits", "count", NEITHER)
def host_hit_tokens(group: RequestGroup) -> float:
    """Tokens that were found in the host tier and loaded, at any admission."""
    return group.total("host_hit_tokens")


@METRICS.group("Storage hits", "count", NEITHER)
def storage_hit_tokens(group: RequestGroup) -> float:
    """Tokens that were found below the host tier and loaded, at any admission."""
    return group.total("storage_hit_tokens")


@METRICS.group("Prefilled tokens", "count", LESS)
def prefill_tokens(group: RequestGroup) -> float:
    """Tokens of prompts that were computed, and after preemptions those of answers, too."""
    return group.total("prefill_tokens")


@METRICS.group("Fetched tokens", "count", NEITHER)
def fetched_tokens(group: RequestGroup) -> float | None:
    """Prompt tokens that a replica got from the prefix cache of another before it computed the
    rest; those that are still there when it is admitted are GPU hits, too."""
    fetches = group.requests.optional("fetched_tokens") is not None
    return group.total("fetched_tokens") if fetches else None


@METRICS.run("Written blocks", "count", LESS)
def written_blocks(run: RunTables) -> int | None:
    """Blocks that were written to the host tier, swaps left out."""
    return run.tiers[HOST].written_blocks if run.tiers else None


@METRICS.run("Swapped at once", "count", LESS)
def swapped_peak(run: RunTables) -> int | None:
    """The most blocks that were on the CPU at once."""
    return run.swapped_peak


@METRICS.run("Working set", "count", NEITHER)
def working_set_peak(run: RunTables) -> float | None:
    """The most distinct tokens that requests touched within a minute, of prompts and answers: as
    much memory would have kept all that was used lately. A request touches its tokens from when it
    is first scheduled until it ends."""
    sizes = run.requests.optional(WORKING_SET)
    return None if sizes is None else float(np.fmax.reduce(sizes, initial=0.0))


@METRICS.group("Service", "count", NEITHER)
def service(group: RequestGroup) -> float:
    """What requests got, finished or not: 1 for each token of a prompt whose first token came,
    and 2 for each token generated."""
    return float(group.run.service[group.mask].sum())


@METRICS.group("QoE", "share", MORE)
def qoe(group: RequestGroup) -> float:
    """Quality of experience (Andes): of the time that a reader spent until each token, the share
    that was no delay against an answer that begins after qoe.ttft and comes at
    qoe.tokens_per_s; mean over finished requests."""
    values = group.run.qoe[group.finished]
    return float(np.mean(values)) if len(values) else NAN


@METRICS.run("Service gap", "count", LESS)
def service_gap(run: RunTables) -> float | None:
    """The largest difference between the service that two clients got within any time in which
    both had requests in the queue that had not been scheduled; of more than 32 clients, those
    farthest from the mean are compared. Of several replicas it is approximate with more than four
    million tokens: those of an answer count as evenly spread over its time."""
    return run.service_over_time.gap_while_waiting() if len(run.clients) > 1 else None


@METRICS.run("Service Jain", "share", MORE)
def service_jain(run: RunTables) -> float | None:
    """Jain's index of the clients' service a second while they had requests in the queue that had
    not been scheduled: 100 % where all are alike; clients that never had any are left out. It
    is approximate where the service gap is."""
    return jain(run.service_over_time.rates_while_waiting()) if len(run.clients) > 1 else None


@METRICS.run("Makespan", "s", LESS)
def makespan(run: RunTables) -> float:
    """From the first arrival to the last finish."""
    return run.makespan


@METRICS.run("In system", "count", NEITHER)
def in_system_mean(run: RunTables) -> float:
    """Finished requests that are waiting or being served, averaged over the makespan."""
    times = run.requests.per_request(e2e)[run.requests.in_state("finished")]
    return ratio(float(times.sum()), run.makespan)


def _used(steps: StepPart) -> tuple[float, ...]:
    return (steps.seconds @ steps["used_blocks"] * steps.block_size,)


@METRICS.run("KV use", "share", NEITHER, sums=_used)
def kv_utilisation_mean(run: RunTables, used: float) -> float:
    """Blocks in use as a share of all, averaged over the makespan; blocks of unlike sizes count by
    their slots."""
    return ratio(used, run.makespan * run.slots)


def _shared_and_used(steps: StepPart) -> tuple[float, ...]:
    shared, used = (steps.seconds @ steps[name] for name in ("shared_blocks", "used_blocks"))
    return shared * steps.block_size, used * steps.block_size


@METRICS.run("KV shared", "share", MORE, sums=_shared_and_used)
def kv_shared_mean(run: RunTables, shared: float, used: float) -> float:
    """Blocks that sharing saves, as a share of those that would be in use without it, over time:
    beyond its first owner, each owner of a block would need one of its own."""
    return ratio(shared, used + shared)


def _wasted(steps: StepPart) -> tuple[float, ...]:
    used, decodes = steps["used_blocks"], steps["decode_seqs"]
    # Tokens in memory are not recorded for partially computed prompts.
    known = (decodes > 0) & (decodes == steps["running"]) & (used > 0)
    waste = 1 - steps["decode_context"][known] / (used[known] * float(steps.block_size))
    return steps.seconds[known] @ waste, steps.seconds[known].sum()


@METRICS.run("KV waste", "share", LESS, sums=_wasted)
def kv_waste_mean(run: RunTables, waste: float, known: float) -> float:
    """Slots of used blocks that hold no token, as a share, averaged over the time of steps in
    which all requests in memory decode; undefined where requests share blocks, whose slots count
    for several at once, or they or their prefixes move between replicas, which hold blocks for
    those on their way."""
    # Blocks are shared where a prefix is found in the cache, or a request has several sequences.
    cached, sequences = run.requests["cached_tokens"], run.requests["sequences"]
    shared = (cached > 0).any() or (sequences > 1).any()
    moving = any(run.requests.optional(name) is not None for name in (CAME_FROM, "fetched_tokens"))
    return NAN if shared or moving else ratio(waste, known)


def _batch(steps: StepPart) -> tuple[float, ...]:
    group = steps["decode_seqs"] + steps["prefill_requests"]
    return steps.seconds @ group, steps.seconds.sum()


@METRICS.run("Batch size", "count", NEITHER, sums=_batch)
def batch_size_mean(run: RunTables, sequences: float, busy: float) -> float:
    """Sequences served in a step, averaged over the time that steps take."""
    return ratio(sequences, busy)


@METRICS.run("Batch fill", "share", NEITHER, sums=_batch)
def batch_fill_mean(run: RunTables, sequences: float, busy: float) -> float:
    """Batch size as a share of max_seqs."""
    return ratio(ratio(sequences, busy), run.max_seqs)


def _busy(steps: StepPart) -> tuple[float, ...]:
    return (steps.seconds.sum(),)


@METRICS.run("MFU", "share", MORE, sums=_busy)
def mfu(run: RunTables, busy: float) -> float | None:
    """Model FLOP/s utilisation: floating point operations done in the time that steps take, as a
    share of the peak."""
    return _of_peak(run.flops, run.peak_flops, busy)


@METRICS.run("MBU", "share", MORE, sums=_busy)
def mbu(run: RunTables, busy: float) -> float | None:
    """Model bandwidth utilisation: bytes of weights and KV read in the time that steps take, as a
    share of the peak."""
    return _of_peak(run.bytes, run.peak_bandwidth, busy)


@METRICS.run("Energy", "J", LESS, sums=_busy)
def energy_j(run: RunTables, busy: float) -> float | None:
    """Energy of all GPUs over the makespan, by the backend's model of their power: what steps draw
    by their FLOP and bytes, and idle GPUs between them."""
    if run.joules is None or run.idle_watts is None:
        return None
    mean = run.idle_watts / run.servers
    if run.spans is None:
        return run.joules + mean * max(run.server_seconds - busy, 0.0)
    idle = run.of_spans(lambda span: span.idle_watts if span.there else 0.0)
    return None if idle is None else run.joules + idle - mean * busy


@METRICS.run("Mean power", "W", LESS, sums=_busy)
def mean_watts(run: RunTables, busy: float) -> float | None:
    """Energy of all GPUs, over the makespan."""
    joules = energy_j(run, busy)
    return None if joules is None else ratio(joules, run.makespan)


@METRICS.run("Tokens per joule", "1/J", MORE, sums=_busy)
def tokens_per_joule(run: RunTables, busy: float) -> float | None:
    """Tokens generated for finished requests, those of all their sequences and beams, over the
    energy of all GPUs."""
    joules = energy_j(run, busy)
    return None if joules is None else ratio(_answered(run), joules)


@METRICS.run("Availability", "share", MORE)
def availability(run: RunTables) -> float | None:
    """Of the time for which replicas were to be there, the share in which they were: the rest they
    were dead."""
    if run.spans is None or (down := run.of_spans(lambda span: not span.there)) is None:
        return None
    return ratio(run.server_seconds, run.server_seconds + down)


@METRICS.run("Cost", "€", LESS)
def cost_eur(run: RunTables) -> float | None:
    """What all GPUs cost over the makespan, at work or not; a replica while it is there."""
    if run.euros_per_hour is None:
        return None
    if run.spans is None:
        return run.euros_per_hour / run.servers * run.server_seconds / 3600
    hourly = run.of_spans(lambda span: span.euros_per_hour if span.there else 0.0)
    return None if hourly is None else hourly / 3600


@METRICS.run("Tokens per euro", "1/€", MORE)
def tokens_per_euro(run: RunTables) -> float | None:
    """Tokens generated for finished requests, those of all their sequences and beams, over the
    cost of all GPUs."""
    euros = cost_eur(run)
    return None if euros is None else ratio(_answered(run), euros)


@METRICS.run("Per million tokens", "€", LESS)
def euro_per_million_tokens(run: RunTables) -> float | None:
    """The cost of all GPUs for a million tokens generated for finished requests, those of all
    their sequences and beams."""
    euros = cost_eur(run)
    return None if euros is None else ratio(1e6 * euros, _answered(run))


@METRICS.run("Load imbalance", "share", LESS)
def load_imbalance(run: RunTables) -> float | None:
    """Tokens that the steps of the busiest replica computed, of prompts and answers, as a share of
    the mean over all replicas of its role: 100 % is even. Of several roles it is the largest."""
    if run.replica_sums is None:
        return None
    return float(np.fmax.reduce(run.replica_sums.load))


@METRICS.run("Imbalance over time", "share", LESS)
def imbalance_over_time(run: RunTables) -> float | None:
    """How unevenly requests, waiting or served, lie on the replicas of a role: the standard
    deviation of their numbers as a share of the mean, over all moments, each counted by the
    requests that are there then. Replicas that differ in speed are not even at their best."""
    return None if run.replica_sums is None else run.replica_sums.imbalance()


def _met(group: RequestGroup) -> int | None:
    """Number of requests that met the SLO; None without one."""
    if group.run.slo is None:
        return None
    latencies = {
        metric.__name__: group.requests.per_request(metric) for metric in (ttft, tpot, e2e)
    }
    met = group.run.slo.met(latencies, lambda client: group.requests.where("client", client))
    return int(np.sum(met & group.mask))


def _tokens(requests: Requests) -> Floats:
    return requests["output_tokens"].astype(np.float64)


def _divided(times: Floats, by: Floats) -> Floats:
    return np.divide(times, by, out=np.full(len(times), NAN), where=by > 0)


def _session_times(group: RequestGroup) -> SessionTimes | None:
    """The finished sessions; None if no request belongs to one."""
    if (session := group.run.session) is None:
        return None
    rows = np.flatnonzero(group.mask & (session >= 0))
    if not len(rows):
        return SessionTimes(*np.zeros((3, 0)))
    arrival, finished = (group.requests[name][rows] for name in ("arrival", "finished"))
    order = np.lexsort((arrival, session[rows]))
    rows, arrival, finished = rows[order], arrival[order], finished[order]
    begins = np.flatnonzero(np.diff(session[rows], prepend=-1))
    whole = np.logical_and.reduceat(group.finished[rows], begins)
    stops, last = np.append(begins[1:], len(rows)), np.empty(len(rows))
    for begin, stop in zip(begins, stops, strict=True):  # the latest end within the session so far
        last[begin:stop] = np.maximum.accumulate(finished[begin:stop])
    gaps = np.concatenate([[0.0], np.maximum(arrival[1:] - last[:-1], 0.0)])
    gaps[begins] = 0.0
    generated = group.requests.generated[rows].astype(np.float64)
    away, tokens = (np.add.reduceat(values, begins) for values in (gaps, generated))
    return SessionTimes((last[stops - 1] - arrival[begins])[whole], away[whole], tokens[whole])


def _answered(run: RunTables) -> int:
    """Tokens generated for finished requests, in all sequences."""
    return int(run.requests.generated[run.requests.in_state("finished")].sum())


def _of_peak(work: float | None, peak: float | None, busy: float) -> float | None:
    return None if work is None or not peak else ratio(work, busy * peak)
