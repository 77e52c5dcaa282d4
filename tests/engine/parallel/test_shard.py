"""Shares of a model: together they compute what the whole does."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, PreTrainedConfig

from pagedsim.core import ConfigError
from pagedsim.engine.models import load_model
from pagedsim.engine.models.load import check_shards
from pagedsim.engine.models.shard import Shard
from tests.engine.architectures import CONFIGS, SHAPE, VOCAB, build, reference
from tests.engine.models.serving import alone, equal, served, staggered, texts
from tests.engine.models.test_native import DENSE, drawn
from tests.engine.parallel.together import at_once, groups, shards

LENGTHS = (10, 1, 5)


def split(config: PreTrainedConfig) -> list[int]:
    heads, kv = config.num_attention_heads, config.num_key_value_heads
    return [n for n in range(2, heads + 1) if heads % n == 0 and (kv % n == 0 or n % kv == 0)]


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))]
)
@pytest.mark.parametrize("family", DENSE)
def test_any_configuration(family: str, seed: int, tmp_path: Path) -> None:
    rng = Random(seed)
    config = drawn(family, rng)
    while not split(config):
        config = drawn(family, rng)
    theirs = build(config)
    theirs.save_pretrained(tmp_path)
    sequences = texts(LENGTHS, VOCAB, seed)
    wanted = alone(theirs, sequences)
    with groups(rng.choice(split(config))) as made:
        models = shards(tmp_path, made)
        found = at_once(lambda i: served(models[i], sequences, staggered(LENGTHS)), len(made))
    equal(found[0], wanted)


@pytest.mark.parametrize("tied", [False, True])
def test_random_weights_are_those_of_the_whole(tied: bool) -> None:
    config = LlamaConfig(**SHAPE, tie_word_embeddings=tied)
    whole = dict(load_model(config, seed=3).module.named_parameters(remove_duplicate=False))
    for rank in range(2):
        shard = load_model(config, seed=3, shard=Shard(rank, 2))
        for name, weight in shard.module.named_parameters(remove_duplicate=False):
            assert torch.equal(weight, Shard(rank, 2).cut(name, whole[name], config)), name


@pytest.mark.parametrize(
    ("model", "size", "settings", "says"),
    [
        (LlamaConfig(**SHAPE), 3, {}, "tensor_parallel=3: model=LlamaConfig with 4 heads and "
         "2 key-value heads cannot be split so; choose from 1, 2, 4"),
        (LlamaConfig(**SHAPE), 2, {"model_impl": "transformers"}, "tensor_parallel=2: "
         "model_impl=transformers: only the native decoder is split"),
        (CONFIGS["phi3"](), 2, {}, "tensor_parallel=2: model=Phi3Config: it is none of "
         "transformers' LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM, "
         "MixtralForCausalLM, Qwen3MoeForCausalLM and DeepseekV3ForCausalLM; only the native "
         "decoder is split"),
        (CONFIGS["mixtral"](), 2, {}, "tensor_parallel=2: model=MixtralConfig: "
         "MixtralForCausalLM is not split over GPUs; give tensor_parallel=1"),
        (CONFIGS["deepseek-v3"](), 2, {}, "tensor_parallel=2: model=DeepseekV3Config: "
         "DeepseekV3ForCausalLM is not split over GPUs; give tensor_parallel=1"),
        (LlamaConfig(**SHAPE, hidden_act="gelu"), 2, {}, "its MLP has hidden_act=gelu, not silu; "
         "only the native decoder is split"),
        (reference("llama"), 2, {}, "tensor_parallel=2: model=LlamaForCausalLM: every "
         "rank loads its shard by itself; give a name, a folder or a configuration"),
    ],
)  # fmt: skip
def test_what_cannot_be_split(model: Any, size: int, settings: dict[str, str], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_shards(model, size, **settings)
    assert says in str(caught.value) and "\n" not in str(caught.value)
