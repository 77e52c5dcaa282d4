"""How to read the config.json of each model family."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pagedsim.core import ConfigError
from pagedsim.sim.huggingface import experts
from pagedsim.sim.huggingface.keys import Keys
from pagedsim.sim.model import MLA, MoE

LAYERS = ("num_hidden_layers", "n_layer", "n_layers")
HIDDEN = ("hidden_size", "n_embd", "d_model", "n_embed")
HEADS = ("num_attention_heads", "n_head", "n_heads")
KV_HEADS = ("num_key_value_heads", "num_kv_heads")
INTERMEDIATE = ("intermediate_size", "ffn_dim", "ffn_hidden_size", "n_inner")
POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")


def _kv_heads(keys: Keys) -> int:
    return keys.whole(*KV_HEADS, default=keys.whole(*HEADS))


def _kv_heads_of_falcon(keys: Keys) -> int:
    if keys.flag("new_decoder_architecture", False):
        return _kv_heads(keys)
    return _one_or_all(keys)


def _one_or_all(keys: Keys) -> int:
    return 1 if keys.flag("multi_query", True) else keys.whole(*HEADS)


@dataclass(frozen=True)
class Family:
    """How to read the config.json of one `model_type`, with the defaults of transformers."""

    tied: bool = False
    """Default of tied embeddings."""
    gated: bool = True
    """Whether the MLP has three matrices rather than two."""
    defaults: Mapping[str, int] = field(default_factory=dict)
    intermediate: tuple[str, ...] = INTERMEDIATE
    widening: int | None = None
    """Width of the MLP as a multiple of the hidden size, if there is no key for it."""
    learned_positions: int | None = None
    """Rows of the position table beyond the maximum length; None: there is no table."""
    kv_heads: Callable[[Keys], int] = _kv_heads
    moe: Callable[[Keys], MoE] | None = None
    latent: bool = False
    """Whether attention is multi-head latent attention."""

    def shape(self, keys: Keys) -> dict[str, Any]:
        """The arguments of `ModelShape`."""
        keys = keys.over(self.defaults)
        hidden, heads = keys.whole(*HIDDEN), keys.whole(*HEADS)
        positions = keys.whole(*POSITIONS)
        wide = None if self.widening is None else self.widening * hidden
        mla = _mla(keys) if self.latent else None
        own = mla.nope_dim + mla.rope_dim if mla else None
        if own is None and "head_dim" not in keys.values and hidden % heads:
            raise ConfigError(
                f"{keys.where}: {heads} heads do not divide {hidden}; has no head_dim"
            )
        return {
            "layers": keys.whole(*LAYERS),
            "hidden": hidden,
            "heads": heads,
            "kv_heads": heads if mla else self.kv_heads(keys),
            "head_dim": own or keys.whole("head_dim", default=hidden // heads),
            "intermediate": keys.whole(*self.intermediate, default=wide),
            "vocab": keys.whole("vocab_size"),
            "max_model_len": positions,
            "gated_mlp": self.gated,
            "tied_embeddings": keys.flag("tie_word_embeddings", self.tied),
            "learned_positions": 0
            if self.learned_positions is None
            else positions + self.learned_positions,
            "moe": self.moe(keys) if self.moe else None,
            "mla": mla,
        }


def _mla(keys: Keys) -> MLA:
    return MLA(
        kv_lora_rank=keys.whole("kv_lora_rank"),
        rope_dim=keys.whole("qk_rope_head_dim"),
        nope_dim=keys.whole("qk_nope_head_dim"),
        v_dim=keys.whole("v_head_dim"),
        q_lora_rank=keys.whole("q_lora_rank") if "q_lora_rank" in keys.values else None,
    )


LLAMA = Family()
DEEPSEEK = Family(moe=experts.deepseek, latent=True)
GEMMA = Family(tied=True, defaults={"head_dim": 256})
# Published files omit values equal to those of the smallest model.
GEMMA3 = Family(
    tied=True,
    defaults={
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "vocab_size": 262_208,
        "max_position_embeddings": 131_072,
    },
)

FAMILIES: Mapping[str, Family] = {
    "bloom": Family(tied=True, gated=False, defaults={"seq_length": 2048}, widening=4),
    "cohere": Family(tied=True),
    "deepseek_v2": DEEPSEEK,
    "deepseek_v3": DEEPSEEK,
    "falcon": Family(
        tied=True,
        gated=False,
        defaults={"max_position_embeddings": 2048},
        widening=4,
        kv_heads=_kv_heads_of_falcon,
    ),
    "gemma": GEMMA,
    "gemma2": GEMMA,
    "gemma3_text": GEMMA3,
    "glm4_moe": Family(moe=experts.deepseek),
    "gpt2": Family(tied=True, gated=False, widening=4, learned_positions=0),
    "gpt_bigcode": Family(
        tied=True,
        gated=False,
        widening=4,
        learned_positions=0,
        kv_heads=_one_or_all,
    ),
    "gpt_neox": Family(gated=False),
    "gpt_oss": Family(moe=experts.gpt_oss),
    "granite": LLAMA,
    "kimi_k2": DEEPSEEK,
    "llama": LLAMA,
    # Here intermediate_size is the width of an expert.
    "llama4_text": Family(
        moe=experts.llama4, intermediate=("intermediate_size_mlp", "intermediate_size")
    ),
    "mistral": LLAMA,
    "mixtral": Family(moe=experts.mixtral),
    "mpt": Family(tied=True, gated=False, widening=4),
    "olmo2": LLAMA,
    "olmoe": Family(moe=experts.mixtral),
    "opt": Family(tied=True, gated=False, learned_positions=2),
    "phi": Family(gated=False),
    "phi3": LLAMA,
    "phimoe": Family(moe=experts.mixtral),
    "qwen2": LLAMA,
    "qwen2_moe": Family(moe=experts.qwen),
    "qwen3": LLAMA,
    "qwen3_moe": Family(moe=experts.qwen),
    "smollm3": Family(tied=True),
    "stablelm": LLAMA,
    "starcoder2": Family(tied=True, gated=False),
}
