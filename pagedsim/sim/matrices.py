"""The weights of a model, matrix by matrix: names and shapes, from which everything is counted."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from pagedsim.sim.model import ModelShape


class Matrix(NamedTuple):
    """What every token is multiplied with, in one layer."""

    name: str
    inputs: int
    outputs: int

    @property
    def params(self) -> int:
        """Numbers in it."""
        return self.inputs * self.outputs


def attention(model: ModelShape) -> list[Matrix]:
    """Of a layer's attention; queries, keys and values are made by one product."""
    hidden, heads = model.hidden, model.heads
    if (mla := model.mla) is None:
        made = (heads + 2 * model.kv_heads) * model.head_dim
        return [Matrix("QKV", hidden, made), Matrix("output", heads * model.head_dim, hidden)]
    query = heads * (mla.nope_dim + mla.rope_dim)
    if mla.q_lora_rank is None:
        queries = [Matrix("query", hidden, query)]
    else:
        rank = mla.q_lora_rank
        queries = [Matrix("query down", hidden, rank), Matrix("query up", rank, query)]
    return [
        *queries,
        Matrix("KV down", hidden, mla.kv_lora_rank + mla.rope_dim),
        Matrix("KV up", mla.kv_lora_rank, heads * (mla.nope_dim + mla.v_dim)),
        Matrix("output", heads * mla.v_dim, hidden),
    ]


def mlp(model: ModelShape, intermediate: int) -> list[Matrix]:
    """Of an MLP of that width, or of an expert; up and the gate are one product."""
    up = (2 if model.gated_mlp else 1) * intermediate
    return [Matrix("up", model.hidden, up), Matrix("down", intermediate, model.hidden)]
