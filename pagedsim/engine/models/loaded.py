"""A model that is ready to run steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from pagedsim.engine.models.attention import Step
from pagedsim.engine.models.native import Native
from pagedsim.kernels.batch import AttentionBatch

if TYPE_CHECKING:
    from pagedsim.engine.parallel.group import RankGroup
    from pagedsim.engine.parallel.ranks import Ranks

_SAMPLED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens")
_SAMPLING = {"max_new_tokens": "max_tokens"}


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """A decoder with its weights on the device, and the facts that the rest of the engine needs."""

    name: str
    module: nn.Module
    config: Any
    """transformers' configuration of the text model."""
    num_layers: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    """How many logits there are; some models pad beyond their tokenizer's vocabulary."""
    max_model_len: int
    dtype: torch.dtype
    """Of the weights and of computation."""
    device: torch.device
    eos_token_ids: tuple[int, ...]
    step: Step
    planes: int = 2
    """Keys and values; 1 where both are one vector of `head_dim` elements (MLA)."""
    native: Native | None = None
    """Our own forward pass over the module's weights; None: the module's."""
    ranks: Ranks | None = None
    """On rank 0 of several, the others. What this model has is then a shard (`shard.py`), with the
    KV heads of one rank; its vocabulary counts as a whole."""

    @property
    def default_sampling(self) -> dict[str, Any]:
        """What its generation_config.json says of sampling, under the names of SamplingParams."""
        config = getattr(self.module, "generation_config", None)
        said = {} if config is None else config.to_diff_dict()
        named = {_SAMPLING.get(name, name): value for name, value in said.items()}
        return {name: named[name] for name in _SAMPLED if named.get(name) is not None}

    @property
    def architecture(self) -> str:
        """The model's class, as config.json names it."""
        return type(self.module).__name__

    @property
    def group(self) -> RankGroup | None:
        """The ranks that a forward pass needs, where this is a shard."""
        return None if self.native is None else self.native.group

    @property
    def ranks_count(self) -> int:
        """The processes that share it, this one included."""
        return 1 if self.group is None else self.group.size

    def close(self) -> None:
        """End the other ranks, if there are any."""
        if self.ranks is not None:
            self.ranks.close()

    def new_cache(self, num_blocks: int, block_size: int) -> torch.Tensor:
        """An empty KV cache that `forward` takes, on the model's device."""
        heads = self.num_kv_heads, self.head_dim
        shape = (num_blocks, self.num_layers, self.planes, block_size, *heads)
        return torch.zeros(shape, dtype=self.dtype, device=self.device)

    @torch.no_grad()
    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        batch: AttentionBatch,
        cache: torch.Tensor,
        logits_at: torch.Tensor,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """One step: the keys and values of its tokens go into `cache`; returns logits.

        `input_ids` and `positions` are [tokens], flat, in the order of `batch`. `logits_at` is
        [rows] int64: of which tokens logits are wanted (none is fine). The logits are
        [rows, vocab_size] in float32, in `out` if it is given.
        """
        self.step.begin(batch, cache)
        if self.native is not None:
            logits = self.native.forward(input_ids, positions, batch, self.step.views, logits_at)
        else:
            logits = self.module(
                input_ids=input_ids.unsqueeze(0),
                position_ids=positions.unsqueeze(0),
                use_cache=False,
                logits_to_keep=logits_at,
                return_dict=True,
            ).logits[0]
        return logits.float() if out is None else out.copy_(logits)
