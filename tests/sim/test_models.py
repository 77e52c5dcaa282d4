"""Shapes of models: parameters, bytes and FLOP as published, shipped or read from a config.json."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pagedsim.core import ConfigError
from pagedsim.sim.huggingface import FAMILIES, read_shape
from tests.core.refusals import refusal
from tests.sim.shapes import MODELS, PUBLISHED, model, parameters

SHIPPED = {  # model cards; OPT: the checkpoints' own counts
    "opt-13b": 12_853_473_280,
    "opt-66b": 65.7e9,
    "opt-175b": 175e9,
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "codellama-34b": 33_743_970_304,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "llama-3.2-3b": 3_212_749_824,
    "mistral-7b": 7_241_732_096,
    "yi-34b": 34_388_917_248,
    "bloom-176b": 176_247_271_424,
    "qwen2-7b": 7_615_616_512,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "qwen3-0.6b": 596_049_920,
    "smollm2": 134_515_008,
    "qwen3-8b": 8_190_735_360,
    "qwen3-32b": 32_762_123_264,
    "mixtral-8x7b": 46_702_792_704,
    "deepseek-v3": 671e9,
}


EXACT = {
    *("llama-2-7b", "llama-2-13b", "llama-3.1-70b", "llama-3.2-3b", "mistral-7b", "mixtral-8x7b"),
    *("yi-34b", "codellama-34b", "llama-3.1-405b"),
}
"""Without biases."""


def test_every_shipped_model_is_checked() -> None:
    assert {*SHIPPED, "tiny"} == set(MODELS)


@pytest.mark.parametrize("name", sorted(SHIPPED))
def test_parameters_of_shipped_models_are_those_published(name: str) -> None:
    assert model(name).name == name
    close = 0 if name in EXACT else 0.003
    assert parameters(model(name)) == pytest.approx(SHIPPED[name], rel=close)


@pytest.mark.parametrize(
    ("name", "active"),
    [
        *(("mixtral-8x7b", 12.9e9), ("deepseek-v3", 37e9)),
        *(("qwen3-30b-a3b", 3.3e9), ("qwen3-235b-a22b", 22e9)),
    ],
)
def test_active_parameters_are_those_published(name: str, active: float) -> None:
    shape = model(name)
    embedding = shape.vocab * shape.hidden
    assert shape.body_params + shape.head_params + embedding == pytest.approx(active, rel=0.02)


def test_experts_read_grow_with_the_batch_up_to_all() -> None:
    shape = model("mixtral-8x7b")
    one, two, many = (shape.read_bytes(tokens) for tokens in (1, 2, 1e6))
    assert one == pytest.approx(2 * (shape.body_params + shape.head_params))
    assert one < two < many
    assert shape.moe is not None
    assert shape.moe.expected_experts(2) == pytest.approx(2 + 2 * 6 / 8)
    idle = 32_000 * 4096 + (2 * 32 + 1) * 4096
    assert many == pytest.approx(2 * (parameters(shape) - idle))


# -- config.json -----------------------------------------------------------------------------------


CONFIGS: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parent / "shipped_configs.json").read_text()
)
"""What config.json says of models that are shipped as well."""
LLAMA = CONFIGS["llama-2-7b"]


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_gives_the_shipped_shape(name: str) -> None:
    assert read_shape(CONFIGS[name], name) == model(name)


@pytest.mark.parametrize("whole", [False, True], ids=["folder", "file"])
def test_from_a_folder_or_a_file(tmp_path: Path, whole: bool) -> None:
    folder = tmp_path / "Llama-2-7b-hf"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    shape = read_shape(folder / "config.json" if whole else str(folder))
    assert shape == replace(model("llama-2-7b"), name="llama-2-7b-hf")


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_those_published(name: str) -> None:
    params, config = PUBLISHED[name]
    assert parameters(read_shape(config)) == pytest.approx(params, rel=1e-3)


def test_every_family_is_checked() -> None:
    seen = [config["model_type"] for _, config in PUBLISHED.values()]
    assert {*seen, *(config["model_type"] for config in CONFIGS.values())} == set(FAMILIES)


@pytest.mark.parametrize(
    ("name", "kv_bytes"),
    [
        ("falcon-7b", 2 * 32 * 64 * 2),  # one head of keys and values for all
        ("falcon-40b", 2 * 60 * 8 * 64 * 2),
        ("falcon-rw-1b", 2 * 24 * 2048 * 2),
        ("starcoder-15b", 2 * 40 * 128 * 2),
        ("gpt2", 2 * 12 * 768 * 2),
        ("gemma-3-4b-text", 2 * 34 * 4 * 256 * 2),
        ("deepseek-v2", 60 * 576 * 2),
    ],
)
def test_kv_bytes_follow_the_heads_that_are_kept(name: str, kv_bytes: int) -> None:
    assert read_shape(PUBLISHED[name][1]).kv_bytes_per_token == kv_bytes


def test_layers_without_experts_are_counted() -> None:
    qwen = PUBLISHED["qwen3-30b-a3b"][1]
    some = read_shape(qwen | {"decoder_sparse_step": 2, "mlp_only_layers": [1, 3]})
    assert (some.layers, some.moe_layers) == (48, 24 - 2)
    maverick = PUBLISHED["llama-4-maverick-text"][1]
    assert read_shape(maverick).moe_layers == 24
    assert read_shape(maverick | {"moe_layers": [1, 3, 5]}).moe_layers == 3
    deepseek = read_shape(PUBLISHED["deepseek-v2"][1] | {"moe_layer_freq": 2})
    assert deepseek.moe_layers == 29  # 2, 4, and so on: the first layer never has any
    third = read_shape(qwen | {"decoder_sparse_step": 3, "mlp_only_layers": [2, 3]})
    assert third.moe_layers == 16 - 1  # of 2, 5, and so on


def compressed(**group: Any) -> dict[str, Any]:
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}


def with_activations(bits: int, kind: str) -> dict[str, Any]:
    into = {"num_bits": bits, "type": kind}
    return compressed(weights={"num_bits": 8}, input_activations=into)


@pytest.mark.parametrize(
    ("quantization", "weight", "products"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, 0.5, "fp16"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, 1.0, "fp16"),
        ({"quant_method": "gptq", "bits": 8}, 1.0, "fp16"),
        ({"quant_method": "fp8"}, 1.0, "fp8"),
        ({"quant_method": "fbgemm_fp8"}, 1.0, "fp8"),
        (compressed(weights={"num_bits": 4, "type": "int"}), 0.5, "fp16"),
        (with_activations(8, "float"), 1.0, "fp8"),
        (with_activations(8, "int"), 1.0, "int8"),
        (with_activations(16, "float"), 1.0, "fp16"),
        (None, 2.0, "fp16"),
    ],
)
def test_bytes_of_a_weight_and_format_of_products(
    quantization: dict[str, Any] | None, weight: float, products: str
) -> None:
    shape, ends = read_shape(LLAMA | {"quantization_config": quantization}), 2 * 32_000 * 4096
    assert (shape.dtype_bytes, shape.head_dtype_bytes) == (weight, 2.0)
    assert shape.products == products
    # Embeddings and head keep their 16 bits.
    assert shape.weight_bytes == weight * (6_738_415_616 - ends) + 2 * ends
    assert shape.read_bytes(1) == weight * shape.body_params + 2 * 32_000 * 4096


def test_a_multimodal_config_is_read_by_its_text_part(tmp_path: Path) -> None:
    params, text = PUBLISHED["gemma-3-4b-text"]
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "gemma3", "text_config": text, "vision_config": {}}))
    assert parameters(read_shape(path)) == pytest.approx(params, rel=1e-3)
    path.write_text(json.dumps({"model_type": "gemma3", "text_config": 5}))
    with pytest.raises(ConfigError, match=r"text_config=5: must be an object"):
        read_shape(path)


QWEN_MOE = PUBLISHED["qwen1.5-moe-a2.7b"][1]


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({k: v for k, v in LLAMA.items() if k != "vocab_size"}, "has no vocab_size"),
        (LLAMA | {"hidden_size": "big"}, "hidden_size='big' | a whole number"),
        ({"hidden_size": 1}, "has no model_type"),
        (LLAMA | {"model_type": "lama"}, "'lama' | did you mean 'llama'"),
        ([1], "an object, not a list"),
        ("{", "is not JSON"),
        (CONFIGS["opt-13b"] | {"word_embed_proj_dim": 512}, "word_embed_proj_dim"),
        (LLAMA | {"quantization_config": {"quant_method": "new"}}, "config.quant_method='new'"),
        (
            LLAMA | {"quantization_config": {"quant_method": "compressed-tensors"}},
            "config_groups: num_bits of weights is none | one number",
        ),
        (LLAMA | {"num_attention_heads": 33}, "33 heads do not divide 4096"),
        (QWEN_MOE | {"moe_intermediate_size": 1000}, "shared_expert_intermediate_size=5632"),
        (QWEN_MOE | {"mlp_only_layers": "none"}, "mlp_only_layers='none' | whole numbers"),
    ],
)
def test_a_bad_config_is_refused_with_its_path(tmp_path: Path, config: Any, named: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(config if isinstance(config, str) else json.dumps(config))
    refusal(lambda: read_shape(path), f"{path} | {named}")
