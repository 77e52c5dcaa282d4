"""The comparison with serving engines, with stand-ins for vLLM and SGLang."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from experiments.benchmarks import servers  # noqa: E402
from experiments.benchmarks.engine import Load  # noqa: E402

ROOT = Path(__file__).parents[3]
FEW = ["--device", "cpu", "--prompts", "3", "--tokens", "4", "--repeats", "1"]
LOAD = Load([[5, 6, 7], [8]], [2, 2])
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
        assert settings["max_num_seqs"] == 3
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


def test_sglang_gets_the_same_load(monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.mark.slow
def test_a_peer_serves_in_its_own_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One serves our saved weights; another cannot start."""
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
