"""Shapes read from config.json equal the shipped ones, and bad files say what is wrong."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pagedsim.core import ConfigError
from pagedsim.sim.model import ModelShape
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
    assert ModelShape.from_hf(CONFIGS[name], name) == model(name)


@pytest.mark.parametrize("whole", [False, True], ids=["folder", "file"])
def test_from_a_folder_or_a_file(tmp_path: Path, whole: bool) -> None:
    folder = tmp_path / "Llama-2-7b-hf"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    shape = ModelShape.from_hf(folder / "config.json" if whole else str(folder))
    assert shape == replace(model("llama-2-7b"), name="llama-2-7b-hf")


def test_gpt2_and_gpt_neox() -> None:
    gpt2 = {"model_type": "gpt2", "n_embd": 768, "n_head": 12, "n_layer": 12}
    shape = ModelShape.from_hf(gpt2 | {"n_positions": 1024, "vocab_size": 50257, "n_inner": None})
    assert shape.weight_params == pytest.approx(124_439_808, rel=0.01)
    assert (shape.intermediate, shape.kv_bytes_per_token) == (3072, 2 * 12 * 768 * 2)
    neox = LLAMA | {"model_type": "gpt_neox", "hidden_size": 6144, "num_attention_heads": 64}
    neox |= {"num_hidden_layers": 44, "intermediate_size": 24576, "vocab_size": 50432}
    assert ModelShape.from_hf(neox).weight_params == pytest.approx(20.55e9, rel=0.01)


def test_gemma2_and_phi3_and_qwen2() -> None:
    gemma = GROUPED | {"model_type": "gemma2", "hidden_size": 2304, "num_hidden_layers": 26}
    gemma |= {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256}
    gemma |= {"intermediate_size": 9216, "vocab_size": 256000, "sliding_window": 4096}
    assert ModelShape.from_hf(gemma).weight_params == pytest.approx(2_614_341_888, rel=0.01)
    phi = LLAMA | {"model_type": "phi3", "hidden_size": 3072, "intermediate_size": 8192}
    phi |= {"num_key_value_heads": 32, "vocab_size": 32064}
    assert ModelShape.from_hf(phi).weight_params == pytest.approx(3_821_079_552, rel=0.01)
    qwen = GROUPED | {"model_type": "qwen2", "hidden_size": 3584, "num_hidden_layers": 28}
    qwen |= {"num_attention_heads": 28, "num_key_value_heads": 4, "intermediate_size": 18944}
    qwen |= {"vocab_size": 152064}
    assert ModelShape.from_hf(qwen).weight_params == pytest.approx(7_615_616_512, rel=0.01)


def test_quantized_weights_are_smaller_but_for_embeddings_and_head() -> None:
    four = LLAMA | {"quantization_config": {"quant_method": "awq", "bits": 4}}
    shape, ends = ModelShape.from_hf(four), 2 * 32_000 * 4096
    assert shape.dtype_bytes == 0.5
    assert shape.weight_bytes == 0.5 * (6_738_415_616 - ends) + 2 * ends
    assert shape.read_bytes(1) == 0.5 * shape.body_params + 2 * 32_000 * 4096


def test_fp8_experts_are_read_in_fp8_and_the_head_is_not() -> None:
    shape = ModelShape.from_hf(CONFIGS["deepseek-v3"])
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
            "quant_method='new'",
        ),
    ],
)
def test_a_bad_file_is_named_with_what_is_wrong(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        ModelShape.from_hf(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.json: cannot be read: No such file"):
        ModelShape.from_hf(tmp_path / "nowhere.json")
