"""Steps of measured kernels, from tables that were written by exact laws."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pagedsim.core import ConfigError, StepPlan
from pagedsim.sim.cost import Measured
from pagedsim.sim.cost.base import step as step_of
from pagedsim.sim.cost.measured import GAP_US, totals_of
from pagedsim.sim.cost.terms import Totals
from pagedsim.sim.replica import Replica
from pagedsim.sim.stack import Stack
from pagedsim.testing import check_cost_model
from tests.sim.kernel_tables import (
    all_reduce,
    chosen,
    decodes,
    gemm,
    passes,
    prefills,
    products,
    write,
    write_tables,
)
from tests.sim.shapes import hardware, plan, replica

HOST = Stack(name="vllm-0.24", host_step_ms=1.0, host_request_us=10.0, server_ms=5.0, latencies=0.0)
LLAMA = replica("llama-3.1-8b", "h100")
LAYERS, HIDDEN, INTER, VOCAB = 32, 4096, 14336, 128256


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tables(tmp_path_factory.mktemp("tables"))


def measured(folder: Path, where: Replica = LLAMA, **settings: Any) -> Measured:
    return Measured(where, **{"stack": HOST, "tables": str(folder), **settings})


def of_llama(tokens: int, gpus: int = 1) -> dict[str, float]:
    """Seconds of Llama-3.1-8B's kernels whose time goes with tokens."""
    heads = 32 / gpus + 8 / gpus
    reduces = {"all-reduce": 2 * LAYERS * all_reduce(tokens * HIDDEN)} if gpus > 1 else {}
    return {
        "qkv": LAYERS * gemm(tokens, (32 + 2 * 8) * 128 / gpus, HIDDEN),
        "o": LAYERS * gemm(tokens, HIDDEN, 32 * 128 / gpus),
        "gate_up": LAYERS * gemm(tokens, 2 * INTER / gpus, HIDDEN),
        "down": LAYERS * gemm(tokens, HIDDEN, INTER / gpus),
        "norms": (2 * LAYERS + 1) * passes(tokens, 8 * HIDDEN),
        "rotary": LAYERS * passes(tokens, 4 * heads * 128),
        "activation": LAYERS * passes(tokens, 6 * INTER / gpus),
        **reduces,
    }


def told(cost: Measured, step: StepPlan) -> dict[str, float]:
    return {term.name: term.seconds for term in cost.explain(step).terms}


@pytest.mark.parametrize("gpus", [1, 2])
def test_a_step_is_the_sum_of_its_kernels(tables: Path, gpus: int) -> None:
    cost = measured(tables, replace(LLAMA, tensor_parallel=gpus))
    head = gemm(33, VOCAB / gpus, HIDDEN)
    # With half of the heads two sequences take what one takes.
    expected = {
        **of_llama(300 + 32, gpus),
        "LM head": head,
        "attention": LAYERS * prefills(1, 300),  # at least that of the fewest measured heads
        "decode attention": LAYERS * decodes(32 / gpus, 500),
        "host": 1e-3 + 33 * 10e-6,
    }
    step = plan(300, decodes=32, context=32 * 500)
    assert told(cost, step) == pytest.approx(expected, rel=1e-9)
    assert cost.step_seconds(step) == pytest.approx(sum(expected.values()), rel=1e-9)
    assert cost.server_seconds == 0.005


def test_every_kernel_is_followed_by_a_gap(tables: Path) -> None:
    step = plan(300, decodes=32, context=32 * 500)
    # Four products, two norms, rotary, activation and attention; the last norm and the LM head.
    kernels = 9 * LAYERS + 2
    gaps = told(measured(tables, stack=replace(HOST, latencies=1.5)), step)["gaps between kernels"]
    assert gaps == pytest.approx(kernels * 1.5 * GAP_US * 1e-6, rel=1e-9)
    assert "gaps between kernels" not in told(measured(tables), step)


@pytest.mark.parametrize("count", [1, 3, 17, 64, 500])
@pytest.mark.parametrize("context", [1, 700, 8192, 20_000])
def test_attention_of_decodes_goes_with_their_context(
    tables: Path, count: int, context: int
) -> None:
    """Between and beyond the sizes of the table."""
    cost = measured(tables)
    least = max(context, 2)  # below the first, as long as at it
    expected = sum(of_llama(count).values()) + gemm(count, VOCAB, HIDDEN)
    expected += LAYERS * decodes(count, least) + 1e-3 + count * 10e-6
    assert cost.decode_seconds(count, count * context) == pytest.approx(expected, rel=1e-9)


