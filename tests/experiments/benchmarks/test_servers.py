"""The engine against others that serve: each is asked the same, in a process of its own; those that
are not installed are named."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from experiments.benchmarks import servers  # noqa: E402
from experiments.benchmarks.engine import Load  # noqa: E402

ROOT = Path(__file__).parents[3]
FEW = ["--device", "cpu", "--prompts", "3", "--tokens", "4", "--repeats", "1"]
LOAD = Load([[5, 6, 7], [8]], 2)
VLLM = """
import torch
from transformers import AutoModelForCausalLM

__version__ = "0"


class SamplingParams:
    def __init__(self, temperature, max_tokens, ignore_eos, detokenize):
        assert temperature == 0 and ignore_eos and not detokenize
        self.max_tokens = max_tokens


class Said:
    def __init__(self, tokens):
        self.outputs = [self]
        self.token_ids = tuple(tokens)


class LLM:
    def __init__(self, model, dtype, **settings):
        assert settings["skip_tokenizer_init"] and not settings["enable_prefix_caching"]
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=dtype)

    def generate(self, prompts, params, use_tqdm):
        return [Said(self.tokens(one["prompt_token_ids"], params.max_tokens)) for one in prompts]

    def tokens(self, prompt, count):
        said = list(prompt)
        for _ in range(count):
            with torch.no_grad():
                said.append(int(self.model(torch.tensor([said])).logits[0, -1].argmax()))
        return said[len(prompt):]
"""
SGLANG = """
class Engine:
    def __init__(self, **settings):
        raise RuntimeError("no such GPU")
"""


def test_vllm_is_asked_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    class LLM:
        def __init__(self, **settings: Any) -> None:
            seen["made"] = settings

        def generate(self, prompts: Any, params: Any, use_tqdm: bool) -> Any:
            seen["asked"] = prompts, params
            return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=(1, 2))]) for _ in prompts]

    module: Any = ModuleType("vllm")
    module.LLM, module.SamplingParams = LLM, lambda **settings: settings
    monkeypatch.setitem(sys.modules, "vllm", module)
    assert servers.vllm(Path("folder"), "bfloat16", LOAD)() == [[1, 2], [1, 2]]
    assert seen["made"]["model"] == "folder" and seen["made"]["dtype"] == "bfloat16"
    assert (seen["made"]["max_model_len"], seen["made"]["max_num_seqs"]) == (5, 2)
    assert not seen["made"]["enable_prefix_caching"] and seen["made"]["skip_tokenizer_init"]
    prompts, params = seen["asked"]
    assert [one["prompt_token_ids"] for one in prompts] == LOAD.prompts
    assert params == {"temperature": 0, "max_tokens": 2, "ignore_eos": True, "detokenize": False}


def test_sglang_is_asked_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    class Engine:
        def __init__(self, **settings: Any) -> None:
            seen["made"] = settings

        def generate(self, **asked: Any) -> Any:
            seen["asked"] = asked
            return [{"output_ids": [3, 4]} for _ in asked["input_ids"]]

    module: Any = ModuleType("sglang")
    module.Engine = Engine
    monkeypatch.setitem(sys.modules, "sglang", module)
    assert servers.sglang(Path("folder"), "bfloat16", LOAD)() == [[3, 4], [3, 4]]
    assert seen["made"]["model_path"] == "folder" and seen["made"]["skip_tokenizer_init"]
    assert seen["made"]["disable_radix_cache"] and seen["made"]["context_length"] == 5
    assert seen["asked"]["input_ids"] == LOAD.prompts
    asked = seen["asked"]["sampling_params"]
    assert asked == {"temperature": 0, "max_new_tokens": 2, "ignore_eos": True}


def test_who_is_not_installed_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    servers.main([*FEW, "--out", str(tmp_path)])
    result = json.loads((tmp_path / "servers.json").read_text())
    assert result["absent"] == {"vllm": "not installed", "sglang": "not installed"}
    assert "| vllm | not installed |  |" in capsys.readouterr().out


@pytest.mark.slow
def test_the_whole_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One serves our weights, as they were saved; another cannot start."""
    modules = tmp_path / "modules"
    modules.mkdir()
    (modules / "vllm.py").write_text(VLLM)
    (modules / "sglang.py").write_text(SGLANG)
    monkeypatch.syspath_prepend(modules)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(modules), str(ROOT)]))
    with pytest.raises(SystemExit, match=r"^not timed: sglang$"):
        servers.main([*FEW, "--out", str(tmp_path)])
    result = json.loads((tmp_path / "servers.json").read_text())
    assert result["alike"] == {"vllm": 1.0} and result["absent"] == {}
    assert set(result["rates"]) == {servers.FIRST, servers.AHEAD, "vllm"}
    assert result["failed"] == {"sglang": "RuntimeError: no such GPU"}
    assert "| sglang | RuntimeError: no such GPU |  |" in capsys.readouterr().out


def test_other_tokens_are_not_timed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    said = {"answers": [[1, 2], [3, 5]], "rate": 9.0, "version": "0"}
    monkeypatch.setattr(servers, "elsewhere", lambda *given: said)
    found = servers.compared(["vllm"], tmp_path, LOAD, 1, [[1, 2], [3, 4]], torch.float32)
    assert found["rates"] == {} and found["failed"] == {"vllm": "50% of its answers are ours"}
    found = servers.compared(["vllm"], tmp_path, LOAD, 1, [[1, 2], [3, 4]], torch.bfloat16)
    assert found["rates"] == {"vllm": 9.0} and found["failed"] == {}
