"""Write the table of measured servers, with protocols, from AIConfigurator's samples.

    python -m tests.experiments.fidelity.silicon PATH/TO/silicon_sample.csv

The file comes with the wheel of aiconfigurator-core (0.12.0). Its rows say what was measured, and
not how; `benchmark_of` adds that, by the source of a row. experiments/data/README.md has the
evidence for each.
"""

from __future__ import annotations

import argparse
import csv
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from pagedsim.experiments.fidelity.truth_data import DATA
from pagedsim.fidelity.sheets import model_named
from pagedsim.fidelity.step_tables.tables import ALIASES, GPUS

TABLE = DATA / "servers.csv"
PRECISIONS = ("", "bf16", "fp8", "fp4")
"""What `cost=` can tell apart; int4 and mixtures of them are left out."""
SAME = {
    **{"id": "id", "model": "model_path", "gpu": "system", "backend": "backend"},
    **{"version": "backend_version", "precision": "precision", "tensor_parallel": "tp_size"},
    **{"input_tokens": "isl", "output_tokens": "osl", "concurrency": "batch_size"},
}
"""Columns, and what they are called in the samples."""
Row = Mapping[str, str]


def benchmark_of(row: Row) -> dict[str, object]:
    """The protocol of a row: how its server was started, and what it was asked."""
    if "gap-analysis" in row["silicon_data_source"]:
        return _nvidia(row)
    return _deepseek(row) if _experts(row) else _inferencemax(row)


def _experts(row: Row) -> bool:
    return model_named(ALIASES[row["model_path"]]).moe is not None


def _inferencemax(row: Row) -> dict[str, object]:
    """InferenceMAX, dense models (October 2025): benchmarks/70b_*.sh and bench_serving."""
    server = "vllm-0.12 stack=vllm-0.10 memory=paged server.async_scheduling=true"
    seats: object = row["batch_size"]
    tokens = 8192
    if row["backend"] == "vllm" and row["system"].startswith("b"):
        server, seats = server.replace("vllm-0.10", "vllm-0.10-fused"), 512
    if row["backend"] == "trtllm":
        server, seats, tokens = "trtllm-1", 2048, 16384
        if (row["isl"], row["osl"]) == ("1024", "1024") and int(row["tp_size"]) < 8:
            server += (
                " batching.batch_wait_timeout_iters=20 batching.batch_wait_max_tokens_ratio=0.9"
            )
    return {
        **{"server": server, "shortest": 0.8, "rounds": 10, "kv_cache_dtype": "fp8"},
        **{"max_seqs": seats, "max_batched_tokens": tokens},
    }


