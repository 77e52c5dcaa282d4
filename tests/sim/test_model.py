"""Parameters, bytes and FLOP of the shipped shapes, against what was published."""

from dataclasses import replace
from math import nan
from typing import Any

import pytest

from pagedsim.core import ConfigError
from pagedsim.sim.model import MLA, MoE
from tests.sim.shapes import MODELS, model

PUBLISHED = {  # model cards; OPT: the checkpoints' own counts
    "opt-13b": 12_853_473_280,
    "opt-66b": 65.7e9,
    "opt-175b": 175e9,
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "codellama-34b": 33_743_970_304,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.2-3b": 3_212_749_824,
    "mistral-7b": 7_241_732_096,
    "yi-34b": 34_388_917_248,
    "bloom-176b": 176_247_271_424,
    "qwen2-7b": 7_615_616_512,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-0.6b": 596_049_920,
    "smollm2": 134_515_008,
    "qwen3-8b": 8_190_735_360,
    "qwen3-32b": 32_762_123_264,
    "mixtral-8x7b": 46_702_792_704,
    "deepseek-v3": 671e9,
}


def test_every_shipped_model_is_checked() -> None:
    assert {*PUBLISHED, "tiny"} == set(MODELS)


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_parameters_are_those_published(name: str) -> None:
    assert model(name).name == name
    assert model(name).weight_params == pytest.approx(PUBLISHED[name], rel=0.003)


EXACT = (
    *("llama-2-7b", "llama-2-13b", "llama-3.1-70b", "llama-3.2-3b", "mistral-7b", "mixtral-8x7b"),
    *("yi-34b", "codellama-34b"),
)


@pytest.mark.parametrize("name", EXACT)
def test_parameters_without_biases_are_exact(name: str) -> None:
    assert model(name).weight_params == PUBLISHED[name]


@pytest.mark.parametrize(
    ("name", "active"),
    [("mixtral-8x7b", 12.9e9), ("deepseek-v3", 37e9), ("qwen3-30b-a3b", 3.3e9)],
)
def test_active_parameters_are_those_published(name: str, active: float) -> None:
    shape = model(name)
    embedding = shape.vocab * shape.hidden
    assert shape.body_params + shape.head_params + embedding == pytest.approx(active, rel=0.02)


def test_qwen3_non_embedding_parameters_are_those_published() -> None:
    shape = model("qwen3-0.6b")
    assert shape.weight_params - shape.head_params == pytest.approx(0.44e9, rel=0.01)
    assert shape.body_params == pytest.approx(0.44e9, rel=0.01)


def test_weights_taken_as_exactly_seven_billion() -> None:
    shape = replace(model("llama-2-7b"), params=7e9)
    assert shape.weight_bytes == shape.read_bytes(1) == 14e9
    assert shape.flop_per_token == 14e9
    assert shape.flop_per_sample == 0


def test_a_step_reads_no_input_embedding_unless_it_is_the_head_too() -> None:
    untied = model("llama-2-7b")
    embedding, norms = 32_000 * 4096, (2 * 32 + 1) * 4096
    assert untied.read_bytes(1) == 2 * (untied.weight_params - embedding - norms)
    tied = replace(untied, tied_embeddings=True)
    assert tied.read_bytes(1) == untied.read_bytes(1)
    assert tied.weight_params == untied.weight_params - embedding


def test_experts_read_grow_with_the_batch_up_to_all() -> None:
    shape = model("mixtral-8x7b")
    one, two, many = (shape.read_bytes(tokens) for tokens in (1, 2, 1e6))
    assert one == pytest.approx(2 * (shape.body_params + shape.head_params))
    assert one < two < many
    idle = 32_000 * 4096 + (2 * 32 + 1) * 4096
    assert many == pytest.approx(2 * (shape.weight_params - idle))


def test_expected_distinct_experts() -> None:
    moe = MoE(experts=8, experts_per_token=2, intermediate=1)
    assert moe.expected_experts(1) == pytest.approx(2)
    assert moe.expected_experts(2) == pytest.approx(2 + 2 * 6 / 8)
    assert moe.expected_experts(float("inf")) == 8


def test_latent_attention_computes_more_in_decode_than_in_prefill() -> None:
    shape = model("deepseek-v3")
    assert shape.prefill_pair_flop == 2 * 61 * 128 * (128 + 64 + 128)
    assert shape.decode_pair_flop == 2 * 61 * 128 * (512 + 64 + 512)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers": 0}, "model.layers=0: must be a whole number of at least 1"),
        ({"layers": 32.5}, "model.layers=32.5: must be a whole number"),
        ({"layers": "many"}, "model.layers='many': must be a whole number"),
        (
            {"learned_positions": -1},
            "model.learned_positions=-1: must be a whole number of at",
        ),
        ({"dtype_bytes": nan}, "model.dtype_bytes=nan: must be a number above 0"),
        ({"tied_embeddings": "no"}, "model.tied_embeddings='no': must be true or false"),
        ({"moe": 5}, "model.moe=5: must be settings with a _target_"),
        (
            {"moe": MoE(experts=8, experts_per_token=2, intermediate=1, dense_layers=32)},
            "model.moe.dense_layers=32: must be below model.layers=32",
        ),
        ({"params": nan}, "model.params=nan: must be a number above 0"),
        ({"kv_heads": 5}, "model.kv_heads=5: must divide model.heads=32"),
        ({"params": -1}, "model.params=-1: must be a number above 0"),
    ],
)
def test_impossible_shapes_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(model("llama-2-7b"), **change)


def test_more_experts_a_token_than_there_are_is_refused() -> None:
    with pytest.raises(ConfigError, match="experts_per_token=9: must be between 1 and experts=8"):
        MoE(experts=8, experts_per_token=9, intermediate=1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"experts": 0}, "model.moe.experts=0: must be a whole number of at least 1"),
        ({"intermediate": -1}, "model.moe.intermediate=-1: must be a whole number of at least 1"),
        ({"shared_experts": 0.5}, "model.moe.shared_experts=0.5: must be a whole number"),
        ({"dtype_bytes": 0}, "model.moe.dtype_bytes=0: must be a number above 0"),
    ],
)
def test_impossible_experts_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(MoE(experts=8, experts_per_token=2, intermediate=1), **change)


def test_impossible_latent_attention_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"model\.mla\.v_dim=0: must be a whole number of at"):
        MLA(kv_lora_rank=512, rope_dim=64, nope_dim=128, v_dim=0)


def test_experts_may_be_of_fewer_bits_than_the_rest() -> None:
    full = model("mixtral-8x7b")
    assert full.moe is not None
    half = replace(full, moe=replace(full.moe, dtype_bytes=1.0))
    experts = 32 * 8 * 3 * 4096 * 14336
    assert full.weight_bytes - half.weight_bytes == experts
    assert full.read_bytes(1e6) - half.read_bytes(1e6) == pytest.approx(experts)
    assert full.read_bytes(1) - half.read_bytes(1) == pytest.approx(experts / 4)
