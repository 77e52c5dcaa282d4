"""Engine settings: the model, its execution and the server's specification; vLLM's names for them.

vLLM's names are translated here and nowhere else. They change with its versions; listed are those
of 0.6, 0.7 and later.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from types import SimpleNamespace
from typing import Any

from pagedsim.core import ConfigError
from pagedsim.core.errors import require_flag, require_whole, shown, unknown
from pagedsim.engine.models.load import FORMATS, IMPLEMENTATIONS
from pagedsim.server import ENGINE_MEMORIES, MOST_THREADS, ServerSpec

DEVICES = ("auto", "cuda", "cpu")
GENERATION_CONFIGS = ("auto", "vllm")


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Settings of an engine.

    The server's policies are given as a name, a path to a user-defined class, or an object. None
    selects a default from the model and the machine.
    """

    model: Any = "tiny"
    """A folder, a GGUF file, a name on the Hugging Face Hub, "tiny", which needs no download,
    "smollm2", which a package carries, one of transformers' own objects: a configuration, or a
    model; or a model that is loaded already."""
    tokenizer: str | None = None
    """None: the model's own."""
    dtype: str = "auto"
    """Of weights and computation, and of the cache by default (`kv_cache_dtype`)."""
    device: str = "auto"
    load_format: str = "auto"
    """dummy: random weights, from the configuration alone."""
    model_impl: str = "auto"
    """The forward pass: transformers', or the faster native one for Llama, Mistral, Qwen2 and
    Qwen3. auto: native where supported."""
    enforce_eager: bool = False
    """Disable CUDA graphs."""
    generation_config: str = "auto"
    """Sampling defaults of requests: auto, those of the model's
    generation_config.json (temperature, top_p, top_k, min_p, repetition_penalty, max_new_tokens),
    or vllm, those of SamplingParams."""
    num_threads: int = 1
    """CPU threads, shared by the ranks. More threads help a large model on an otherwise idle
    machine; beside other load they wait for each other in every matmul."""
    seed: int = 0
    """For random weights, and for sampling of requests without a seed."""
    server: ServerSpec = field(default_factory=ServerSpec)
    """Each `tensor_parallel` rank is a process, on a GPU of its own or sharing the CPU."""

    def __post_init__(self) -> None:
        for name, value, known in (
            ("device", self.device, DEVICES),
            ("load_format", self.load_format, FORMATS),
            ("model_impl", self.model_impl, IMPLEMENTATIONS),
            ("generation_config", self.generation_config, GENERATION_CONFIGS),
            ("memory", self.server.memory, ENGINE_MEMORIES),
        ):
            if value not in known:
                raise unknown(name, str(value), known)
        for name in ("pipeline_parallel", "expert_parallel"):
            if (size := getattr(self.server, name)) > 1:
                raise ConfigError(f"{name}={size}: must be 1; the engine has tensor_parallel alone")
        require_whole("seed", self.seed, 0, 2**63 - 1)
        require_whole("num_threads", self.num_threads, 1, MOST_THREADS)
        require_flag("enforce_eager", self.enforce_eager)

    @classmethod
    def of(cls, **settings: Any) -> Arguments:
        """Build from the flat settings of Arguments and ServerSpec; those of a `server` hold where
        they are not given.

        >>> Arguments.of(model="tiny", block_size=8).server.block_size
        8
        """
        for name in settings:
            if name not in SETTINGS:
                raise unknown("engine setting", name, SETTINGS)
        base = settings.pop("server", ServerSpec())
        if not isinstance(base, ServerSpec):
            raise ConfigError(
                f"server={shown(base)}: must be a ServerSpec, such as ps.preset('sglang-0.5')"
            )
        server = {name: settings.pop(name) for name in _SERVER if name in settings}
        if "memory" in server:  # whose settings are not those of the other one
            base = replace(base, memory_settings={}, block_size=ServerSpec.block_size)
        return cls(**settings, server=replace(base, **server))

    @property
    def loading(self) -> dict[str, Any]:
        """Settings that determine the loaded weights, besides model and device."""
        names = ("dtype", "load_format", "model_impl", "seed")
        settings = {name: getattr(self, name) for name in names}
        server = {name: getattr(self.server, name) for name in ("max_model_len", "quantization")}
        return {**settings, **server}