def _deepseek(row: Row) -> dict[str, object]:
    """InferenceMAX, DeepSeek-R1 (2026): benchmarks/dsr1_*.sh; warm-ups end before the first."""
    seats, prompt, eight_bits = int(row["batch_size"]), int(row["isl"]), row["precision"] == "fp8"
    even, four = (row["isl"], row["osl"]) == ("1024", "1024"), row["tp_size"] == "4"
    if row["backend"] == "trtllm":
        tokens, most, cache = max(8192, -(-(seats + prompt + 64) // 64) * 64), 2048, "fp8"
        server, share = "trtllm-1", 0.75 if eight_bits and four and prompt == 8192 else 0.8
        if eight_bits and even and seats >= 64:
            server += (
                " batching.batch_wait_timeout_iters=40 batching.batch_wait_max_tokens_ratio=0.8"
            )
    else:
        server, share, tokens, most, cache = "sglang-0.5 memory=paged", 0.82, 32768, 128, "fp8"
        if row["system"] == "h200_sxm":
            most, cache = 512 if even else 256, ""
        elif four:
            share, tokens, most = 0.95, 8192, 32
    return {
        "server": f"{server} memory.gpu_memory_utilization={share}",
        **{"shortest": 0.8, "rounds": 10, "kv_cache_dtype": cache},
        **{"max_seqs": most, "max_batched_tokens": tokens},
    }


def _nvidia(row: Row) -> dict[str, object]:
    """NVIDIA's own: the benchmark scripts that AIConfigurator's generator writes."""
    server, asked = _nvidia_server(row)
    share = "" if _experts(row) else f" {SHARE}"
    return {"shortest": 1, "rounds": 20, "warmup": 2, "max_seqs": row["batch_size"], **asked} | {
        "server": f"{server}{share}"
    }


SHARE = "memory.gpu_memory_utilization=0.8"
"""The generator's default for TensorRT-LLM's cache. First tokens of vLLM and SGLang that wait for
memory, of Qwen3-32B on two H100, come out with it, too, and not with the servers' own shares. In so
much of two H200, Qwen3-235B would have no room."""


def _nvidia_server(row: Row) -> tuple[str, dict[str, object]]:
    seats, prompt = int(row["batch_size"]), int(row["isl"])
    large, tokens = "32B" in row["model_path"], seats + prompt + 1500
    if row["backend"] == "trtllm":
        cache = "fp8" if row["precision"] == "fp8" else ""
        rounded = -(-tokens // 32) * 32
        return "trtllm-1 stack=trtllm-1.0", {"max_batched_tokens": rounded, "kv_cache_dtype": cache}
    if row["backend"] == "vllm":
        if large and row["precision"] != "fp8":
            return "vllm-0.12", {"max_batched_tokens": tokens}
        cache = "fp8" if large else ""  # behind Dynamo, whose prompts repeat
        repeated = {"unique_prompts": 100, "kv_cache_dtype": cache}
        return "vllm-0.12", {"max_batched_tokens": tokens, **repeated}
    if large:
        return "sglang-0.5", {"max_seqs": ""}  # as it starts
    limits: dict[str, object] = {
        "max_seqs": 2 * seats if seats >= 512 else 512,
        "max_batched_tokens": prompt + 1500,
    }
    # The stack of hundreds of requests at a time behind Dynamo; those of experts are ten at most.
    stack = "sglang-0.5" if _experts(row) else "sglang-0.5-dynamo"
    return f"sglang-0.5 batching.mixed_chunk=true stack={stack}", limits


def left_out(row: Row) -> str:
    """Why simulations cannot be held against a row; nothing if they can."""
    if row["mode"] != "agg":
        return "prefill and decode apart"
    for column, known in {"model_path": ALIASES, "system": GPUS, "precision": PRECISIONS}.items():
        if row[column] not in known:
            return f"{column}={row[column]}"
    if not _experts(row):
        return ""
    if row["silicon_data_source"].startswith("source_file=20"):
        return "experts: maybe with speculation; those without stand in the dump of the database"
    if not row["backend_version"]:
        return "experts: of November 2025, when recipes split them and rows do not say so"
    ways = row["moe_tp_size"], row["moe_ep_size"]
    return "" if ways == (row["tp_size"], "1") else "experts: not by tensor parallelism alone"


def rows(path: Path, reasons: Counter[str]) -> Iterator[dict[str, object]]:
    """The rows that simulations can be held against; `reasons` counts those of others."""
    with path.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            if reason := left_out(row):
                reasons[reason] += 1
            else:
                yield {
                    **{name: row[theirs] for name, theirs in SAME.items()},
                    "ttft_ms": f"{float(row['silicon_ttft_ms']):.6g}",
                    "tpot_ms": f"{float(row['silicon_tpot_ms']):.6g}",
                    "measured": "".join(
                        re.findall(r"measured=([\d-]+)", row["silicon_data_source"])
                    ),
                    **dict.fromkeys(("server", "shortest", "rounds", "warmup"), ""),
                    **dict.fromkeys(("unique_prompts", "max_seqs", "max_batched_tokens"), ""),
                    "kv_cache_dtype": "",
                    **benchmark_of(row),
                }


def main(words: Sequence[str] | None = None) -> None:
    """Write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("samples", type=Path, help="silicon_sample.csv of aiconfigurator-core")
    reasons = Counter[str]()
    every = list(rows(parser.parse_args(words).samples, reasons))
    with TABLE.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(every[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(every)
    print(f"{TABLE}: {len(every):,} rows; left out are")
    for reason, count in reasons.most_common():
        print(f"{count:6,}  {reason}")


if __name__ == "__main__":
    main()
