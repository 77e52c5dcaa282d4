"""Launch lines have the names that the real servers' argument parsers have."""

from __future__ import annotations

import json
import shlex
from argparse import ArgumentParser
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml

from pagedsim.run.launch import launch_of
from pagedsim.spec.study import StudySpec
from tests.run.server_options import FILE

SERVERS: dict[str, dict[str, Any]] = json.loads(FILE.read_text())


def launched(*words: str) -> str:
    spec = StudySpec.of(["experiment=single", *words], Path("unused"))
    return launch_of(spec.configured("arm", []))


def options_in(words: list[str]) -> dict[str, str]:
    """Options with their values; a flag has none."""
    return {
        word: following if not following.startswith("--") else ""
        for word, following in zip(words, [*words[1:], "--"], strict=True)
        if word.startswith("--")
    }


def check_known(words: list[str]) -> None:
    """Fail unless the server has such options, and its parser, where installed, takes the line."""
    name = "vllm" if words[0] == "vllm" else "sglang"
    server = SERVERS[name]
    for option, value in options_in(words).items():
        assert option.replace("--no-", "--", 1) in {*server["options"], "--model-path"}, option
        assert value in server["choices"].get(option, [value]), f"{option} {value}"
    parser = parser_of(name)
    if parser is not None:
        parser.parse_args(words[3:])


def parser_of(name: str) -> ArgumentParser | None:
    """The server's own parser, where it is installed."""
    try:
        if name == "vllm":
            utils = import_module("vllm.utils.argparse_utils")
            arguments = import_module("vllm.engine.arg_utils").AsyncEngineArgs
            return arguments.add_cli_args(utils.FlexibleArgumentParser())
        parser = ArgumentParser()
        import_module("sglang.srt.server_args").ServerArgs.add_cli_args(parser)
        return parser
    except ImportError:
        return None


VLLM = ("model=llama-3.1-8b", "hardware=h100", "server=vllm-0.33")
SGLANG = ("model=qwen3-8b", "hardware=h100", "server=sglang-0.5")
TWO_BY_TWO = ("tensor_parallel=2", "pipeline_parallel=2")
EXPERTS = ("model=deepseek-v3", "hardware=h200", "expert_parallel=8")


@pytest.mark.parametrize(
    ("words", "has"),
    [
        (VLLM, "--scheduling-policy fcfs --enable-prefix-caching --max-num-seqs 1024"),
        ((*VLLM, "policy=priority"), "--scheduling-policy priority"),
        ((*VLLM, "memory=paged"), "--no-enable-prefix-caching"),
        ((*VLLM, *TWO_BY_TWO), "--tensor-parallel-size 2 --pipeline-parallel-size 2"),
        ((*VLLM, "offload=vllm", "offload.gib=8", "tensor_parallel=2"), "--kv-offloading-size 16"),
        ((*VLLM, "kv_cache_dtype=fp8"), "--kv-cache-dtype fp8_e4m3"),
        ((*VLLM, "quantization=fp8"), "--quantization fp8"),
        ((*VLLM, "memory.blocks=900"), "--num-gpu-blocks-override 900"),
        ((*VLLM, *EXPERTS), "--enable-expert-parallel --data-parallel-size 8"),
        (SGLANG, "--schedule-policy fcfs --chunked-prefill-size 8192 --page-size 1"),
        ((*SGLANG, "policy=lpm"), "--schedule-policy lpm"),
        ((*SGLANG, "policy=priority"), "--enable-priority-scheduling"),
        ((*SGLANG, "memory.blocks=900"), "--max-total-tokens 900"),
        ((*SGLANG, "memory=paged"), "--disable-radix-cache"),
        ((*SGLANG, "offload=hicache"), "--enable-hierarchical-cache --hicache-ratio 2.0"),
        ((*SGLANG, *EXPERTS), "--tensor-parallel-size 8 --data-parallel-size 8"),
    ],
)  # fmt: skip
def test_a_server_is_started_by_options_that_it_has(words: tuple[str, ...], has: str) -> None:
    (line,) = launched(*words).splitlines()
    command = shlex.split(line)
    check_known(command)
    assert options_in(shlex.split(has)).items() <= options_in(command).items()
    repository = command[2] if command[0] == "vllm" else options_in(command)["--model-path"]
    assert repository.count("/") == 1


def test_what_a_server_lacks_is_said() -> None:
    *comments, line = launched("policy=srpt", "predictor=oracle", "preemption=swap").splitlines()
    lacks = ("policy=srpt", "batching=prefill_first", "preemption=swap")
    assert comments == [f"# not in vLLM 0.33: {one}" for one in lacks]
    check_known(shlex.split(line))
    first, *_ = launched(*SGLANG, "policy=srpt", "predictor=oracle").splitlines()
    assert first == "# not in SGLang 0.5: policy=srpt"
    assert "# not in vLLM 0.33: a repository of model=tiny" in launched(*VLLM, "model=tiny")


def test_a_fleet_is_yaml_with_a_command_for_each_kind_of_replica() -> None:
    alike = yaml.safe_load(launched(*VLLM, "fleet.replicas=3", "tensor_parallel=2"))
    (kind,) = alike["replicas"].values()
    assert (kind["count"], kind["gpu"], kind["gpus"]) == (3, "h100", 2)
    check_known(kind["command"])
    whole = launched(*SGLANG, "fleet.replicas=2", "batching.chunked_prefill_size=null")
    (kind,) = yaml.safe_load(whole)["replicas"].values()
    assert all(isinstance(word, str) for word in kind["command"])
    own = 'fleet.pools.decode.set=["policy=priority"]'
    split = ("fleet=prefill_decode", "fleet.pools.decode.replicas=2", own)
    for server, option in ((VLLM, "--kv-transfer-config"), (SGLANG, "--disaggregation-mode")):
        pools = yaml.safe_load(
            launched(*server, *split, 'fleet.pools.decode.set=["policy=priority"]')
        )["replicas"]
        assert {name: pool["count"] for name, pool in pools.items()} == {"prefill": 1, "decode": 2}
        for pool in pools.values():
            check_known(pool["command"])
            assert option in pool["command"]
        assert pools["prefill"]["command"] != pools["decode"]["command"]