_SERVER = [field.name for field in fields(ServerSpec)]
SETTINGS = [*(field.name for field in fields(Arguments)), *_SERVER]
"""Setting names of `Arguments.of`."""


VLLM_NAMES: Mapping[str, str] = {
    "max_seqs": "max_num_seqs",
    "max_batched_tokens": "max_num_batched_tokens",
    "blocks": "num_gpu_blocks",
    "cpu_blocks": "num_cpu_blocks",
    "swap_space_gib": "swap_space",
    "tensor_parallel": "tensor_parallel_size",
}
"""Settings that have vLLM's name in `LLM`, and in its errors."""

OURS: Mapping[str, str] = {VLLM_NAMES.get(name, name): name for name in SETTINGS}
"""Settings that are passed on unchanged: name in `LLM` -> name in `Arguments`."""


TRANSLATED: Mapping[str, tuple[str, Mapping[bool, str] | None]] = {
    "num_gpu_blocks_override": ("num_gpu_blocks", None),
    "enable_prefix_caching": ("memory", {True: "prefix", False: "paged"}),
    "enable_chunked_prefill": ("batching", {True: "unified", False: "prefill_first"}),
    "scheduling_policy": ("policy", None),
    "preemption_mode": ("preemption", None),
}
"""vLLM's setting -> ours, and for a flag the values of true and false."""

NONE_IS_UNSET = {
    *TRANSLATED,
    *("max_num_seqs", "block_size", "enforce_eager", "seed", "swap_space", "async_scheduling"),
    "generation_config",
}
"""Settings for which None is vLLM's default, but not ours."""

_WITHOUT_EFFECT = """
    aggregate_engine_logging disable_async_output_proc disable_cascade_attn
    disable_custom_all_reduce disable_hybrid_kv_cache_manager disable_log_requests disable_log_stats
    disable_nccl_for_dp_synchronization enable_log_requests fail_on_environ_validation
    kv_cache_metrics kv_cache_metrics_sample max_cudagraph_capture_size
    max_parallel_loading_workers max_seq_len_to_capture multi_step_stream_outputs
    performance_mode prefix_caching_hash_algo renderer_num_workers
    safetensors_load_strategy safetensors_prefetch_block_size safetensors_prefetch_num_threads
    served_model_name show_hidden_metrics_for_version shutdown_timeout use_tqdm_on_load
    use_v2_block_manager
"""
WITHOUT_EFFECT = frozenset(_WITHOUT_EFFECT.split())
"""Accepted with any value: they change no token here and tune nothing."""

