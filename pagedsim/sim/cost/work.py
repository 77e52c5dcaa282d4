"""The FLOP and bytes of a step: arithmetic on a model's shape, before any hardware."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from pagedsim.sim.hardware import Hardware
from pagedsim.sim.replica import Replica


class Work(NamedTuple):
    """What one GPU has to do."""

    flop: float
    bytes: float
    """Read from memory."""

    def seconds(self, flop_rate: float, bandwidth: float) -> float:
        """The roofline: the longer of computing and reading, which overlap."""
        return max(self.flop / flop_rate, self.bytes / bandwidth)

    def mfu(self, seconds: float, hardware: Hardware) -> float:
        """The part of the peak FLOP rate that doing it in `seconds` takes."""
        return self.flop / seconds / hardware.flop_rate

    def mbu(self, seconds: float, hardware: Hardware) -> float:
        """The part of the peak memory bandwidth that doing it in `seconds` takes.

        >>> a2 = Hardware("two terabytes", 80, bandwidth_gb_s=2000, fp16_tflops=300, pcie_gb_s=32)
        >>> Work(flop=0, bytes=14e9).mbu(0.014, a2)
        0.5
        """
        return self.bytes / seconds / hardware.bandwidth


def causal_pairs(tokens: float, context: float, attention: float) -> float:
    """Pairs of tokens of which one attends to the other, in all chunks of a step.

    A chunk of l tokens that ends at context c has l·c − l(l − 1)/2 of them. A plan has the sums
    of l, of c and of l·c, not that of l²; taking it as Σlc · Σl / Σc is exact for one chunk, for
    chunks that are alike, and for whole prompts of any lengths (each l = c).

    >>> causal_pairs(tokens=3, context=3, attention=9)
    6.0
    """
    return attention - 0.5 * (attention * tokens / context - tokens)


def matrix_product(m: int, k: int, n: int, dtype_bytes: float = 2.0) -> Work:
    """An [m, k] matrix times a [k, n] one: both read and the product written."""
    return Work(flop=2.0 * m * k * n, bytes=dtype_bytes * (m * k + k * n + m * n))


class StepTotals(Protocol):
    """What of a plan decides its work."""

    @property
    def chunks(self) -> Sized:
        """Its chunks, to be counted."""

    @property
    def prefill_tokens(self) -> int:
        """As in StepPlan, like the others."""

    @property
    def prefill_context(self) -> int: ...

    @property
    def prefill_attention(self) -> int: ...

    @property
    def decode_count(self) -> int: ...

    @property
    def decode_context(self) -> int: ...


def step_work(replica: Replica, plan: StepTotals) -> Work:
    """All of a step's FLOP, and the bytes of weights, keys and values that it reads."""
    model, gpus = replica.model, replica.tensor_parallel
    tokens = plan.prefill_tokens + plan.decode_count
    if not tokens:
        return Work(0.0, 0.0)
    flop = tokens * model.flop_per_token
    flop += (len(plan.chunks) + plan.decode_count) * model.flop_per_sample
    flop += plan.decode_context * model.decode_pair_flop
    if plan.prefill_tokens:
        pairs = causal_pairs(plan.prefill_tokens, plan.prefill_context, plan.prefill_attention)
        flop += pairs * model.prefill_pair_flop
    # Those of a chunk's own tokens have just been made, so they come from the caches.
    context = plan.prefill_context - plan.prefill_tokens + plan.decode_context
    return Work(
        flop=flop / gpus,
        bytes=model.read_bytes(tokens) / gpus + context * replica.kv_bytes_per_token,
    )


@dataclass(frozen=True, slots=True)
class _Totals:
    """The totals of a recorded step, as `step_work` reads them from a plan."""

    prefill_tokens: int
    prefill_context: int
    prefill_attention: int
    chunks: range
    decode_count: int
    decode_context: int


def total_work(replica: Replica, steps: Mapping[str, Sequence[int]]) -> Work:
    """The work of all recorded steps: columns as in `steps.parquet`."""
    columns = (
        "prefill_tokens",
        "prefill_context",
        "prefill_attention",
        "prefill_requests",
        "decode_seqs",
        "decode_context",
    )
    flop = moved = 0.0
    decodes: dict[int, list[int]] = {}  # batch size: steps of nothing else, and their context
    for tokens, context, attention, chunks, count, decode_context in zip(
        *(steps[name] for name in columns), strict=True
    ):
        if not tokens:
            entry = decodes.setdefault(count, [0, 0])
            entry[0] += 1
            entry[1] += decode_context
            continue
        step = _Totals(tokens, context, attention, range(chunks), count, decode_context)
        work = step_work(replica, step)
        flop += work.flop
        moved += work.bytes
    model, gpus = replica.model, replica.tensor_parallel
    for count, (times, context) in decodes.items():
        if count:
            each = count * (model.flop_per_token + model.flop_per_sample)
            flop += (times * each + context * model.decode_pair_flop) / gpus
            moved += times * model.read_bytes(count) / gpus + context * replica.kv_bytes_per_token
    return Work(flop, moved)
