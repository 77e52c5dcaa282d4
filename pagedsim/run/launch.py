"""What was simulated, as real servers are started: commands, and values of a fleet.

A line starts vLLM 0.33 or SGLang 0.5, whichever the batching is of. Settings that the server has no
option for are named in comments, since the answer of a study may hang on them.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any, NamedTuple

from pagedsim.build import BATCHINGS, POLICIES, PREEMPTIONS, ROUTERS
from pagedsim.spec.run import RunSpec, Settings, memory_target

GIB, GB = 2**30, 1e9
INT8, FP8 = "int8", "fp8"
_ROLES = {"prefill": "kv_producer", "decode": "kv_consumer"}
"""vLLM's roles of servers that do one phase alone."""


class Launch(NamedTuple):
    """A command as words, and the settings that it does not set."""

    words: Sequence[str]
    missing: Sequence[str]
    server: str

    @property
    def lines(self) -> list[str]:
        """The command, after a comment for each setting without an option."""
        return [*(f"# not in {self.server}: {one}" for one in self.missing), shlex.join(self.words)]


def launch_of(config: Settings) -> str:
    """What starts the server of a configuration, or, in YAML, its fleet."""
    fleet = config.get("fleet") or {}
    pools = fleet.get("pools") or {}
    replicas = fleet.get("replicas", 1)
    if not pools and replicas == 1:
        return "\n".join(server_of(config).lines)
    every = {name: pool.get("replicas", 1) for name, pool in pools.items()} or {"all": replicas}
    router = _name(config["router"], ROUTERS)
    lines = [f"# requests are sent to replicas by router={router}", "replicas:"]
    for name, many in every.items():
        role = pools.get(name, {}).get("role")
        of = RunSpec(config).pool(name).settings
        launch = server_of(of, role if role in _ROLES else None)
        lines += [f"  {name}:", *(f"    {line}" for line in launch.lines[:-1])]
        lines += [f"    count: {many}", f"    gpu: {of['hardware']['name']}"]
        lines += [f"    gpus: {_gpus(of)}", "    command:"]
        lines += [f"      - {_quoted(word)}" for word in launch.words]
    return "\n".join(lines)


def server_of(config: Settings, phase: str | None = None) -> Launch:
    """The server of a configuration, which does one `phase` of requests alone, or both."""
    of = _sglang if _name(config["batching"], BATCHINGS) == "sglang" else _vllm
    words, missing = of(config, phase)
    name = "SGLang 0.5" if of is _sglang else "vLLM 0.33"
    model = model_of(config)
    if "/" not in model:
        missing.append(f"a repository of model={model}")
    return Launch([*words, *_sizes(config, name)], [*missing, *_not_sized(config)], name)


def _vllm(config: Settings, phase: str | None) -> tuple[list[str], list[str]]:
    server, memory = config["server"], config["memory"]
    words, missing = ["vllm", "serve", model_of(config)], list[str]()
    policy, preemption = _name(config["policy"], POLICIES), _name(config["preemption"], PREEMPTIONS)
    batching = _name(config["batching"], BATCHINGS)
    words += _option("--max-num-seqs", server["max_seqs"])
    words += _option("--max-num-batched-tokens", server.get("max_batched_tokens"))
    words += _option("--max-model-len", server.get("max_model_len"))
    if policy in ("fcfs", "priority"):
        words += ["--scheduling-policy", policy]
    else:
        missing.append(f"policy={policy}")
    if batching == "unified":
        words += _option(
            "--long-prefill-token-threshold",
            config["batching"].get("long_prefill_token_threshold") or None,
        )
    else:
        missing.append(f"batching={batching}")
    if preemption != "recompute":
        missing.append(f"preemption={preemption}")
    kind = memory_target(memory)
    words += ["--enable-prefix-caching" if kind == "prefix" else "--no-enable-prefix-caching"]
    if kind not in ("prefix", "paged"):
        missing.append(f"memory={kind}")
    if kind == "prefix" and memory.get("eviction", "lru") != "lru":
        missing.append(f"memory.eviction={memory['eviction']}")
    words += _option("--block-size", memory.get("block_size"))
    words += _option("--num-gpu-blocks-override", memory.get("blocks"))
    words += _option("--gpu-memory-utilization", memory.get("gpu_memory_utilization"))
    words += ["--async-scheduling" if server["async_scheduling"] else "--no-async-scheduling"]
    if config["expert_parallel"] > 1:
        words += ["--enable-expert-parallel"]
        words += _option("--data-parallel-size", _groups(config))
    offload = config.get("offload") or {}
    if _class(offload) == "VLLMOffload" and offload.get("gib"):
        words += ["--kv-offloading-size", f"{offload['gib'] * config['tensor_parallel']:g}"]
        words += ["--kv-offloading-backend", "native"]
    elif _class(offload) not in ("", "Offload"):
        missing.append(f"offload={_class(offload)}")
    if phase is not None:
        connector = f'{{"kv_connector": "NixlConnector", "kv_role": "{_ROLES[phase]}"}}'
        words += ["--kv-transfer-config", connector]
    return words, missing


_ORDERS = {"fcfs": "fcfs", "lpm": "lpm", "dfs_weight": "dfs-weight", "lof": "lof"}
"""SGLang's names of policies."""


