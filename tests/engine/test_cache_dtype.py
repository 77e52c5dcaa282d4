"""Keys and values in 8 bits: half the blocks' bytes, and whatever the scheduler does to a request,
its tokens are those of transformers' generate with keys and values rounded in front of attention.
"""

from __future__ import annotations

from copy import deepcopy
from functools import cache
from typing import Any

import pytest
import torch

from pagedsim.core import ConfigError, SamplingParams
from pagedsim.engine import profile
from pagedsim.engine import runner as runner_module
from pagedsim.engine.cache import Cache, CacheShape, cache_dtype
from pagedsim.kernels.float8 import FORMATS, rounded
from tests.engine.test_equality import (
    BLOCKS,
    PROMPTS,
    TOKENS,
    model,
    prompts,
    served,
)
from tests.engine.test_equality import wanted as wanted_in_full
from tests.engine.test_graphs import Replayer, server

FORMS = pytest.mark.parametrize("form", FORMATS)
WAYS = [("llama", "native"), ("mistral", "native"), ("qwen3", "native"), ("gpt2", "transformers")]


@cache
def wanted(name: str, form: str) -> list[list[int]]:
    """What transformers generates where keys and values are rounded."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    def attention(module: Any, q: torch.Tensor, *rest: Any, **named: Any) -> Any:
        k, v = (rounded(one, FORMATS[form]).to(q.dtype) for one in rest[:2])
        return sdpa_attention_forward(module, q, k, v, *rest[2:], **named)

    AttentionInterface.register(form, attention)
    AttentionMaskInterface.register(form, sdpa_mask)
    theirs = deepcopy(model(name))
    theirs.set_attn_implementation(form)
    answers = []
    for prompt in prompts():
        ids = torch.tensor([prompt])
        whole = theirs.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=TOKENS
        )
        answers.append(whole[0, len(prompt) :].tolist())
    return answers


@FORMS
@pytest.mark.parametrize(("name", "model_impl"), WAYS)
@pytest.mark.parametrize(
    ("memory", "preemption"),
    [
        *(("paged", "recompute"), ("prefix", "swap")),
        pytest.param("paged", "swap", marks=pytest.mark.slow),
        pytest.param("prefix", "recompute", marks=pytest.mark.slow),
    ],
)
def test_greedy_tokens(name: str, model_impl: str, form: str, memory: str, preemption: str) -> None:
    engine = server(
        name, model_impl=model_impl, kv_cache_dtype=form, batching="unified", memory=memory,
        preemption=preemption,
    )  # fmt: skip
    outputs = served(engine)
    assert [outputs[i].outputs[0].token_ids for i in range(PROMPTS)] == wanted(name, form)
    assert wanted(name, form) != wanted_in_full(name)
    metrics = [outputs[i].metrics for i in range(PROMPTS)]
    assert sum(one.preemptions for one in metrics) > 0
    assert (sum(one.swapped_blocks for one in metrics) > 0) == (preemption == "swap")
    assert engine.runner.cache.gpu.dtype == engine.runner.cache.cpu.dtype == FORMATS[form]


@pytest.mark.parametrize("batching", ["prefill_first", "static"])
def test_fp8_is_e4m3_under_every_batching(batching: str) -> None:
    engine = server("llama", kv_cache_dtype="fp8", batching=batching)
    outputs = served(engine)
    found = [outputs[i].outputs[0].token_ids for i in range(PROMPTS)]
    assert found == wanted("llama", "fp8_e4m3")


@FORMS
def test_what_is_cached_is_found(form: str) -> None:
    engine = server("llama", kv_cache_dtype=form, batching="unified", memory="prefix")
    served(engine)
    again = served(engine)
    assert [again[i].outputs[0].token_ids for i in range(PROMPTS)] == wanted("llama", form)
    assert sum(again[i].metrics.cached_tokens for i in range(PROMPTS)) > 0


def test_groups_share_and_copy_blocks() -> None:
    """Beams fork in the middle of a block; in scarce memory they come out as in plenty."""
    params = SamplingParams(n=3, beam_search=True, temperature=0, max_tokens=TOKENS)
    found = []
    for blocks in (BLOCKS * 3, BLOCKS * 20):
        engine = server("qwen3", kv_cache_dtype="fp8", blocks=blocks)
        outputs = served(engine, params)
        found.append([[one.token_ids for one in outputs[i].outputs] for i in range(PROMPTS)])
    assert found[0] == found[1]


@FORMS
def test_graphs_change_no_token(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    replayer = Replayer()
    monkeypatch.setattr(runner_module, "recorder_of", lambda device: replayer)
    engine = server("qwen3", kv_cache_dtype=form)
    outputs = served(engine)
    assert [outputs[i].outputs[0].token_ids for i in range(PROMPTS)] == wanted("qwen3", form)
    assert replayer.replayed


@FORMS
def test_memory_holds_more_blocks(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what there is by default, and in the room for swapping; floats have 4 bytes."""
    monkeypatch.setattr(profile, "HOST_POOL", 2**20)
    room = {
        "blocks": None, "cpu_blocks": None, "swap_space_gib": 2**-10,
        "max_seqs": 4000, "max_batched_tokens": 4000,
    }  # fmt: skip
    whole, half = (
        server("llama", kv_cache_dtype=name, preemption="swap", **room) for name in ("auto", form)
    )
    assert half.scheduler.memory.total == 4 * whole.scheduler.memory.total
    assert half.scheduler.memory.cpu_total == 4 * whole.scheduler.memory.cpu_total
    for engine in (whole, half):
        each = engine.runner.cache.gpu[0].nbytes
        assert each == engine.runner.cache.shape.block_bytes
        assert engine.scheduler.memory.total == 2**20 // each


def test_a_block_is_half_of_one_in_16_bits() -> None:
    """The same for all formats, and blank however large it is."""
    for name, times in (("auto", 2), ("fp8", 1), ("fp8_e4m3", 1), ("fp8_e5m2", 1)):
        shape = CacheShape(2, 16, 3, 80, cache_dtype(name, torch.bfloat16))
        assert shape.block_bytes == times * 2 * 2 * 16 * 3 * 80
        pool = Cache(shape, 5, 3, torch.device("cpu"))
        assert pool.gpu.shape == (5, 2, 2, 16, 3, 80)
        assert pool.gpu.nbytes == 5 * shape.block_bytes and pool.cpu.nbytes == 3 * shape.block_bytes
        assert not pool.gpu.float().any()


@pytest.mark.parametrize("name", ["fp16", "fp8_e4m3fn", "float8", None, 8])
def test_an_unknown_name_is_refused(name: Any) -> None:
    with pytest.raises(ConfigError, match="kv_cache_dtype") as caught:
        server("llama", kv_cache_dtype=name)
    assert "choose from auto, fp8, fp8_e4m3, fp8_e5m2" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["fp8", "fp8_e5m2"])
def test_compressed_keys_and_values_have_no_8_bits(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        server("deepseek_v3", kv_cache_dtype=name)
    assert str(caught.value) == (
        f"kv_cache_dtype={name}: model=DeepseekV3ForCausalLM has compressed keys and values, which "
        "are kept in its own dtype alone; choose auto"
    )
