"""Where models come from: folders, configurations, objects; and what is wrong with some."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoConfig, LlamaConfig

from pagedsim.core.errors import ConfigError
from pagedsim.engine.models import LoadedModel, load_model
from tests.engine.architectures import CONFIGS, SHAPE, VOCAB, loaded, reference
from tests.engine.models.serving import chunked, served, texts

transformers.utils.logging.disable_progress_bar()


def logits(model: LoadedModel) -> torch.Tensor:
    sequences = texts([12, 5], VOCAB)
    return torch.cat(served(model, sequences, chunked([12, 5], 12)))


def same(one: LoadedModel, other: LoadedModel) -> bool:
    first, second = one.module.state_dict(), other.module.state_dict()
    return first.keys() == second.keys() and all(torch.equal(first[k], second[k]) for k in first)


@pytest.mark.parametrize(
    ("name", "shards"),
    [
        *(("llama", None), ("qwen2", "20KB"), ("mixtral", "20KB"), ("deepseek-v3", None)),
        *(("opt", None), ("gpt2", "20KB")),
    ],
)
def test_a_folder_equals_the_object_that_it_was_saved_from(
    name: str, shards: str | None, tmp_path: Path
) -> None:
    reference(name).save_pretrained(tmp_path, **({"max_shard_size": shards} if shards else {}))
    stored = load_model(tmp_path)
    assert stored.name == str(tmp_path)
    assert torch.equal(logits(stored), logits(loaded(name)))
    if name == "qwen2":  # whose embeddings are tied
        for load_format in ("auto", "dummy"):
            module: Any = load_model(tmp_path, load_format=load_format).module
            assert module.lm_head.weight is module.model.embed_tokens.weight


def test_dummy_weights_need_no_file_and_follow_from_the_seed(tmp_path: Path) -> None:
    CONFIGS["qwen3-moe"]().save_pretrained(tmp_path)
    state = torch.get_rng_state()
    first = load_model(tmp_path, load_format="dummy", seed=3)
    assert torch.equal(torch.get_rng_state(), state), "torch's own generator was used up"
    torch.rand(7)
    config = CONFIGS["qwen3-moe"]()
    before = config.to_dict()
    with torch.inference_mode():
        within = load_model(config, seed=3)
        assert torch.equal(logits(within), logits(first))
    assert config.to_dict() == before
    assert same(first, within) and first.native is not None
    assert not any(weight.is_meta or weight.is_inference() for weight in within.module.parameters())
    assert not same(first, load_model(tmp_path, load_format="dummy", seed=4))


def test_weights_that_do_not_fit_are_refused_before_they_are_made() -> None:
    config = CONFIGS["qwen3-moe"]()
    config.num_experts = 10**9
    error = error_of(config)
    assert error.startswith("out of memory: the weights take ")
    assert error.endswith(" GiB left; take a smaller model or dtype")


def test_tokens_that_end_a_text(tmp_path: Path) -> None:
    for given, ends in ((2, (2,)), ([2, 5], (2, 5)), (None, ())):
        config = LlamaConfig(**SHAPE | {"eos_token_id": given})
        assert load_model(config).eos_token_ids == ends
    reference("llama").save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 7]}')
    for load_format in ("auto", "dummy"):
        assert load_model(tmp_path, load_format=load_format).eos_token_ids == (2, 7)


def test_the_longest_sequence() -> None:
    assert loaded("gpt2").max_model_len == 128
    for length in (1, 7):
        assert load_model(CONFIGS["llama"](), max_model_len=length).max_model_len == length
    assert loaded("phi3-longrope").max_model_len == 32
    assert error_of(CONFIGS["phi3-longrope"](), max_model_len=33) == (
        "max_model_len=33: model=Phi3Config goes up to 32, where its longrope rotary scaling begins"
    )


# What is refused, word for word.


def config_of(text: str) -> Callable[[Path], None]:
    return lambda folder: void((folder / "config.json").write_text(text))


def without_weights(folder: Path) -> None:
    CONFIGS["llama"]().save_pretrained(folder)


def broken_weights(folder: Path) -> None:
    reference("llama").save_pretrained(folder)
    with (folder / "model.safetensors").open("r+b") as file:
        file.truncate(300)


def a_part_is_missing(folder: Path) -> None:
    reference("llama").save_pretrained(folder, max_shard_size="20KB")
    (folder / "model-00002-of-00006.safetensors").unlink()


def broken_index(folder: Path) -> None:
    without_weights(folder)
    (folder / "model.safetensors.index.json").write_text('{"weight_map": 3}')


def without_head(folder: Path) -> None:
    reference("llama").model.save_pretrained(folder)


def void(_: object) -> None:
    """For a lambda that only acts."""


FOLDERS: dict[str, tuple[Callable[[Path], None], str]] = {
    "empty": (void, "the folder has no config.json"),
    "half a config": (
        config_of('{"model_type":'),
        "config.json is not JSON: Expecting value: line 1 column 15 (char 14)",
    ),
    "a list": (config_of("[1]"), "config.json names no model_type"),
    "no type": (config_of("{}"), "config.json names no model_type"),
    "unknown type": (
        config_of('{"model_type": "abacus", "auto_map": {}}'),
        f"config.json: model_type 'abacus' is not known to transformers {transformers.__version__}",
    ),
    "wrong value": (
        config_of('{"model_type": "llama", "hidden_size": "x"}'),
        "config.json: Validation error for field 'hidden_size': TypeError: Field 'hidden_size' "
        "expected int, got str (value: 'x')",
    ),
    "no weights": (
        without_weights,
        "has no weights (model.safetensors or pytorch_model.bin); "
        "load_format=dummy makes random ones",
    ),
    "broken weights": (
        broken_weights,
        "its weights cannot be loaded: Error while deserializing header: invalid header length",
    ),
    "a part is missing": (
        a_part_is_missing,
        "model.safetensors.index.json names model-00002-of-00006.safetensors, which is missing "
        "(1 of 6 parts are)",
    ),
    "broken index": (
        broken_index,
        "model.safetensors.index.json is broken: 'int' object has no attribute 'values'",
    ),
    "no head": (without_head, "its weights lack lm_head.weight"),
}


@pytest.mark.parametrize("fault", FOLDERS)
def test_what_is_wrong_with_a_folder(fault: str, tmp_path: Path) -> None:
    spoil, words = FOLDERS[fault]
    spoil(tmp_path)
    assert error_of(tmp_path) == f"model={tmp_path}: {words}"


def test_what_is_no_folder(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    assert error_of(gone) == f"model={gone}: no such folder"
    assert error_of("./gone") == "model=./gone: no such folder"
    assert error_of("a/b/c") == "model=a/b/c: no such folder"
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    file = tmp_path / "config.json"
    assert error_of(file) == f"model={file}: is a file; give the folder that it is in"


def test_what_is_not_on_the_hub_and_tries_to_reach_it_are_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def offline(*_: Any, **__: Any) -> None:
        logging.getLogger("huggingface_hub.utils._http").warning("Retrying in 1s [Retry 1/5].")
        raise OSError("We couldn't connect\nto the hub")

    monkeypatch.setattr(AutoConfig, "from_pretrained", offline)
    monkeypatch.setattr(logging.getLogger("huggingface_hub"), "propagate", True)  # to caplog
    assert error_of("owner/something") == (
        "model=owner/something: no such folder, and not to be had from the Hugging Face hub: "
        "We couldn't connect to the hub"
    )
    assert caplog.messages == []
    with pytest.raises(OSError, match="We couldn't"):
        offline()
    assert caplog.messages == ["Retrying in 1s [Retry 1/5]."]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"dtype": 3}, "dtype=3: must be a name or a torch.dtype"),
        ({"device": "abacus"}, "device=abacus: must be cpu, cuda or cuda:N"),
        ({"model_impl": "vllm"}, "unknown model_impl 'vllm': choose from auto, native, "
         "transformers"),
    ],
)  # fmt: skip
def test_wrong_settings(settings: dict[str, Any], words: str) -> None:
    assert error_of("tiny", **settings) == words


def test_what_is_no_model_or_has_no_limit() -> None:
    config = transformers.BloomConfig(vocab_size=97, hidden_size=32, n_layer=1, n_head=4)
    assert error_of(config) == (
        "model=BloomConfig: its config has no max_position_embeddings: give max_model_len"
    )
    assert error_of(3) == (
        "model=int: must be a name, a folder, or a transformers model or configuration"
    )


def error_of(model: Any, **settings: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        load_model(model, **settings)
    return str(caught.value)