def _sglang(config: Settings, phase: str | None) -> tuple[list[str], list[str]]:
    server, memory, batching = config["server"], config["memory"], config["batching"]
    words = ["python", "-m", "sglang.launch_server", "--model-path", model_of(config)]
    missing = list[str]()
    policy, preemption = _name(config["policy"], POLICIES), _name(config["preemption"], PREEMPTIONS)
    words += _option("--max-running-requests", server["max_seqs"])
    words += _option("--max-prefill-tokens", server.get("max_batched_tokens"))
    words += _option("--context-length", server.get("max_model_len"))
    words += _option("--chunked-prefill-size", batching.get("chunked_prefill_size") or -1)
    words += _option("--schedule-conservativeness", batching.get("conservativeness"))
    words += _option("--prefill-max-requests", batching.get("prefill_max_requests"))
    words += ["--enable-mixed-chunk"] if batching.get("mixed_chunk") else []
    if policy == "priority":
        words += ["--enable-priority-scheduling", "--schedule-low-priority-values-first"]
        threshold = batching.get("preemption_threshold")
        words += _option("--priority-scheduling-preemption-threshold", threshold)
    elif policy in _ORDERS:
        words += ["--schedule-policy", _ORDERS[policy]]
    else:
        missing.append(f"policy={policy}")
    if preemption != "recompute":
        missing.append(f"preemption={preemption}")
    kind, page = memory_target(memory), memory.get("block_size")
    words += [] if kind == "radix" else ["--disable-radix-cache"]
    if kind not in ("radix", "paged"):
        missing.append(f"memory={kind}")
    if (eviction := memory.get("eviction", "lru")) in ("lru", "lfu"):
        words += _option("--radix-eviction-policy", eviction if kind == "radix" else None)
    else:
        missing.append(f"memory.eviction={eviction}")
    words += _option("--page-size", page)
    words += _option("--max-total-tokens", memory.get("blocks") and memory["blocks"] * page)
    words += _option("--mem-fraction-static", memory.get("gpu_memory_utilization"))
    words += [] if server["async_scheduling"] else ["--disable-overlap-schedule"]
    if config["expert_parallel"] > 1:
        words += ["--expert-parallel-size", str(config["expert_parallel"])]
        if (groups := _groups(config)) is not None:
            words += ["--data-parallel-size", str(groups), "--enable-dp-attention"]
    offload = config.get("offload") or {}
    if _class(offload) == "HiCacheOffload":
        words += ["--enable-hierarchical-cache", "--hicache-write-policy", offload["write_policy"]]
        if offload.get("gib"):
            words += ["--hicache-size", f"{offload['gib'] * GIB / GB:.0f}"]
        else:
            words += _option("--hicache-ratio", offload.get("ratio"))
    elif _class(offload) not in ("", "Offload"):
        missing.append(f"offload={_class(offload)}")
    words += _option("--disaggregation-mode", phase)
    return words, missing


def _sizes(config: Settings, server: str) -> list[str]:
    """Options that both servers call alike."""
    tensor = config["tensor_parallel"]
    if server.startswith("SGLang"):  # which counts the GPUs of all groups
        tensor *= _groups(config) or 1
    words = ["--tensor-parallel-size", str(tensor)]
    if config["pipeline_parallel"] > 1:
        words += ["--pipeline-parallel-size", str(config["pipeline_parallel"])]
    cache: str = config["kv_cache_dtype"]
    if cache != "auto":
        words += ["--kv-cache-dtype", "fp8_e4m3" if cache == FP8 else cache]
    words += _option("--quantization", FP8 if config["quantization"] == FP8 else None)
    return words


def _not_sized(config: Settings) -> list[str]:
    return [f"quantization={INT8}"] if config["quantization"] == INT8 else []


def _groups(config: Settings) -> int | None:
    """Data-parallel groups of GPUs; None: a single one."""
    groups: int = config["expert_parallel"] // config["tensor_parallel"]
    return groups if groups > 1 else None


def _gpus(config: Settings) -> int:
    """The GPUs of a replica."""
    most: int = max(config["tensor_parallel"], config["expert_parallel"])
    return most * int(config["pipeline_parallel"])


def _option(name: str, value: object) -> list[str]:
    """The words of an option; none where there is no value."""
    return [] if value is None else [name, str(value)]


def _class(settings: Mapping[str, Any]) -> str:
    return str(settings.get("_target_") or "").rpartition(".")[2]


def _name(settings: Mapping[str, Any], known: Mapping[str, type[Any]]) -> str:
    """What a component is called on the command line, or the path of its class."""
    ours = {kind.__name__: name for name, kind in known.items()}
    target = str(settings.get("_target_"))
    return ours.get(_class(settings), target) if target.startswith("pagedsim.") else target


_REPOSITORY = re.compile(r"huggingface\.co/([\w.-]+/[\w-]+(?:\.[\w-]+)*)")


def model_of(config: Settings) -> str:
    """The model's repository, as its sheet in conf/model names it, or else its name."""
    name = str(config["model"].get("name") or config["model"].get("path"))
    sheet = files("pagedsim.conf").joinpath("model", f"{name}.yaml")
    named = _REPOSITORY.search(sheet.read_text(encoding="utf-8")) if sheet.is_file() else None
    return named[1] if named else name


def _quoted(word: str) -> str:
    """A word as YAML has a text."""
    plain = re.fullmatch(r"(--)?[A-Za-z/][\w./:-]*", word)
    return word if plain else "'{}'".format(word.replace("'", "''"))