def test_a_chunk_takes_its_part_of_the_whole_prompt(tables: Path) -> None:
    cost = measured(tables)
    attention = told(cost, plan((1000, 500), (1000, 500)))["attention"]
    part = 1 - 1000 * 1001 / (1500 * 1501)
    assert attention == pytest.approx(LAYERS * part * prefills(2, 1500), rel=1e-9)
    # A few tokens late in a context read it, as a decode does.
    late = told(cost, plan((4000, 2)))["attention"]
    assert late == pytest.approx(LAYERS * decodes(1, 4002), rel=1e-9)
    # Of a token each, as decodes are.
    one_each = told(cost, plan((999, 1), (999, 1)))["attention"]
    assert one_each == pytest.approx(LAYERS * decodes(2, 1000), rel=1e-9)


def test_a_tile_of_queries_passes_over_the_whole_context(tables: Path, tmp_path: Path) -> None:
    """Where the kernel does not split it."""
    for source, floor in (("vllm_flash_attn_fa2", 1e-8 * 4002), ("fa3", decodes(1, 4002))):
        h100 = copied(tables, tmp_path / source) / "h100_sxm"
        kept = {"head_dim": 128, "window_size": 0, "step": 0, "kernel_source": source}
        kept |= {"attn_dtype": "bfloat16", "kv_cache_dtype": "bfloat16"}
        rows = [
            {**kept, "num_heads": heads, "num_key_value_heads": kv, "batch_size": n, "isl": length}
            | {"latency": prefills(n, length) if heads > 1 else 1e-8 * length}
            for (heads, kv), n, length in product(((32, 8), (1, 1)), (1, 64), (16, 8192))
        ]
        write(h100, "attention/vllm/0.24.0", "context_attention_perf", rows)
        late = told(measured(tmp_path / source), plan((4000, 2)))["attention"]
        assert late == pytest.approx(LAYERS * floor, rel=1e-9)


def test_many_steps_at_once_take_as_long_as_each(tables: Path) -> None:
    cost = measured(tables, replace(LLAMA, tensor_parallel=2))
    steps = [
        plan(100, (50, 20), decodes=30, context=9000),
        plan(8192),
        plan((100, 1)),
        plan(decodes=1, context=1),
        plan(decodes=256, context=500_000),
    ]
    rows = np.array([totals_of(step)[: Totals._fields.index("step") + 1] for step in steps])
    assert cost.seconds_of(rows).tolist() == [cost.step_seconds(step) for step in steps]
    assert cost.seconds_of(rows[:0]).tolist() == []


def test_host_time_is_hidden_a_step_ahead(tables: Path) -> None:
    cost = measured(tables, stack=replace(HOST, host_step_ms=4.0, host_request_us=0.0))
    for prompt, sequences in ((0, 1), (4000, 0)):
        gpu = cost.step_seconds(step_of(prompt, sequences, context=9)) - 4e-3
        step = step_of(prompt, sequences, context=9, ahead=True)
        assert cost.step_seconds(step) == pytest.approx(max(gpu, 4e-3), rel=1e-12)
        assert cost.explain(step).seconds == pytest.approx(max(gpu, 4e-3), rel=1e-12)


@pytest.mark.parametrize("ahead", [False, True])
def test_a_step_takes_no_less_than_launching_its_layers(tables: Path, ahead: bool) -> None:
    """Under the stack's times of launches, as roofline has them."""
    stack = replace(HOST, launch_us=1000.0, prompt_launch_us=2000.0)
    captured, eager = measured(tables), measured(tables, stack=stack)
    for step, each in (
        (plan(20), 2e-3),
        (plan(20, decodes=3, context=90), 2e-3),
        (plan(decodes=3, context=90), 1e-3),
    ):
        step._ahead = ahead
        host = 1e-3 + 1e-5 * (len(step.chunks) + step.decode_count)
        assert captured.step_seconds(step) < LAYERS * each
        assert eager.step_seconds(step) == pytest.approx(LAYERS * each + host)
        assert eager.explain(step).seconds == pytest.approx(LAYERS * each + host)
        row = np.array([totals_of(step)[: Totals._fields.index("step") + 1]])
        assert eager.seconds_of(row, ahead).tolist() == [eager.step_seconds(step)]
    assert eager.decode_seconds(3, 90) == pytest.approx(LAYERS * 1e-3 + 1e-3 + 3e-5)


