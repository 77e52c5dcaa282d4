"""The memory footprint of one GPU, by part."""

from __future__ import annotations

from dataclasses import dataclass

from pagedsim.sim.capacity import activations
from pagedsim.sim.hardware import GIB
from pagedsim.sim.model import ModelShape, attention_matrices, mlp_matrices
from pagedsim.sim.products import HEAD
from pagedsim.sim.replica import Replica

EMBEDDINGS = "embeddings"


@dataclass(frozen=True)
class Footprint:
    """Bytes of one GPU."""

    usable: float
    """Usable memory."""
    weights: dict[str, float]
    activations: dict[str, float]
    reserved: float
    """Reserved for other uses."""
    blocks: int
    block_bytes: float

    @property
    def left(self) -> float:
        """Left for the KV cache."""
        beside = sum(self.weights.values()) + sum(self.activations.values()) + self.reserved
        return self.usable - beside


def footprint(
    replica: Replica,
    *,
    blocks: int,
    gpu_memory_utilization: float,
    reserved_gib: float,
    max_batched_tokens: int,
    max_seqs: int,
) -> Footprint:
    """The footprint of a replica with a number of blocks."""
    model, gpus = replica.model, replica.tensor_parallel
    return Footprint(
        usable=gpu_memory_utilization * replica.hardware.memory_bytes,
        weights=weights_of(replica),
        activations=activations(model, gpus, max_batched_tokens, max_seqs),
        reserved=reserved_gib * GIB,
        blocks=blocks,
        block_bytes=replica.block_bytes,
    )


def weights_of(replica: Replica) -> dict[str, float]:
    """Bytes of the weights of one GPU by part; they add up to `weight_bytes`."""
    model, stage = replica.model, replica.fullest
    found = {}
    for part, each in weights(model).items():
        gpus = replica.stage_gpus if part == "experts" else replica.tensor_parallel
        found[part] = each / gpus
        if part not in (EMBEDDINGS, HEAD):
            found[part] *= stage.layers / model.layers
    if not stage.first:
        embeddings = found.pop(EMBEDDINGS, 0.0)
        if stage.last and model.tied_embeddings:
            found[HEAD] = embeddings * model.head_bytes / model.embedding_bytes
    if not stage.last:
        found.pop(HEAD, None)
    return {part: each for part, each in found.items() if each}


def weights(model: ModelShape) -> dict[str, float]:
    """Bytes of a model's weights by part; they add up to `weight_bytes`."""
    if model.params is not None:
        return {"all": model.params * model.dtype_bytes}
    attention = model.layers * sum(one.params for one in attention_matrices(model))
    dense = model.layers - model.moe_layers
    mlp = dense * sum(one.params for one in mlp_matrices(model, model.intermediate))
    found = {"attention": attention * model.dtype_bytes, "MLP": mlp * model.dtype_bytes}
    if moe := model.moe:
        of = model.moe_layers * model.expert_params
        found["experts"] = of * moe.experts * model.expert_dtype_bytes
        found["shared experts"] = of * moe.shared_experts * model.dtype_bytes
        found["routers"] = model.moe_layers * model.hidden * moe.experts * model.dtype_bytes
    found["norms"] = (2 * model.layers + 1) * model.hidden * model.dtype_bytes
    embeddings = (model.vocab + model.learned_positions) * model.hidden
    found[EMBEDDINGS] = embeddings * model.head_dtype_bytes
    if not model.tied_embeddings:
        found[HEAD] = model.head_params * model.head_dtype_bytes
    return {part: each for part, each in found.items() if each}