_REFUSED: Mapping[str, str] = {
    "pagedsim has no speculative decoding": """
        speculative_config speculative_model speculative_model_quantization
        speculative_draft_tensor_parallel_size num_speculative_tokens speculative_disable_mqa_scorer
        speculative_max_model_len speculative_disable_by_batch_size ngram_prompt_lookup_max
        ngram_prompt_lookup_min spec_decoding_acceptance_method spec_method spec_model spec_tokens
        typical_acceptance_sampler_posterior_threshold typical_acceptance_sampler_posterior_alpha
        disable_logprobs_during_spec_decoding num_lookahead_slots""",
    "pagedsim serves no adapters": """
        enable_lora enable_lora_bias max_loras max_lora_rank fully_sharded_loras max_cpu_loras
        lora_extra_vocab_size long_lora_scaling_factors lora_dtype lora_target_modules
        default_mm_loras enable_tower_connector_lora specialize_active_lora
        enable_mixed_moe_lora_format qlora_adapter_name_or_path enable_prompt_adapter
        max_prompt_adapters max_prompt_adapter_token""",
    "pagedsim serves text alone": """
        limit_mm_per_prompt mm_processor_kwargs mm_processor_cache_gb mm_processor_cache_type
        mm_shm_cache_max_object_size_mb mm_encoder_only mm_encoder_tp_mode mm_encoder_attn_backend
        mm_encoder_attn_dtype mm_encoder_fp8_scale_path mm_encoder_fp8_scale_save_path
        mm_encoder_fp8_scale_save_margin mm_tensor_ipc media_io_kwargs enable_mm_embeds
        interleave_mm_strings skip_mm_profiling video_pruning_rate language_model_only
        disable_mm_preprocessor_cache disable_chunked_mm_input enable_mm_processor_stats
        allowed_local_media_path allowed_media_domains enable_prompt_embeds io_processor_plugin""",
    "a model is split by tensor_parallel_size alone, over the GPUs of one machine": """
        pipeline_parallel_size data_parallel_size data_parallel_rank data_parallel_start_rank
        data_parallel_size_local data_parallel_address data_parallel_rpc_port data_parallel_backend
        data_parallel_hybrid_lb data_parallel_external_lb data_parallel_multi_port_external_lb
        prefill_context_parallel_size decode_context_parallel_size dcp_comm_backend
        dcp_kv_cache_interleave_size cp_kv_cache_interleave_size enable_expert_parallel
        enable_ep_weight_filter enable_eplb eplb_config expert_placement_strategy all2all_backend
        enable_elastic_ep enable_dbo ubatch_size dbo_decode_token_threshold
        dbo_prefill_token_threshold master_addr master_port nnodes node_rank
        distributed_timeout_seconds cpu_distributed_timeout_seconds distributed_executor_backend
        worker_use_ray ray_workers_use_nsight numa_bind numa_bind_nodes numa_bind_cpus""",
    "a model's own code is not run": "trust_remote_code worker_cls worker_extension_cls",
    "a name on the hub means its newest revision; give the folder of another": """
        revision code_revision tokenizer_revision""",
    "the hub's own settings hold, such as HF_HOME and HF_TOKEN": "download_dir hf_token",
    "config.json of the model's folder says it": """
        hf_overrides hf_config_path config_format rope_scaling rope_theta model_weights
        override_attention_dtype disable_sliding_window quantization_config
        allow_deprecated_quantization model_loader_extra_config ignore_patterns
        pt_load_map_location""",
    "weights and the cache stay on the GPU; swap_space is for requests": """
        cpu_offload_gb cpu_offload_params offload_backend offload_group_size offload_num_in_group
        offload_prefetch_step offload_params kv_offloading_size kv_offloading_backend
        enable_sleep_mode enable_cumem_allocator weight_transfer_config""",
    "say the cache's size as num_gpu_blocks or gpu_memory_utilization": "kv_cache_memory_bytes",
    "the scale of an 8-bit cache is 1, in all layers": """
        calculate_kv_scales kv_cache_dtype_skip_layers quantization_param_path""",
    "a request is served from its prompt to its end by one engine": """
        kv_transfer_config kv_events_config ec_transfer_config kv_sharing_fast_prefill""",
    "models with a state in the place of keys and values are not served": """
        mamba_config mamba_cache_dtype mamba_ssm_cache_dtype mamba_block_size mamba_cache_mode
        mamba_backend enable_mamba_cache_stochastic_rounding mamba_cache_philox_rounds
        gdn_prefill_backend""",
    "which kernels run follows from the model and the device; see model_impl and enforce_eager": """
        compilation_config attention_config attention_backend kernel_config moe_backend
        linear_backend ir_op_priority cudagraph_capture_sizes enable_flashinfer_autotune
        optimization_level override_neuron_config additional_config use_fp64_gumbel""",
    "answers are not forced into a grammar": """
        structured_outputs_config guided_decoding_backend reasoning_parser reasoning_parser_plugin
        reasoning_config logits_processor_pattern logits_processors""",
    "the engine generates text": """
        task runner convert pooler_config override_pooler_config enable_return_routed_experts""",
    "SamplingParams say it, request by request": """
        override_generation_config max_logprobs logprobs_mode""",
    "a model's tokenizer is taken as transformers finds it": """
        tokenizer_mode skip_tokenizer_init tokens_only tokenizer_pool_size tokenizer_pool_type
        tokenizer_pool_extra_config intial_incremental_detokenization_offset""",
    "a policy and a batching decide what a step does; see policy and batching": """
        scheduler_cls num_scheduler_steps scheduler_delay_factor max_num_partial_prefills
        max_long_partial_prefills long_prefill_token_threshold scheduler_reserve_full_isl
        stream_interval""",
    "`python -m pagedsim` writes timelines and metrics": """
        otlp_traces_endpoint collect_detailed_traces cudagraph_metrics enable_mfu_metrics
        enable_layerwise_nvtx_tracing enable_logging_iteration_details profiler_config""",
}
REFUSED: Mapping[str, str] = {
    name: reason for reason, names in _REFUSED.items() for name in names.split()
}
"""Reason for which a setting is refused, unless it is off or vLLM's default."""