def test_experts_are_a_kernel_of_the_tokens(tables: Path) -> None:
    where = replica("qwen3-30b-a3b", "h100")
    terms = told(measured(tables, where), plan(decodes=100, context=100))
    assert terms["experts"] == pytest.approx(48 * chosen(100), rel=1e-9)
    eight = measured(tables, replace(where, model=replace(where.model, dtype_bytes=1.0)))
    assert told(eight, plan(decodes=100, context=100))["experts"] == terms["experts"]
    assert "experts in fp8_block by those in 16 bits" in eight.notices[0]
    assert terms["router"] == pytest.approx(48 * gemm(100, 128, 2048), rel=1e-9)
    assert "gate_up" not in terms
    # Those of another shape by their weights, which is told.
    assert where.model.moe is not None
    other = replace(where.model, moe=replace(where.model.moe, intermediate=1536))
    cost = measured(tables, replace(where, model=other))
    twice = told(cost, plan(decodes=100, context=100))["experts"]
    assert twice == pytest.approx(2 * 48 * chosen(100), rel=1e-9)
    assert (
        "experts of this shape by those of hidden_size=2048 inter_size=768 topk=8"
        in cost.notices[0]
    )


def copied(tables: Path, folder: Path) -> Path:
    """The tables of the H100 in another folder."""
    for path in tables.glob("h100_sxm/*/*/*/*.parquet"):
        target = folder / path.relative_to(tables)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(path.read_bytes())
    return folder


def gate_up(cost: Measured, tokens: int) -> float:
    """Seconds in a layer."""
    return told(cost, plan(tokens))["gate_up"] / LAYERS


def test_weights_of_eight_bits_take_what_their_bytes_take(tables: Path) -> None:
    small = replace(LLAMA, model=replace(LLAMA.model, dtype_bytes=1.0))
    cost = measured(tables, small)
    assert "weights below 16 bits by products of 16 bits" in cost.notices[0]
    assert gate_up(cost, 4) == pytest.approx(gemm(4, 2 * INTER, HIDDEN / 2), rel=1e-9)
    # All 16 bits are multiplied: at best as the rows of the largest measured product.
    most = 65536
    fastest = gemm(16384, 2 * INTER, HIDDEN) / 16384
    assert gate_up(cost, most) == pytest.approx(most * fastest, rel=1e-9)


def test_products_in_eight_bits_are_told_apart_from_quantisation(
    tables: Path, tmp_path: Path
) -> None:
    eight = replace(LLAMA, model=replace(LLAMA.model, dtype_bytes=1.0, products="fp8"))
    half = [gemm(tokens, 2 * INTER, HIDDEN / 2) for tokens in (4, 1000)]
    alone = measured(tables, eight)
    assert [gate_up(alone, n) for n in (4, 1000)] == pytest.approx(half, rel=1e-9)
    folder = copied(tables, tmp_path)
    # A difference of two times, which noise may make nothing.
    scale = [{"quant_dtype": "fp8", "m": m, "k": HIDDEN, "latency": 0.0} for m in (1, 1024)]
    write(folder / "h100_sxm", "quantize/vllm/0.24.0", "computescale_perf", scale)
    eights = products("fp8", lambda *shape: 0.8 * gemm(*shape))
    write(folder / "h100_sxm", "gemm/vllm/0.24.0", "gemm_perf", [*products("bfloat16"), *eights])
    cost = measured(folder, eight)
    computing = 2 * 0.8 * half[1] - passes(1000, 3 * HIDDEN)
    assert [gate_up(cost, n) for n in (4, 1000)] == pytest.approx([half[0], computing], rel=1e-9)


