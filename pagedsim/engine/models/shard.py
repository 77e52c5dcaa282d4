"""One rank's share of a native model: a model of the same family, only narrower.

Each rank has whole heads, a stripe of the MLP and some rows of the head; the results of attention
and of the MLP are summed over the ranks, and the logits are put side by side. Every rank has the
whole embedding and all norms: a step reads a few rows of the embedding, and splitting it would cost
a third kind of exchange, while the head is read from end to end.

Since a shard is itself a model that transformers can build, it is probed and tried like any other.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch

from pagedsim.core import ConfigError
from pagedsim.engine.models.weights import skeleton
from pagedsim.engine.runtime import require_host


@dataclass(frozen=True)
class Shard:
    """The part of rank `rank` of `size` ranks."""

    rank: int = 0
    size: int = 1

    def check(self, config: Any, name: str) -> None:
        """Raise ConfigError unless every rank gets as many heads as the others."""
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        fitting = [
            str(size)
            for size in range(1, heads + 1)
            if heads % size == 0 and (kv_heads % size == 0 or size % kv_heads == 0)
        ]
        if str(self.size) not in fitting:
            raise ConfigError(
                f"tensor_parallel={self.size}: model={name} with {heads} heads and {kv_heads} "
                f"key-value heads cannot be split so; choose from {', '.join(fitting)}"
            )

    def config(self, whole: Any) -> Any:
        """The configuration of a model that has just this part; its vocabulary is whole."""
        mine = copy.deepcopy(whole)
        mine.head_dim = _head_dim(whole)
        mine.num_attention_heads = whole.num_attention_heads // self.size
        mine.num_key_value_heads = max(whole.num_key_value_heads // self.size, 1)
        mine.intermediate_size = len(self._stripe(whole.intermediate_size))
        return mine

    def vocabulary(self, size: int) -> range:
        """The tokens whose logits it computes; only the last ranks may have fewer than others."""
        share = -(-size // self.size)
        return range(min(self.rank * share, size), min((self.rank + 1) * share, size))

    def cut(self, name: str, weight: torch.Tensor, config: Any) -> torch.Tensor:
        """This part of the weight of that name, as a view; `config` is the whole model's."""
        if self.size == 1:  # of models that are not split, too, whose parts have other names
            return weight
        module, kind = name.split(".")[-2:]
        if module in ("o_proj", "down_proj") and kind == "bias":
            return weight if self.rank == 0 else torch.zeros_like(weight)  # it is added once
        match module:
            case "q_proj":
                return _rows(weight, self._heads(config.num_attention_heads), _head_dim(config))
            case "k_proj" | "v_proj":
                return _rows(weight, self._heads(config.num_key_value_heads), _head_dim(config))
            case "o_proj":
                heads = self._heads(config.num_attention_heads)
                return _rows(weight.T, heads, _head_dim(config)).T
            case "gate_proj" | "up_proj":
                return _rows(weight, self._stripe(config.intermediate_size))
            case "down_proj":
                return _rows(weight.T, self._stripe(config.intermediate_size)).T
            case "lm_head":
                return _rows(weight, self.vocabulary(config.vocab_size))
        return weight

    def of(self, whole: Any, dtype: torch.dtype, device: torch.device) -> Any:
        """A module with this part of the weights of another, copied to a device."""
        config = whole.config
        mine = skeleton(self.config(config))
        for name, weight in whole.named_parameters():
            part = self.cut(name, weight.data, config).to(device, dtype)
            # A part of a file that is mapped into memory must not keep the whole of it there.
            put(mine, name, part.clone(memory_format=torch.contiguous_format))
        mine.model.rotary_emb = copy.deepcopy(whole.model.rotary_emb).to(device)
        self.finish(mine, config)
        mine.generation_config = whole.generation_config
        return mine

    def finish(self, mine: Any, config: Any) -> None:
        """Tie the head where that of the whole is tied."""
        if config.tie_word_embeddings and self.size == 1:
            mine.lm_head.weight = mine.model.embed_tokens.weight
        elif config.tie_word_embeddings:
            embedding = mine.model.embed_tokens.weight.data
            put(mine, "lm_head.weight", self.cut("lm_head.weight", embedding, config))

    def _heads(self, count: int) -> range:
        """This rank's heads among `count`; with fewer heads than ranks, several ranks have the
        same head."""
        if count >= self.size:
            share = count // self.size
            return range(self.rank * share, (self.rank + 1) * share)
        head = self.rank // (self.size // count)
        return range(head, head + 1)

    def _stripe(self, width: int) -> range:
        return range(width * self.rank // self.size, width * (self.rank + 1) // self.size)


WHOLE = Shard()


def put(module: Any, name: str, weight: torch.Tensor) -> None:
    """Make a tensor the parameter of that name."""
    place, _, kind = name.rpartition(".")
    setattr(module.get_submodule(place), kind, torch.nn.Parameter(weight, requires_grad=False))


def _head_dim(config: Any) -> int:
    given = getattr(config, "head_dim", None)
    return int(given or config.hidden_size // config.num_attention_heads)


def _rows(weight: torch.Tensor, parts: range, rows_each: int = 1) -> torch.Tensor:
    return weight[parts.start * rows_each : parts.stop * rows_each]


def dummy(config: Any, dtype: torch.dtype, device: torch.device, seed: int, shard: Shard) -> Any:
    """A shard of a native model with random weights, made on the device matrix by matrix.

    Of the other ranks' weights one matrix exists at a time, so a model may be larger than a GPU.
    Values follow from the seed and the matrix's place in the model, so any number of ranks have the
    same model.
    """
    whole, mine = skeleton(config), skeleton(shard.config(config))
    if device.type == "cpu":  # a GPU raises an error of its own
        needed = sum(weight.numel() for weight in mine.parameters()) * dtype.itemsize
        require_host("the weights", needed, "take a smaller model or dtype")
    mine.config.dtype = dtype
    generator, mix = torch.Generator(device), 0x9E3779B97F4A7C15
    for number, (name, weight) in enumerate(whole.named_parameters()):
        generator.manual_seed((seed + mix * number) % 2**63)
        drawn = torch.empty(weight.shape, dtype=dtype, device=device)
        if weight.dim() == 1:  # of norms; and biases
            drawn.fill_(1.0 if name.endswith("weight") else 0.0)
        else:
            drawn.normal_(0.0, config.initializer_range, generator=generator)
        part = shard.cut(name, drawn, config)
        put(mine, name, part.clone(memory_format=torch.contiguous_format))
    for name, buffer in whole.named_buffers():
        if not name.startswith("model.rotary_emb."):  # biases of a router, which every rank has
            place, _, kind = name.rpartition(".")
            zeros = torch.zeros_like(buffer, device=device)
            mine.get_submodule(place).register_buffer(kind, zeros)
    mine.model.rotary_emb = type(whole.model.rotary_emb)(config=config).to(device)
    shard.finish(mine, config)
    return mine
