"""How servers size their pool of KV blocks, by version: what they keep, estimate and reserve.

Read from vLLM (`determine_available_memory`), SGLang (`_handle_gpu_memory_settings`,
`profile_max_num_token`) and TensorRT-LLM (`cal_max_tokens`), and held against what servers logged
by `python -m tests.experiments.fidelity.kv_pools`.
"""

from __future__ import annotations

from math import inf
from typing import NamedTuple

from pagedsim.core.errors import require_number, unknown
from pagedsim.sim.hardware import GIB
from pagedsim.sim.replica import Replica

DEFAULT = "vllm-0.19"


class Pool(NamedTuple):
    """The rule of one server."""

    share: float | None
    """Of memory, where no gpu_memory_utilization is set; None: SGLang's, by the GPU."""
    gib: tuple[float, float]
    """Context, libraries and NCCL of a GPU alone and of each of several, as the server counts."""
    kept_of: str = "memory"
    """What the rest of the share is kept of: memory; free, which is without `gib` (activations and
    graphs are in what is kept); left, which is without weights and activations, too."""
    logits: float = 3.7
    """Copies of the logits in 32 bits at the sampler's peak."""
    graphs: bool = False
    """Whether an estimate of CUDA graphs is subtracted."""


# vLLM's activations and contexts: accuracy_report.md of github.com/llm-d-incubation/llm-d-planner
# states both by model and version, and the contexts up to 0.16. The 3.7, and 1.25 hidden states
# below, are a fit to five of its models (vLLM 0.19: Llama-3.1-8B and 70B, Qwen2.5-7B and 72B,
# phi-4; within 0.5 %); seven others are within 2.4 %. PyTorch's own sampler, which sorts, takes 9.6
# (0.16 there; for 0.6, github.com/vllm-project/vllm/pull/10511); 0.11 samples by FlashInfer.
# Contexts of 0.6: that pull and issue 13061. Graphs are subtracted since 0.21; 0.92 is the default
# of 2026. SGLang's: free memory that it logs before the weights, 78.5 to 78.8 GiB of an H100's.
# TensorRT-LLM's are taken to be as large; it profiles prompts, whose logits stand once.
POOLS = {
    "vllm-0.6": Pool(0.9, (0.25, 2.05), logits=9.6),
    "vllm-0.11": Pool(0.9, (0.15, 0.6)),
    "vllm-0.15": Pool(0.9, (0.15, 0.6), logits=9.6),
    "vllm-0.19": Pool(0.9, (0.25, 2.1)),
    "vllm-0.33": Pool(0.92, (0.25, 2.1), graphs=True),
    "sglang-0.5": Pool(None, (0.65, 1.6), "free"),
    "trtllm-1": Pool(0.9, (0.65, 1.6), "left", logits=1),
}
# Below how many GiB: chunked_prefill_size, cuda_graph_max_bs of few GPUs and from four, and the
# sizes of prompts that are captured.
_SGLANG = (
    (20, 2048, 8, 8, 42),
    (35, 2048, 24, 80, 42),
    (60, 4096, 32, 160, 50),
    (160, 8192, 256, 512, 58),
    (inf, 16384, 512, 512, 74),
)


class Room(NamedTuple):
    """What a rule makes of the memory of a GPU: bytes for weights, the activations of the largest
    step by part, what is reserved, and blocks, for which a negative number is left if none fits."""

    share: float
    usable: float
    activations: dict[str, float]
    reserved: float
    kv_bytes: float
    blocks: int


def room(
    replica: Replica,
    *,
    pool: str = DEFAULT,
    gpu_memory_utilization: float | None = None,
    reserved_gib: float | None = None,
    max_batched_tokens: int = 2048,
    max_seqs: int = 256,
) -> Room:
    """The memory of a GPU as the server deals it; None is what it takes by itself."""
    if pool not in POOLS:
        raise unknown("pool", str(pool), POOLS)
    rule, memory, share = POOLS[pool], replica.hardware.memory_bytes, gpu_memory_utilization
    if share is None:
        share = rule.share or _static_share(replica)
    require_number("gpu_memory_utilization", share, above=0, high=1)
    if reserved_gib is None:
        reserved_gib = rule.gib[replica.gpus > 1] + _graphs_gib(rule, replica, max_seqs)
    require_number("reserved_gib", reserved_gib, 0)
    reserved, parts = reserved_gib * GIB, dict[str, float]()
    if rule.kept_of != "free":
        parts = _activations(rule, replica, max_batched_tokens, max_seqs)
    held = replica.weight_bytes + sum(parts.values()) + reserved
    base = memory - {"memory": 0.0, "free": reserved, "left": held}[rule.kept_of]
    usable = memory - (1 - share) * max(base, 0)
    left = usable - held
    return Room(share, usable, parts, reserved, left, int(left // replica.block_bytes))


def _activations(rule: Pool, replica: Replica, tokens: int, seqs: int) -> dict[str, float]:
    """Estimated peak of a step by part, in 16 bits except for the logits.

    It is reached in a layer, at four hidden states and the intermediate results of the MLP (gate,
    up and their product) or of attention, or in the sampler, which has all sequences on each GPU.
    Experts keep their workspace meanwhile: gate and up, or the outputs, and the product, of 32,768
    tokens at once (vLLM's VLLM_FUSED_MOE_CHUNK_SIZE).
    """
    model, moe, ways = replica.model, replica.model.moe, replica.tensor_parallel
    mlp = 0 if moe and not moe.dense_layers else (2 + model.gated_mlp) * model.intermediate
    attention = (2 * model.heads + 2 * model.kv_heads) * model.head_dim
    state, name = 2.0 * tokens * model.hidden, "MLP" if mlp >= attention else "attention"
    inside = 2 * tokens * max(mlp, attention) / ways
    layer = {"residual stream and norm": 4 * state, name: inside}
    logits = rule.logits * 4 * min(seqs, tokens) * model.vocab
    sampler = {"hidden states": 1.25 * state, "logits": logits}
    parts = max(layer, sampler, key=lambda parts: sum(parts.values()))
    if moe:
        inner = moe.intermediate / ways
        width = max(2 * inner, model.hidden) + inner
        parts["experts"] = 2 * min(tokens, 32_768) * moe.experts_per_token * width
    return parts


def _graphs_gib(rule: Pool, replica: Replica, seqs: int) -> float:
    """Sizes of steps that vLLM captures in pieces, and of decodes, whole: 0.2 MiB a layer each,
    beside 0.22 GiB (what 0.19 estimates for Llama-3.1-8B, Qwen2.5-7B, and 70B on 2 and 4 GPUs)."""
    sizes = (1, 2, 4, *range(8, 257, 8), *range(272, 513, 16))
    graphs = sum((size <= 2 * seqs) + (size <= seqs) for size in sizes)
    layers = replica.model.layers / replica.pipeline_parallel
    gib: float = 0.22 + 0.2 / 1024 * graphs * layers
    return rule.graphs * gib


def _static_share(replica: Replica) -> float:
    """SGLang's automatic mem_fraction_static: all but what a chunk of prompts, graphs of decodes
    and of prompts, and GPUs take by its rule of thumb, in MiB."""
    gib, ways = replica.hardware.memory_gib, replica.tensor_parallel
    _, chunk, few, many, prompts = next(sizes for sizes in _SGLANG if gib < sizes[0])
    kept = 512 + 1.5 * chunk + 2 * (few if ways < 4 else many) + 8 * prompts
    kept += 128 * ways * replica.pipeline_parallel
    return max(round(1 - max(kept, 10_240 if gib > 60 else 0) / (1024 * gib), 3), 0.001)