def test_latent_attention_is_measured_with_its_products(tables: Path, tmp_path: Path) -> None:
    h100 = copied(tables, tmp_path) / "h100_sxm"
    kept = {"num_heads": 16, "kv_cache_dtype": "bfloat16", "gemm_type": "fp8_block"}
    for table, law, whole in (("context", prefills, True), ("generation", decodes, False)):
        rows = []
        for n, length in product((1, 64), (2, 1024, 8192)):
            isl, step = (length, 0) if whole else (1, length - 1)
            row = {"batch_size": n, "isl": isl, "step": step, "latency": law(n, length)}
            rows.append({**kept, **row})
        write(h100, "mla/trtllm/1.3.0rc20", f"mla_{table}_module_perf", rows)
    shape = {"hidden_size": 7168, "inter_size": 2048, "topk": 8, "num_experts": 256}
    split = {"moe_tp_size": 1, "moe_ep_size": 8, "moe_dtype": "fp8_block"}
    routed = [
        {**shape, **split, "distribution": "balanced", "num_tokens": n, "latency": chosen(n)}
        for n in (1, 4096)
    ]
    write(h100, "moe/trtllm/1.3.0rc20", "moe_perf", routed)
    where = replica("deepseek-v3", "h100", tensor_parallel=8, expert_parallel=8)
    rows = [{"num_gpus": 8, "message_size": n, "latency": all_reduce(n)} for n in (128, 2**29)]
    write(h100, "comm/trtllm/1.3.0rc20", "custom_allreduce_perf", rows)
    cost = measured(tmp_path, where, stack=Stack(name="trtllm-1"), expert_load="balanced")
    terms = told(cost, plan(1000, decodes=8, context=8 * 500))
    assert terms["attention"] == pytest.approx(61 * prefills(1, 1000), rel=1e-9)
    assert terms["decode attention"] == pytest.approx(61 * decodes(8, 500), rel=1e-9)
    assert terms["experts"] == pytest.approx(58 * chosen(1008), rel=1e-9)
    shared = 58 * gemm(1008, 7168, 2048 / 8 / 2)
    assert terms["shared down"] == pytest.approx(shared, rel=1e-9)
    assert "qkv" not in terms and "rotary" not in terms


def test_what_the_tables_lack_comes_from_the_nearest(tables: Path) -> None:
    cost = measured(tables, replace(LLAMA, tensor_parallel=2, kv_cache_dtype="fp8"))
    assert cost.notices == [
        "step times are sums of kernels measured on h100_sxm: attention, products by vllm 0.24.0; "
        "norms by sglang 0.5.14; all-reduce by vllm 0.19.0; "
        "attention over a KV cache in fp8 by that in 16 bits"
    ]


@pytest.mark.parametrize(
    ("stack", "version"),
    [
        ("vllm-0.33", "0.24.0"),
        ("vllm-0.19", "0.19.0"),
        ("vllm-0.12", "0.14.0"),
        ("vllm-0.33", "0.24.0"),
    ],
)
def test_the_version_is_the_stacks_or_the_next(
    tables: Path, tmp_path: Path, stack: str, version: str
) -> None:
    copied(tables, tmp_path)
    for other in ("0.14.0", "0.19.0"):
        write(tmp_path / "h100_sxm", f"gemm/vllm/{other}", "gemm_perf", products("bfloat16"))
    cost = measured(tmp_path, stack=Stack(name=stack))
    assert f"products by vllm {version}" in cost.notices[0].replace(
        "attention, products", "products"
    )


def test_pipelines_pass_the_kernels_a_micro_batch_at_a_time(tables: Path) -> None:
    cost, alone = measured(tables, replace(LLAMA, pipeline_parallel=2)), measured(tables)
    host = 1e-3 + 64 * 10e-6
    # Two of 32 sequences each, between which a GPU sends 16 bits a value once.
    half = alone.decode_seconds(32, 32 * 700) - 1e-3 - 32 * 10e-6
    hop = 32 * HIDDEN * 2 / (LLAMA.hardware.interconnect * HOST.all_to_all_share)
    hop += LLAMA.hardware.interconnect_us * 1e-6
    assert cost.decode_seconds(64, 64 * 700) == pytest.approx(half + hop + host, rel=1e-9)
    # A prompt fills the pipeline: the second half follows the first through half of the layers.
    terms = told(cost, plan(2048))
    whole = sum(seconds for name, seconds in terms.items() if name not in ("bubbles", "host"))
    assert terms["bubbles"] == pytest.approx(whole / 2, rel=1e-9)


def test_experts_on_several_gpus_take_the_tokens_of_all_groups(tables: Path) -> None:
    where = replica("qwen3-30b-a3b", "h100", expert_parallel=4)
    terms = told(measured(tables, where), plan(decodes=100, context=100))
    # Measured on one GPU, with four times the weights of a GPU here.
    assert terms["experts"] == pytest.approx(48 * chosen(100) / 4, rel=1e-9)
    assert terms["router"] == pytest.approx(48 * gemm(25, 128, 2048), rel=1e-9)
    # A prompt is one group's; the experts have no more tokens for that.
    prompt = told(measured(tables, where), plan(100))
    assert prompt["experts"] == pytest.approx(48 * chosen(100) / 4, rel=1e-9)
    assert prompt["router"] == pytest.approx(48 * gemm(100, 128, 2048), rel=1e-9)
    assert terms["all-to-all"] > 0 and "all-reduce" not in terms


