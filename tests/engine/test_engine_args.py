"""vLLM's arguments: each is translated, of no effect, or refused with the reason."""

from __future__ import annotations

from typing import Any

import pytest

from pagedsim.core import ConfigError
from pagedsim.engine.engine import LLMEngine
from pagedsim.engine.engine_args import (
    OURS,
    REFUSED,
    TRANSLATED,
    WITHOUT_EFFECT,
    EngineArgs,
    from_vllm,
)
from pagedsim.engine.llm import LLM

NONE = """
    served_model_name tokenizer download_dir max_model_len distributed_executor_backend
    max_parallel_loading_workers block_size enable_prefix_caching max_num_batched_tokens
    max_num_seqs revision code_revision rope_scaling rope_theta hf_overrides tokenizer_revision
    quantization enforce_eager tokenizer_pool_extra_config limit_mm_per_prompt mm_processor_kwargs
    long_lora_scaling_factors max_cpu_loras num_gpu_blocks_override model_loader_extra_config
    ignore_patterns preemption_mode enable_chunked_prefill logits_processor_pattern
    speculative_model speculative_model_quantization speculative_draft_tensor_parallel_size
    num_speculative_tokens speculative_max_model_len speculative_disable_by_batch_size
    ngram_prompt_lookup_max ngram_prompt_lookup_min typical_acceptance_sampler_posterior_threshold
    typical_acceptance_sampler_posterior_alpha qlora_adapter_name_or_path
    disable_logprobs_during_spec_decoding otlp_traces_endpoint collect_detailed_traces
    override_neuron_config override_pooler_config compilation_config kv_transfer_config
    generation_config override_generation_config calculate_kv_scales quantization_param_path
"""
FALSE = """
    skip_tokenizer_init trust_remote_code disable_sliding_window disable_log_stats
    disable_custom_all_reduce disable_mm_preprocessor_cache enable_lora enable_lora_bias
    enable_prompt_adapter fully_sharded_loras ray_workers_use_nsight
    speculative_disable_mqa_scorer disable_async_output_proc enable_sleep_mode worker_use_ray
    disable_log_requests
"""
AUTO = """
    task tokenizer_mode load_format config_format dtype kv_cache_dtype lora_dtype device worker_cls
    model_impl
"""
OLD: dict[str, Any] = {
    **dict.fromkeys(NONE.split()),
    **dict.fromkeys(FALSE.split(), False),
    **dict.fromkeys(AUTO.split(), "auto"),
    **{"allowed_local_media_path": "", "seed": 0, "cpu_offload_gb": 0, "num_lookahead_slots": 0},
    **{"scheduler_delay_factor": 0.0, "tokenizer_pool_size": 0, "max_prompt_adapter_token": 0},
    **{"pipeline_parallel_size": 1, "tensor_parallel_size": 1, "max_loras": 1},
    **{"max_prompt_adapters": 1, "num_scheduler_steps": 1, "max_lora_rank": 16},
    **{"intial_incremental_detokenization_offset": 5, "swap_space": 4, "max_logprobs": 20},
    **{"gpu_memory_utilization": 0.9, "max_seq_len_to_capture": 8192, "tokenizer_pool_type": "ray"},
    **{"use_v2_block_manager": True, "lora_extra_vocab_size": 256, "scheduling_policy": "fcfs"},
    **{"multi_step_stream_outputs": True, "guided_decoding_backend": "xgrammar"},
    **{"spec_decoding_acceptance_method": "rejection_sampler"},
}
"""What EngineArgs of 0.6 and 0.7 took, and the default of each."""