DEFAULTS: Mapping[str, Any] = {
    "all2all_backend": "allgather_reducescatter",
    "convert": "none",
    "data_parallel_backend": "mp",
    "data_parallel_size": 1,
    "dbo_decode_token_threshold": 32,
    "dbo_prefill_token_threshold": 512,
    "cp_kv_cache_interleave_size": 1,
    "dcp_kv_cache_interleave_size": 1,
    "decode_context_parallel_size": 1,
    "distributed_executor_backend": "mp",
    "expert_placement_strategy": "linear",
    "guided_decoding_backend": "xgrammar",
    "intial_incremental_detokenization_offset": 5,
    "kv_offloading_backend": "native",
    "logprobs_mode": "raw_logprobs",
    "lora_extra_vocab_size": 256,
    "mamba_backend": "triton",
    "mamba_cache_mode": "none",
    "master_addr": "127.0.0.1",
    "master_port": 29501,
    "max_long_partial_prefills": 1,
    "max_logprobs": 20,
    "max_lora_rank": 16,
    "max_loras": 1,
    "max_num_partial_prefills": 1,
    "max_prompt_adapters": 1,
    "mm_processor_cache_gb": 4,
    "mm_processor_cache_type": "lru",
    "mm_encoder_tp_mode": "weights",
    "mm_shm_cache_max_object_size_mb": 128,
    "nnodes": 1,
    "num_scheduler_steps": 1,
    "offload_num_in_group": 1,
    "offload_prefetch_step": 1,
    "optimization_level": 2,
    "pipeline_parallel_size": 1,
    "prefill_context_parallel_size": 1,
    "pt_load_map_location": "cpu",
    "runner": "generate",
    "scheduler_reserve_full_isl": True,
    "spec_decoding_acceptance_method": "rejection_sampler",
    "stream_interval": 1,
    "task": "generate",
    "tokenizer_pool_type": "ray",
}
"""Values of refused settings that change nothing, beside None, False, 0, "auto" and empty."""


def from_vllm(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings under our names; raises ConfigError for unsupported ones."""
    translated: dict[str, tuple[str, Any]] = {}  # our name: (name as given, value)
    for name, value in settings.items():
        if name in WITHOUT_EFFECT or (value is None and name in NONE_IS_UNSET):
            continue
        if name in REFUSED:
            _refuse(name, value)
            continue
        known, meant = name, value
        if name in TRANSLATED:
            known, words = TRANSLATED[name]
            meant = value if words is None else words[require_flag(name, value)]
        if known not in OURS:
            raise unknown("engine setting", name, [*OURS, *TRANSLATED])
        before = translated.setdefault(OURS[known], (name, meant))
        if before[1] != meant:
            raise ConfigError(
                f"{name}={shown(value)}: {before[0]}={shown(settings[before[0]])} says otherwise"
            )
    return {name: value for name, (_, value) in translated.items()}


def _refuse(name: str, value: Any) -> None:
    """Raise ConfigError unless it is off."""
    empty = isinstance(value, bool | int | float | str | list | tuple | dict | set) and not value
    if value is None or empty or value == "auto" or value == DEFAULTS.get(name):
        return
    raise ConfigError(f"{name}={shown(value)}: {REFUSED[name]}")


@contextmanager
def vllm_errors() -> Iterator[None]:
    """Within, errors have vLLM's names of settings, as in num_gpu_blocks=3."""
    try:
        yield
    except ConfigError as error:
        named = rf"\b({'|'.join(VLLM_NAMES)})(?=[=:])"
        text = re.sub(named, lambda match: VLLM_NAMES[match[1]], str(error))
        raise ConfigError(text) from error


class EngineArgs(SimpleNamespace):
    """Settings of `LLM` and `LLMEngine.from_engine_args`.

    >>> args = EngineArgs(model="tiny", max_num_seqs=8, enable_prefix_caching=True)
    >>> args.arguments().server.max_seqs, args.arguments().server.memory
    (8, 'prefix')
    """

    def __init__(self, model: Any = "tiny", **settings: Any) -> None:
        """`settings` are those of `Arguments` and `ServerSpec`, or vLLM's; ConfigError says why one
        is not supported."""
        super().__init__(model=model, **settings)
        self.arguments()

    def arguments(self) -> Arguments:
        """The settings under our names."""
        with vllm_errors():
            return Arguments.of(**from_vllm(vars(self)))