@pytest.mark.parametrize(
    "where",
    [LLAMA, replica("qwen3-30b-a3b", "h100", pipeline_parallel=2, expert_parallel=4)],
    ids=["one GPU", "eight"],
)
def test_check_cost_model(tables: Path, where: Replica) -> None:
    check_cost_model(lambda on: measured(tables, on), replica=where, cases=5)


# -- the layout of a profiler ----------------------------------------------------------------------


@pytest.fixture(
    params=[
        "RTXPRO6000/meta-llama/Llama-3.1-8B/bf16/tp1/",
        "perf_RTXPRO6000_Llama-3.1-8B_bf16_tp1_",
    ]
)
def profile(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """Kernels of Llama-3.1-8B, of which each takes as many microseconds as tokens and something."""
    files = {
        "dense": ["layer,tokens,time_us"]
        + [
            f"{name},{n},{n + 10}"
            for name in ("embedding", "layernorm", "o_proj")
            for n in (1, 100)
        ],
        "per_sequence": ["layer,sequences,time_us", "lm_head,1,500", "lm_head,100,500"],
        "attention": ["prefill_chunk,kv_prefill,n_decode,kv_decode,time_us"]
        + [f"{n},{kv},0,0,{n * (kv + 1) / 1000}" for n in (16, 2048) for kv in (0, 512, 8192)]
        + [f"0,0,{n},{kv},{n * kv / 1000}" for n in (1, 256) for kv in (16, 8192)]
        + ["16,512,4,16,99999"],  # both in one kernel
    }
    for table, lines in files.items():
        path = tmp_path / f"{request.param}{table}.csv"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(lines) + "\n")
    return tmp_path


def test_a_profilers_kernels_are_those_of_its_model(profile: Path) -> None:
    where = replica("llama-3.1-8b", "rtx-pro-6000")
    cost = measured(profile, where)
    assert cost.notices == []
    terms = told(cost, plan((512, 100), decodes=4, context=4 * 1000))
    us = 1e-6
    assert terms["layernorm"] == pytest.approx(2 * LAYERS * 110 * 104 / 100 * us, rel=1e-9)
    assert terms["o"] == pytest.approx(LAYERS * 110 * 104 / 100 * us, rel=1e-9)
    assert terms["embedding"] == pytest.approx(110 * 104 / 100 * us, rel=1e-9)
    assert terms["lm_head"] == pytest.approx(500 * us, rel=1e-9)
    assert terms["attention"] == pytest.approx(LAYERS * 100 * 513 / 1000 * us, rel=1e-9)
    assert terms["decode attention"] == pytest.approx(LAYERS * 4 * us, rel=1e-9)
    check_cost_model(lambda on: measured(profile, on), replica=where, cases=2)


@pytest.mark.parametrize(
    ("model_name", "gpu", "gpus"),
    [
        ("qwen3-8b", "rtx-pro-6000", 1),
        ("llama-3.1-8b", "rtx4090", 1),
        ("llama-3.1-8b", "rtx-pro-6000", 2),
    ],
)
def test_a_profiler_has_no_other_models(
    profile: Path, model_name: str, gpu: str, gpus: int
) -> None:
    with pytest.raises(ConfigError, match=r"there are .*Llama-3\.1-8B on 1 RTXPRO6000$"):
        measured(profile, replica(model_name, gpu, tensor_parallel=gpus))


@pytest.mark.parametrize(
    ("where", "settings", "said"),
    [
        (
            replace(LLAMA, hardware=hardware("a10")),
            {},
            r"hardware=a10: no kernels of it in .*, which has h100_sxm, l40s",
        ),
        (LLAMA, {"expert_load": "even"}, "unknown cost.expert_load 'even': choose from balanced"),
        (replace(LLAMA, tensor_parallel=4), {}, "tensor_parallel=4: no all-reduce of so many"),
        (
            replace(LLAMA, model=replace(LLAMA.model, params=8e9)),
            {},
            r"model.params=8e\+09: must be null",
        ),
        (replica("deepseek-v3", "h100"), {}, "no mla_context_module_perf of h100_sxm"),
    ],
)
def test_mistakes_are_one_line(
    tables: Path, where: Replica, settings: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        measured(tables, where, **settings)


def test_without_the_package_the_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagedsim.sim.cost.tables.PACKAGE", "no_such_package")
    with pytest.raises(ConfigError, match=r"pip install --no-deps .*aiconfigurator-core"):
        Measured(LLAMA)
