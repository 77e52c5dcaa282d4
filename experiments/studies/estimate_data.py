"""Numbers of an estimate, for result.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from experiments.studies.estimate_arithmetic import (
    ProductTime,
    StepEstimate,
    bound_of,
    changes,
    estimate,
    footprint,
    with_cache,
    without_cache,
)
from pagedsim.core import Scheduler, StepPlan
from pagedsim.server import ServerSpec
from pagedsim.sim.cost import Roofline
from pagedsim.sim.cost.base import step
from pagedsim.sim.cost.roofline import PRODUCTS
from pagedsim.sim.power import EnergyRoofline
from pagedsim.sim.replica import Replica

MOST = 4096
"""Maximum number of sequences or prompt tokens in the search for bottleneck changes."""


@dataclass(frozen=True)
class Case:
    """A server and the request sizes."""

    cost: Roofline
    power: EnergyRoofline | None
    scheduler: Scheduler
    server: ServerSpec
    memory: Mapping[str, Any]
    """The settings of the group."""
    prompt: int
    batch: int | None
    output: int
    wanted: int
    """Output tokens before clipping to the maximum context."""

    @property
    def replica(self) -> Replica:
        return self.cost.replica

    @cached_property
    def fitting(self) -> int:
        """Contexts of `prompt` tokens that memory holds."""
        return self.contexts(self.prompt)

    @property
    def full(self) -> int:
        return min(self.fitting, self.scheduler.max_seqs)

    def contexts(self, tokens: int) -> int:
        """Number of contexts of this length that memory holds, without sharing."""
        memory = self.scheduler.memory
        return memory.total // memory.blocks_for(tokens)

    def prefill(self, tokens: int) -> StepPlan:
        return step(tokens, ahead=self.scheduler.async_scheduling)

    def decode(self, sequences: int) -> StepPlan:
        """A step of decodes, each with a context as long as the prompt."""
        ahead = self.scheduler.async_scheduling
        return step(decodes=sequences, context=sequences * self.prompt, ahead=ahead)

    @property
    def batches(self) -> dict[str, int]:
        """Decode batch sizes: one sequence, the configured batch, the full batch."""
        asked = {} if self.batch is None else {"batch": self.batch}
        return {"one": 1, **asked, "full": self.full}


def data_of(case: Case) -> dict[str, Any]:
    """All numbers, in bytes, seconds and FLOP of one GPU."""
    replica, cost = case.replica, case.cost
    hardware = replica.hardware
    steps = {"prefill": estimate(cost, case.prefill(case.prompt))}
    for name, sequences in case.batches.items():
        steps[f"decode_{name}"] = estimate(cost, case.decode(sequences))
    return {
        "model": replica.model.name,
        "hardware": hardware.name,
        "tensor_parallel": replica.tensor_parallel,
        **replica.more_than_shared,
        "gpus": replica.gpus,
        "euros_per_hour": replica.euros_per_hour,
        "kv_cache_dtype": replica.kv_format,
        "prompt": case.prompt,
        "batches": case.batches,
        "output": case.output,
        "memory": _memory(case),
        "steps": {name: _step(one, case) for name, one in steps.items()},
        "products": {name: list(map(_product, one.products)) for name, one in steps.items()},
        "bounds": _bounds(case),
        "kv_cache": _saving(case),
        "peak": {"bandwidth": hardware.bandwidth, "flop_rates": hardware.rates},
        "reached": {"bandwidth": cost.bandwidth, "flop_rate": cost.flop_rate},
    }


def _memory(case: Case) -> dict[str, Any]:
    replica, scheduler, server = case.replica, case.scheduler, case.server
    tokens = server.step_tokens(scheduler.max_model_len)
    utilization = case.memory.get("gpu_memory_utilization", 0.9)
    found = footprint(
        replica,
        blocks=scheduler.memory.total,
        gpu_memory_utilization=utilization,
        reserved_gib=case.memory.get("reserved_gib", 0.5),
        max_batched_tokens=tokens,
        max_seqs=server.max_seqs,
    )
    return {
        "memory_bytes": round(replica.hardware.memory_bytes),
        "gpu_memory_utilization": utilization,
        "usable_bytes": round(found.usable),
        "weights": {part: round(each) for part, each in found.weights.items()},
        "activations": {part: round(each) for part, each in found.activations.items()},
        "max_batched_tokens": tokens,
        "max_seqs": server.max_seqs,
        "reserved_bytes": round(found.reserved),
        "left_bytes": round(found.left),
        "kv_bytes_per_token": round(replica.kv_bytes_per_token),
        "block_size": scheduler.memory.block_size,
        "block_bytes": round(found.block_bytes),
        "blocks": found.blocks,
        "tokens": found.blocks * scheduler.memory.block_size,
        "max_model_len": scheduler.max_model_len,
        "contexts_of_prompt": case.fitting,
        "contexts_of_max_model_len": case.contexts(scheduler.max_model_len),
    }


def _step(one: StepEstimate, case: Case) -> dict[str, Any]:
    told, hardware = one.breakdown, case.replica.hardware
    bound, term = bound_of(told)
    euros = case.replica.euros_per_hour
    watts = case.power and case.power.watts(case.replica, told.work, told.seconds)
    return {
        "tokens": one.plan.prefill_tokens + one.plan.decode_count,
        "seconds": told.seconds,
        "bound": bound,
        "term": term,
        "terms": [part._asdict() for part in told.terms],
        "flop": told.work.flop,
        "bytes": told.work.bytes,
        "mfu": told.mfu(hardware),
        "mbu": told.mbu(hardware),
        "tokens_per_s": one.tokens_per_s,
        "watts": watts,
        "tokens_per_joule": watts and one.tokens_per_s / watts,
        "tokens_per_euro": euros and 3600 * one.tokens_per_s / euros,
    }


def _product(one: ProductTime) -> dict[str, Any]:
    product = one.product
    return {
        "name": product.name,
        "attention": product.attention,
        "rows": product.rows,
        "inputs": product.inputs,
        "outputs": product.outputs,
        "times": product.times,
        "flop": product.flop,
        "bytes": product.bytes,
        "computing_s": one.computing,
        "reading_s": one.reading,
        "bound": one.bound,
    }


def _bounds(case: Case) -> dict[str, Any]:
    """The bottleneck of steps by size, and the batch from which products are compute bound."""

    def told(plan: StepPlan) -> dict[str, str]:
        bound, term = bound_of(case.cost.explain(plan))
        return {"bound": bound, "term": term}

    def computes(sequences: int) -> bool:
        terms = case.cost.explain(case.decode(sequences)).terms
        return any(term.name == PRODUCTS for term in terms)

    batch = [size for size, so in changes(computes, MOST) if so]
    return {
        "prefill": _by_size(changes(lambda size: told(case.prefill(size)), MOST)),
        "decode": _by_size(changes(lambda size: told(case.decode(size)), MOST)),
        "products_compute_from": batch[0] if batch else None,
    }


def _by_size(found: list[tuple[int, dict[str, str]]]) -> list[dict[str, Any]]:
    return [{"from": size, **what} for size, what in found]


def _saving(case: Case) -> dict[str, Any]:
    ahead = case.scheduler.async_scheduling
    kept = with_cache(case.cost, case.prompt, case.output, ahead)
    again = without_cache(case.cost, case.prompt, case.output, ahead)
    return {
        "with": {"seconds": kept.seconds, "flop": kept.flop},
        "without": {"seconds": again.seconds, "flop": again.flop},
    }
