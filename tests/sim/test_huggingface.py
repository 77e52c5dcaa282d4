"""Shapes read from config.json equal the shipped ones, and bad files say what is wrong."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pagedsim.core import ConfigError
from pagedsim.sim.huggingface import read_shape
from pagedsim.sim.huggingface.family import FAMILIES
from pagedsim.sim.model import MoE
from tests.sim.configs import PUBLISHED
from tests.sim.shapes import model

LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "max_position_embeddings": 4096,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "vocab_size": 32000,
    "torch_dtype": "float16",
}
GROUPED = LLAMA | {
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama-2-7b": LLAMA,
    "llama-3.1-8b": GROUPED,
    "llama-3.2-3b": GROUPED
    | {
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_attention_heads": 24,
        "num_hidden_layers": 28,
        "tie_word_embeddings": True,
    },
    "yi-34b": GROUPED
    | {
        "hidden_size": 7168,
        "intermediate_size": 20480,
        "num_attention_heads": 56,
        "num_hidden_layers": 60,
        "vocab_size": 64000,
        "max_position_embeddings": 4096,
    },
    "mixtral-8x7b": GROUPED
    | {
        "model_type": "mixtral",
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "vocab_size": 32000,
        "max_position_embeddings": 32768,
    },
    "qwen3-0.6b": {
        "model_type": "qwen3",
        "hidden_size": 1024,
        "head_dim": 128,
        "intermediate_size": 3072,
        "max_position_embeddings": 40960,
        "num_attention_heads": 16,
        "num_hidden_layers": 28,
        "num_key_value_heads": 8,
        "tie_word_embeddings": True,
        "vocab_size": 151936,
    },
    "opt-13b": {
        "model_type": "opt",
        "hidden_size": 5120,
        "ffn_dim": 20480,
        "max_position_embeddings": 2048,
        "num_attention_heads": 40,
        "num_hidden_layers": 40,
        "vocab_size": 50272,
        "word_embed_proj_dim": 5120,
    },
    "deepseek-v3": {
        "model_type": "deepseek_v3",
        "first_k_dense_replace": 3,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "kv_lora_rank": 512,
        "max_position_embeddings": 163840,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_attention_heads": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 61,
        "num_key_value_heads": 128,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
        "tie_word_embeddings": False,
        "v_head_dim": 128,
        "vocab_size": 129280,
    },
}


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
    assert read_shape(config).weight_params == pytest.approx(params, rel=1e-3)


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


@pytest.mark.parametrize("zero", [{}, {"value": 0}, {"value": None}], ids=["no", "0", "null"])
def test_what_is_not_said_of_experts_is_none(zero: dict[str, Any]) -> None:
    def without(name: str, *keys: str) -> MoE:
        config = {k: v for k, v in PUBLISHED[name][1].items() if k not in keys}
        if zero:
            config |= dict.fromkeys(keys, zero["value"])
        moe = read_shape(config).moe
        assert moe is not None
        return moe

    qwen = without("qwen1.5-moe-a2.7b", "shared_expert_intermediate_size")
    assert (qwen.shared_experts, qwen.dense_layers) == (0, 0)
    glm = without("glm-4.5-air", "n_shared_experts", "first_k_dense_replace")
    assert (glm.shared_experts, glm.dense_layers) == (0, 0)


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("qwen3-30b-a3b", "decoder_sparse_step"),
        ("deepseek-v2", "moe_layer_freq"),
        ("llama-4-scout-text", "interleave_moe_layer_step"),
    ],
)
def test_unless_said_otherwise_every_layer_has_experts(name: str, key: str) -> None:
    config = {k: v for k, v in PUBLISHED[name][1].items() if k != key}
    assert read_shape(config) == read_shape(PUBLISHED[name][1])


def test_of_a_model_that_sees_the_text_part_counts(tmp_path: Path) -> None:
    params, text = PUBLISHED["gemma-3-4b-text"]
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "gemma3", "text_config": text, "vision_config": {}}))
    assert read_shape(path).weight_params == pytest.approx(params, rel=1e-3)
    path.write_text(json.dumps({"model_type": "gemma3", "text_config": 5}))
    with pytest.raises(ConfigError, match=r"text_config=5: must be an object"):
        read_shape(path)


def test_only_the_experts_of_gpt_oss_are_quantised() -> None:
    """12.8 GiB is the size that the model card of gpt-oss-20b gives, 60.8 that of 120b."""
    large = PUBLISHED["gpt-oss-120b"][1] | {"quantization_config": {"quant_method": "mxfp4"}}
    small = large | {"num_hidden_layers": 24, "num_local_experts": 32}
    for config, gib in ((large, 60.8), (small, 12.8)):
        assert read_shape(config).weight_bytes / 2**30 == pytest.approx(gib, rel=0.01)
    shape = read_shape(large)
    expert = 3 * 2880 * 2880
    more = shape.read_bytes(2) - shape.read_bytes(1)
    assert more == pytest.approx(36 * (4 * (1 - 4 / 128)) * expert * 4.25 / 8)


@pytest.mark.parametrize(
    ("quantization", "weight"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, 0.5),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, 1.0),
        ({"quant_method": "gptq", "bits": 8}, 1.0),
        ({"quant_method": "fbgemm_fp8"}, 1.0),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "int"}}},
            },
            0.5,
        ),
        (None, 2.0),
    ],
)
def test_bytes_of_a_weight(quantization: dict[str, Any] | None, weight: float) -> None:
    shape = read_shape(LLAMA | {"quantization_config": quantization})
    assert (shape.dtype_bytes, shape.head_dtype_bytes) == (weight, 2.0)


def activations(bits: int, kind: str) -> dict[str, Any]:
    group = {"weights": {"num_bits": 8}, "input_activations": {"num_bits": bits, "type": kind}}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}


@pytest.mark.parametrize(
    ("quantization", "products"),
    [
        ({"quant_method": "fp8"}, "fp8"),
        ({"quant_method": "fbgemm_fp8"}, "fp8"),
        (activations(8, "float"), "fp8"),
        (activations(8, "int"), "int8"),
        (activations(16, "float"), "fp16"),
        ({"quant_method": "gptq", "bits": 8}, "fp16"),
        (None, "fp16"),
    ],
)
def test_what_products_are_computed_in(quantization: dict[str, Any] | None, products: str) -> None:
    assert read_shape(LLAMA | {"quantization_config": quantization}).products == products


def test_quantized_weights_are_smaller_but_for_embeddings_and_head() -> None:
    four = LLAMA | {"quantization_config": {"quant_method": "awq", "bits": 4}}
    shape, ends = read_shape(four), 2 * 32_000 * 4096
    assert shape.dtype_bytes == 0.5
    assert shape.weight_bytes == 0.5 * (6_738_415_616 - ends) + 2 * ends
    assert shape.read_bytes(1) == 0.5 * shape.body_params + 2 * 32_000 * 4096


def test_fp8_experts_are_read_in_fp8_and_the_head_is_not() -> None:
    shape = read_shape(CONFIGS["deepseek-v3"])
    assert shape.read_bytes(1) == pytest.approx(shape.body_params + 2 * 129_280 * 7168)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (json.dumps({k: v for k, v in LLAMA.items() if k != "vocab_size"}), "has no vocab_size"),
        (json.dumps(LLAMA | {"hidden_size": "big"}), "hidden_size='big': must be a whole number"),
        (json.dumps({"hidden_size": 1}), "has no model_type"),
        (json.dumps(LLAMA | {"model_type": "lama"}), "'lama': .*did you mean 'llama'"),
        (json.dumps([1]), "must hold an object, not a list"),
        ("{", "is not JSON"),
        (json.dumps(CONFIGS["opt-13b"] | {"word_embed_proj_dim": 512}), "word_embed_proj_dim"),
        (
            json.dumps(LLAMA | {"quantization_config": {"quant_method": "new"}}),
            "quantization_config.quant_method='new'",
        ),
        (
            json.dumps(LLAMA | {"quantization_config": {"quant_method": "compressed-tensors"}}),
            "config_groups: num_bits of weights is none: must be one number",
        ),
        (json.dumps(LLAMA | {"tie_word_embeddings": "no"}), "tie_word_embeddings='no': must be tr"),
        (json.dumps(LLAMA | {"num_attention_heads": 33}), "33 heads do not divide 4096"),
        (json.dumps(LLAMA | {"num_key_value_heads": 5}), "kv_heads=5: must divide"),
        (
            json.dumps(LLAMA | {"num_hidden_layers": True}),
            "num_hidden_layers=True: must be a whole",
        ),
        (json.dumps(LLAMA | {"model_type": ["llama"]}), "unknown model_type"),
        (
            json.dumps(CONFIGS["mixtral-8x7b"] | {"num_experts_per_tok": 9}),
            "experts_per_token=9: must be between 1 and experts=8",
        ),
        (
            json.dumps(PUBLISHED["qwen1.5-moe-a2.7b"][1] | {"moe_intermediate_size": 1000}),
            "shared_expert_intermediate_size=5632: must be a multiple",
        ),
        (
            json.dumps(PUBLISHED["qwen1.5-moe-a2.7b"][1] | {"mlp_only_layers": "none"}),
            "mlp_only_layers='none': must be a list of whole numbers",
        ),
    ],
)
def test_a_bad_file_is_named_with_what_is_wrong(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        read_shape(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.json: cannot be read: No such file"):
        read_shape(tmp_path / "nowhere.json")