NEW = """
    enable_return_routed_experts model_weights served_model_name tokenizer hf_config_path runner
    convert skip_tokenizer_init enable_prompt_embeds tokenizer_mode trust_remote_code
    allowed_local_media_path allowed_media_domains download_dir safetensors_load_strategy
    safetensors_prefetch_num_threads safetensors_prefetch_block_size load_format config_format dtype
    kv_cache_dtype seed max_model_len cudagraph_capture_sizes max_cudagraph_capture_size
    ir_op_priority distributed_executor_backend pipeline_parallel_size master_addr master_port
    nnodes node_rank distributed_timeout_seconds cpu_distributed_timeout_seconds numa_bind
    numa_bind_nodes numa_bind_cpus tensor_parallel_size prefill_context_parallel_size
    decode_context_parallel_size dcp_comm_backend dcp_kv_cache_interleave_size
    cp_kv_cache_interleave_size data_parallel_size data_parallel_rank data_parallel_start_rank
    data_parallel_size_local data_parallel_address data_parallel_rpc_port data_parallel_hybrid_lb
    data_parallel_external_lb data_parallel_multi_port_external_lb data_parallel_backend
    enable_expert_parallel enable_ep_weight_filter moe_backend linear_backend all2all_backend
    enable_elastic_ep enable_dbo ubatch_size dbo_decode_token_threshold dbo_prefill_token_threshold
    disable_nccl_for_dp_synchronization eplb_config enable_eplb expert_placement_strategy
    max_parallel_loading_workers block_size enable_prefix_caching prefix_caching_hash_algo
    disable_sliding_window disable_cascade_attn offload_backend cpu_offload_gb cpu_offload_params
    offload_group_size offload_num_in_group offload_prefetch_step offload_params
    gpu_memory_utilization kv_cache_memory_bytes max_num_batched_tokens max_num_partial_prefills
    max_long_partial_prefills long_prefill_token_threshold max_num_seqs max_logprobs logprobs_mode
    use_fp64_gumbel disable_log_stats aggregate_engine_logging revision code_revision hf_token
    hf_overrides tokenizer_revision quantization quantization_config allow_deprecated_quantization
    enforce_eager disable_custom_all_reduce language_model_only limit_mm_per_prompt enable_mm_embeds
    interleave_mm_strings media_io_kwargs mm_processor_kwargs mm_processor_cache_gb
    mm_processor_cache_type mm_shm_cache_max_object_size_mb mm_encoder_only mm_encoder_tp_mode
    mm_encoder_attn_backend mm_encoder_attn_dtype mm_encoder_fp8_scale_path
    mm_encoder_fp8_scale_save_path mm_encoder_fp8_scale_save_margin io_processor_plugin
    renderer_num_workers skip_mm_profiling video_pruning_rate mm_tensor_ipc enable_lora max_loras
    max_lora_rank default_mm_loras fully_sharded_loras max_cpu_loras lora_dtype lora_target_modules
    enable_tower_connector_lora specialize_active_lora enable_mixed_moe_lora_format
    ray_workers_use_nsight num_gpu_blocks_override model_loader_extra_config ignore_patterns
    enable_chunked_prefill disable_chunked_mm_input scheduler_reserve_full_isl
    disable_hybrid_kv_cache_manager structured_outputs_config reasoning_parser
    reasoning_parser_plugin speculative_config spec_method spec_model spec_tokens
    show_hidden_metrics_for_version otlp_traces_endpoint collect_detailed_traces kv_cache_metrics
    kv_cache_metrics_sample cudagraph_metrics enable_layerwise_nvtx_tracing enable_mfu_metrics
    enable_logging_iteration_details enable_mm_processor_stats scheduling_policy scheduler_cls
    pooler_config compilation_config attention_config mamba_config kernel_config
    enable_flashinfer_autotune worker_cls worker_extension_cls profiler_config kv_transfer_config
    kv_events_config ec_transfer_config reasoning_config generation_config enable_sleep_mode
    enable_cumem_allocator override_generation_config model_impl override_attention_dtype
    attention_backend calculate_kv_scales kv_cache_dtype_skip_layers mamba_cache_dtype
    mamba_ssm_cache_dtype mamba_block_size mamba_cache_mode mamba_backend
    enable_mamba_cache_stochastic_rounding mamba_cache_philox_rounds additional_config
    use_tqdm_on_load pt_load_map_location logits_processors async_scheduling stream_interval
    kv_sharing_fast_prefill optimization_level performance_mode kv_offloading_size
    kv_offloading_backend tokens_only shutdown_timeout weight_transfer_config
    fail_on_environ_validation gdn_prefill_backend enable_log_requests
"""
"""What EngineArgs and AsyncEngineArgs of later versions take, beside the model."""

KNOWN = sorted({*OLD, *NEW.split()})


