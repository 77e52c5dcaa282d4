"""Tables of kernels in the layout of aiconfigurator-core, written by exact laws."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import product
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

SIZES = (1, 4, 64, 1024, 16384)
WIDTHS = (64, 512, 4096, 65536)


# The laws, in seconds. Straight in logarithms by every size, so that tables hold them exactly; by
# the context of decodes, straight in itself.
def gemm(rows: float, outputs: float, inputs: float) -> float:
    return 1e-12 * outputs * inputs * rows**0.5


def prefills(count: float, length: float) -> float:
    """Of 32 heads over 8 of keys."""
    return 1e-12 * count * length**2


def decodes(count: float, context: float) -> float:
    return 1e-10 * count * context


def passes(rows: float, nbytes: float) -> float:
    """Of a kernel by its bytes a row: a value of a quantisation has three."""
    return 1e-13 * rows * nbytes


def all_reduce(values: float) -> float:
    return 1e-8 * values**0.5


def chosen(tokens: float) -> float:
    return 1e-5 * tokens**0.5


def write(folder: Path, family: str, table: str, rows: Iterable[Mapping[str, Any]]) -> None:
    """A table below <GPU>/<family>/<framework>/<version>, in milliseconds."""
    path = folder / family / f"{table}.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(
        pa.Table.from_pylist([{**row, "latency": row["latency"] * 1e3} for row in rows]), path
    )


def products(dtype: str, law: Callable[..., float] = gemm) -> list[dict[str, Any]]:
    return [
        {"gemm_dtype": dtype, "m": m, "n": n, "k": k, "latency": law(m, n, k)}
        for m, n, k in product(SIZES, WIDTHS, WIDTHS)
    ]


def write_tables(folder: Path) -> Path:
    """Those of an H100 for Llama-3.1-8B on two and Qwen3-30B-A3B on one, and a few of an L40S."""
    h100 = folder / "h100_sxm"
    write(h100, "gemm/vllm/0.24.0", "gemm_perf", products("bfloat16"))
    heads = {"num_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "window_size": 0}
    kept = {**heads, "attn_dtype": "bfloat16", "kv_cache_dtype": "bfloat16"}
    of_prompts = [
        {**kept, "batch_size": n, "isl": length, "step": 0, "latency": prefills(n, length)}
        for n, length in product((1, 4, 64), (16, 1024, 8192))
    ]
    of_decodes = [
        {**kept, "batch_size": n, "isl": 1, "step": s - 1, "latency": decodes(n, s)}
        for n, s in product((1, 4, 64, 256), (2, 128, 1024, 8192))
    ]
    write(h100, "attention/vllm/0.24.0", "context_attention_perf", of_prompts)
    write(h100, "attention/vllm/0.24.0", "generation_attention_perf", of_decodes)
    quantised = [
        {"quant_dtype": "fp8", "m": m, "k": k, "latency": passes(m, 3 * k)}
        for m, k in product(SIZES, WIDTHS)
    ]
    write(h100, "quantize/sglang/0.5.14", "scale_matrix_perf", quantised)
    reduced = [
        {"num_gpus": 2, "message_size": size, "latency": all_reduce(size)}
        for size in (128, 2**16, 2**29)
    ]
    write(h100, "comm/vllm/0.19.0", "custom_allreduce_perf", reduced)
    experts = {"hidden_size": 2048, "inter_size": 768, "topk": 8, "num_experts": 128}
    shared = {**experts, "moe_tp_size": 1, "moe_ep_size": 1, "moe_dtype": "bfloat16"}
    routed = [
        {**shared, "distribution": "power_law_1.01", "num_tokens": n, "latency": chosen(n)}
        for n in SIZES
    ]
    write(h100, "moe/vllm/0.24.0", "moe_perf", routed)
    write(folder / "l40s", "gemm/vllm/0.24.0", "gemm_perf", products("bfloat16"))
    return folder
