"""Metrics of memory, batches and hardware, included in those of `definitions.py`."""

from __future__ import annotations

from pagedsim.metrics.metric import LESS, MORE, NEITHER, Metrics
from pagedsim.metrics.tables import NAN, RunTables, StepPart, ratio

USE = Metrics()


def _used(steps: StepPart) -> tuple[float, ...]:
    return (steps.seconds @ steps["used_blocks"] * steps.block_size,)


@USE.whole("KV use", "share", NEITHER, sums=_used)
def kv_utilisation_mean(run: RunTables, used: float) -> float:
    """Blocks in use as a share of all, averaged over the makespan; blocks of unlike sizes count by
    their slots."""
    return ratio(used, run.makespan * run.slots)


def _shared_and_used(steps: StepPart) -> tuple[float, ...]:
    shared, used = (steps.seconds @ steps[name] for name in ("shared_blocks", "used_blocks"))
    return shared * steps.block_size, used * steps.block_size


@USE.whole("KV shared", "share", MORE, sums=_shared_and_used)
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


@USE.whole("KV waste", "share", LESS, sums=_wasted)
def kv_waste_mean(run: RunTables, waste: float, known: float) -> float:
    """Slots of used blocks that hold no token, as a share, averaged over the time of steps in
    which all requests in memory decode; undefined where requests share blocks, whose slots count
    for several at once."""
    # Blocks are shared where a prefix is found in the cache, or a request has several sequences.
    found, sequences = run.requests["cached_tokens"], run.requests["sequences"]
    return NAN if (found > 0).any() or (sequences > 1).any() else ratio(waste, known)


def _batch(steps: StepPart) -> tuple[float, ...]:
    served = steps["decode_seqs"] + steps["prefill_requests"]
    return steps.seconds @ served, steps.seconds.sum()


@USE.whole("Batch size", "count", NEITHER, sums=_batch)
def batch_size_mean(run: RunTables, sequences: float, busy: float) -> float:
    """Sequences served in a step, averaged over the time that steps take."""
    return ratio(sequences, busy)


@USE.whole("Batch fill", "share", NEITHER, sums=_batch)
def batch_fill_mean(run: RunTables, sequences: float, busy: float) -> float:
    """Batch size as a share of max_seqs."""
    return ratio(ratio(sequences, busy), run.max_seqs)


def _busy(steps: StepPart) -> tuple[float, ...]:
    return (steps.seconds.sum(),)


@USE.whole("MFU", "share", MORE, sums=_busy)
def mfu(run: RunTables, busy: float) -> float | None:
    """Model FLOP/s utilisation: floating point operations done in the time that steps take, as a
    share of the peak."""
    return _of_peak(run.flops, run.peak_flops, busy)


@USE.whole("MBU", "share", MORE, sums=_busy)
def mbu(run: RunTables, busy: float) -> float | None:
    """Model bandwidth utilisation: bytes of weights and KV read in the time that steps take, as a
    share of the peak."""
    return _of_peak(run.bytes, run.peak_bandwidth, busy)


@USE.whole("Energy", "J", LESS, sums=_busy)
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


@USE.whole("Mean power", "W", LESS, sums=_busy)
def mean_watts(run: RunTables, busy: float) -> float | None:
    """Energy of all GPUs, over the makespan."""
    joules = energy_j(run, busy)
    return None if joules is None else ratio(joules, run.makespan)


@USE.whole("Tokens per joule", "1/J", MORE, sums=_busy)
def tokens_per_joule(run: RunTables, busy: float) -> float | None:
    """Tokens generated for finished requests, over the energy of all GPUs."""
    joules = energy_j(run, busy)
    return None if joules is None else ratio(_answered(run), joules)


@USE.whole("Availability", "share", MORE)
def availability(run: RunTables) -> float | None:
    """Of the time for which replicas were to be there, the share in which they were: the rest they
    were dead."""
    if run.spans is None or (down := run.of_spans(lambda span: not span.there)) is None:
        return None
    return ratio(run.server_seconds, run.server_seconds + down)


@USE.whole("Cost", "€", LESS)
def cost_eur(run: RunTables) -> float | None:
    """What all GPUs cost over the makespan, at work or not; a replica while it is there."""
    if run.euros_per_hour is None:
        return None
    if run.spans is None:
        return run.euros_per_hour / run.servers * run.server_seconds / 3600
    hourly = run.of_spans(lambda span: span.euros_per_hour if span.there else 0.0)
    return None if hourly is None else hourly / 3600


@USE.whole("Tokens per euro", "1/€", MORE)
def tokens_per_euro(run: RunTables) -> float | None:
    """Tokens generated for finished requests, over the cost of all GPUs."""
    euros = cost_eur(run)
    return None if euros is None else ratio(_answered(run), euros)


@USE.whole("Per million tokens", "€", LESS)
def euro_per_million_tokens(run: RunTables) -> float | None:
    """The cost of all GPUs for a million tokens generated for finished requests."""
    euros = cost_eur(run)
    return None if euros is None else ratio(1e6 * euros, _answered(run))


def _answered(run: RunTables) -> int:
    """Tokens generated for finished requests."""
    return int(run.requests.generated[run.requests.are("finished")].sum())


def _of_peak(work: float | None, peak: float | None, busy: float) -> float | None:
    return None if work is None or not peak else ratio(work, busy * peak)