@pytest.mark.parametrize("name", KNOWN)
def test_every_argument_has_its_place_in_one_table(name: str) -> None:
    places = [name in table for table in (OURS, TRANSLATED, WITHOUT_EFFECT, REFUSED)]
    assert sum(places) == 1


def test_the_tables_hold_nothing_that_vllm_does_not_take() -> None:
    assert {*TRANSLATED, *WITHOUT_EFFECT, *REFUSED} - {*KNOWN} == set()


@pytest.mark.parametrize("name", OLD)
def test_an_argument_may_be_given_as_vllm_has_it(name: str) -> None:
    EngineArgs("tiny", **{name: OLD[name]})


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_is_refused_is_told_in_a_line_with_the_reason(name: str) -> None:
    with pytest.raises(ConfigError) as error:
        EngineArgs("tiny", **{name: "other"})
    assert str(error.value) == f"{name}='other': {REFUSED[name]}"
    assert from_vllm({name: None}) == {}


@pytest.mark.parametrize("name", sorted(WITHOUT_EFFECT))
def test_what_has_no_effect_is_left_out(name: str) -> None:
    assert from_vllm({name: "anything"}) == {}


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ({"num_gpu_blocks_override": 7}, {"blocks": 7}),
        ({"enable_prefix_caching": True}, {"memory": "prefix"}),
        ({"enable_prefix_caching": False}, {"memory": "paged"}),
        ({"enable_chunked_prefill": True}, {"batching": "unified"}),
        ({"enable_chunked_prefill": False}, {"batching": "prefill_first"}),
        ({"scheduling_policy": "priority"}, {"policy": "priority"}),
        ({"preemption_mode": "swap"}, {"preemption": "swap"}),
        ({"enable_prefix_caching": True, "memory": "prefix"}, {"memory": "prefix"}),
        (dict.fromkeys([*TRANSLATED, "max_num_seqs", "seed", "enforce_eager"]), {}),
        ({"pipeline_parallel_size": 1, "enable_lora": False, "task": "generate"}, {}),
    ],
)
def test_what_is_called_otherwise_is_translated(given: dict[str, Any], meant: Any) -> None:
    assert from_vllm(given) == meant


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        (
            {"memory": "paged", "enable_prefix_caching": True},
            "enable_prefix_caching=True: memory='paged' says otherwise",
        ),
        (
            {"num_gpu_blocks_override": 7, "num_gpu_blocks": 8},
            "num_gpu_blocks=8: num_gpu_blocks_override=7 says otherwise",
        ),
        ({"enable_chunked_prefill": "no"}, "enable_chunked_prefill='no': must be true or false"),
        (
            {"speculative_config": {"num_speculative_tokens": 3}},
            "speculative_config={'num_speculative_tokens': 3}: "
            "pagedsim has no speculative decoding",
        ),
        ({"num_gpu_blocks_override": 0}, "num_gpu_blocks=0: must be a whole number of at least 1"),
    ],
)
def test_what_cannot_be_is_told_at_once(settings: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError) as error:
        EngineArgs("tiny", **settings)
    assert str(error.value) == line


def test_an_unknown_name_gets_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"'enable_prefix_cache': did you mean 'enable_prefix_c"):
        EngineArgs("tiny", enable_prefix_cache=True)


def test_engines_are_made_of_engine_args() -> None:
    args = EngineArgs(
        model="tiny", device="cpu", max_num_seqs=3, max_model_len=64, num_gpu_blocks=9,
        enable_prefix_caching=True, enable_chunked_prefill=True, scheduling_policy="priority",
    )  # fmt: skip
    args.max_num_seqs = 4
    server = LLMEngine.from_engine_args(args).server
    assert (server.max_seqs, server.blocks, server.memory) == (4, 9, "prefix")
    assert (server.batching, server.policy) == ("unified", "priority")
    assert LLM(**vars(args)).llm_engine.server.sizes() == server.sizes()


def test_errors_of_an_engine_made_of_them_have_their_names() -> None:
    args = EngineArgs(
        "tiny", device="cpu", max_model_len=4, max_num_batched_tokens=5, max_num_seqs=6
    )
    with pytest.raises(ConfigError, match=r"^max_num_batched_tokens=5: must be at least max_num_s"):
        LLMEngine.from_engine_args(args)
