"""Weights in 8 bits: near those that they were, half the bytes, and the tokens are those of
transformers with the weights that they stand for.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch

from pagedsim.core import ConfigError, SamplingParams
from pagedsim.engine.llm import LLM
from pagedsim.engine.models import load_model
from pagedsim.engine.models.quantization import LARGEST, EightBit, check_quantization, rounded
from tests.engine.test_equality import PROMPTS, TOKENS, prompts, served, small

FORMS = pytest.mark.parametrize("form", sorted(LARGEST))
FAMILIES = ("llama", "mistral", "qwen3")
STEP = {"int8": 1 / 254, "fp8": 1 / 28}
"""The largest error of a weight, as a part of the largest of its output: half a step of 1/127, and
of four bits where e4m3 is coarsest, between 256 and 448."""


def plain(module: Any) -> Any:
    """The module with the weights that its 8 bits stand for."""
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, EightBit):
                linear = torch.nn.Linear(child.in_features, child.out_features, bias=False)
                linear.weight.data, linear.bias = child.plain(torch.float32), child.bias
                setattr(parent, name, linear)
    return module


@FORMS
def test_weights_are_near_those_that_they_were(form: str) -> None:
    torch.manual_seed(0)
    weight = torch.randn(64, 48) * torch.logspace(-3, 3, 64)[:, None]
    weight[7] = 0
    bits, scale = rounded(weight, form)
    off = (bits.float() * scale[:, None] - weight).abs().amax(1)
    assert bits.element_size() == 1 and scale.dtype == torch.float32
    assert bool((off <= STEP[form] * weight.abs().amax(1) * (1 + 1e-6)).all())
    assert bits.float().abs().amax() == LARGEST[form]


@FORMS
@pytest.mark.parametrize("name", FAMILIES)
def test_tokens_are_those_of_the_weights_that_they_stand_for(name: str, form: str) -> None:
    engine = small(name, quantization=form)
    theirs = plain(deepcopy(engine.model.module))
    theirs.set_attn_implementation("sdpa")
    wanted = []
    for prompt in prompts():
        ids = torch.tensor([prompt])
        whole = theirs.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=TOKENS
        )
        wanted.append(whole[0, len(prompt) :].tolist())
    outputs = served(engine)
    assert [outputs[i].outputs[0].token_ids for i in range(PROMPTS)] == wanted


@FORMS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_are_those_of_the_weights_that_they_stand_for(form: str, dtype: torch.dtype) -> None:
    llm = LLM("tiny", device="cpu", dtype=dtype, quantization=form)
    params = SamplingParams(temperature=0, max_tokens=3, logprobs=3)
    [answer] = llm.generate(["Once upon a time"], params, use_tqdm=False)
    ids = torch.tensor([answer.prompt_token_ids])
    module: Any = llm.engine.model.module
    module.set_attn_implementation("sdpa")
    with torch.no_grad():
        logits = module(input_ids=ids, use_cache=False).logits[0, -1].float()
    best = logits.log_softmax(-1).topk(3).values.tolist()
    assert answer.outputs[0].logprobs is not None
    first = sorted((one.logprob for one in answer.outputs[0].logprobs[0].values()), reverse=True)
    assert first[:3] == pytest.approx(best, abs=1e-4 if dtype == torch.float32 else 0.1)


def test_layers_take_a_quarter_of_float32() -> None:
    def bytes_of(form: str | None) -> int:
        module: Any = load_model("tiny", quantization=form).module
        return sum(weight.nbytes for weight in module.model.layers.parameters())

    assert bytes_of("int8") == bytes_of("fp8") < 0.27 * bytes_of(None)


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"quantization": "awq"}, "unknown quantization 'awq': choose from fp8, int8"),
        (
            {"quantization": "int8", "model_impl": "transformers"},
            "quantization=int8: model=tiny: model_impl=transformers; only the native decoder has "
            "weights in 8 bits, and for these families alone",
        ),
    ],
)
def test_what_is_refused(settings: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        LLM("tiny", device="cpu", **settings)
    assert str(caught.value) == line


def test_what_the_native_decoder_does_not_know() -> None:
    with pytest.raises(ConfigError, match=r"^quantization=fp8: model=GPT2LMHeadModel: it is none"):
        small("gpt2", quantization="fp8")


def test_float8_where_a_gpu_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA A100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    check_quantization("int8", device)
    with pytest.raises(ConfigError, match=r"^quantization=fp8: NVIDIA A100 has no float8; choose"):
        check_quantization("fp8", device)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    check_quantization("fp8", device)


def test_ranks_round_their_own_parts() -> None:
    """With scales of their own for what is split by inputs; here that changes no token."""
    params, found = SamplingParams(temperature=0, max_tokens=4), []
    for ranks in (1, 2):
        llm = LLM(
            "tiny", device="cpu", quantization="int8", tensor_parallel_size=ranks, num_gpu_blocks=64
        )
        try:
            [answer] = llm.generate(["Once upon"], params, use_tqdm=False)
            found.append(answer.outputs[0].token_ids)
        finally:
            llm.close()
    assert found[0] == found[1]
