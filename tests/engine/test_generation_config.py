"""A model's own generation_config.json holds where a request says nothing about sampling."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pagedsim.core import ConfigError, SamplingParams
from pagedsim.engine.llm import LLM
from pagedsim.serve.api.schema import ChatRequest, CompletionRequest
from tests.engine.models.architectures import reference

OWN: dict[str, Any] = {
    **{"temperature": 0.6, "top_p": 0.9, "top_k": 40, "min_p": 0.1},
    "repetition_penalty": 1.2,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose generation_config.json has all that counts, and more."""
    path = tmp_path_factory.mktemp("model")
    reference("llama").save_pretrained(path)
    said = {**OWN, "do_sample": True, "max_new_tokens": 5, "eos_token_id": [], "num_beams": 1}
    (path / "generation_config.json").write_text(json.dumps(said))
    return path


def test_a_prompt_without_params_is_sampled_as_the_model_says(folder: Path) -> None:
    llm = LLM(str(folder), device="cpu")
    assert llm.get_default_sampling_params() == SamplingParams(**OWN, max_tokens=5)
    (by_default,) = llm.generate([[3, 4, 5]], use_tqdm=False)
    assert len(by_default.outputs[0].token_ids) == 5
    (as_it_is,) = llm.generate([[3, 4, 5]], SamplingParams(max_tokens=9), use_tqdm=False)
    assert len(as_it_is.outputs[0].token_ids) == 9
    llm.close()


def test_it_can_be_turned_off(folder: Path) -> None:
    llm = LLM(str(folder), device="cpu", generation_config="vllm")
    assert llm.get_default_sampling_params() == SamplingParams()
    llm.close()
    with pytest.raises(ConfigError, match="generation_config"):
        LLM("tiny", device="cpu", generation_config="other")


def test_a_model_that_says_nothing_has_the_usual_values() -> None:
    llm = LLM("tiny", device="cpu")
    assert llm.get_default_sampling_params() == SamplingParams()
    llm.close()


def test_a_request_over_http_takes_what_it_does_not_say() -> None:
    defaults = {**OWN, "max_tokens": 50}
    chat = ChatRequest(messages=[{"role": "user", "content": "a"}], temperature=1.0)
    chat.fill(defaults, 20)
    assert chat.asked() == SamplingParams(**OWN | {"temperature": 1.0}, max_tokens=20)
    chat = ChatRequest(messages=[{"role": "user", "content": "a"}], max_completion_tokens=30)
    chat.fill(defaults, 40)
    assert chat.asked() == SamplingParams(**OWN, max_tokens=30)
    completion = CompletionRequest(prompt=["a"], top_k=0)
    completion.fill(defaults, 20)
    assert completion.asked() == SamplingParams(**OWN | {"top_k": 0}, max_tokens=16)
