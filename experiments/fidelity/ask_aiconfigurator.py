"""AIConfigurator's TTFT and TPOT for the servers whose measurements it ships.

    ENV/bin/python experiments/fidelity/ask_aiconfigurator.py [rows.csv] [answers.csv.gz]

ENV has `aiconfigurator==0.12.0`. Each row, without a file the package's own, is asked in two ways:

- `columns`: as NVIDIA compares itself, by `tools/accuracy_regression_testing` in
  github.com/ai-dynamo/aiconfigurator (095f58a5): the row's model, lengths, batch, parallelism and
  quantisation columns; all else by default, and the package's version where it lacks the row's.
- `checkpoint`: with a checkpoint of that precision, whose config says how weights and cache are
  quantised. The columns leave out the cache, and call static scales of fp8 dynamic.
"""

from __future__ import annotations

import argparse
import csv
import functools
import gzip
import io
import logging
import sys
from contextlib import redirect_stdout
from pathlib import Path

ANSWERS = Path(__file__).parent.parent / "data" / "peers" / "aiconfigurator-0.12.csv.gz"
PARALLEL = ("tp_size", "pp_size", "attention_dp_size", "moe_tp_size", "moe_ep_size")
WORKERS = (*PARALLEL, "batch_size", "num_workers")
NUMBERS = {
    "agg": ("isl", "osl", "batch_size", *PARALLEL),
    "disagg": ("isl", "osl", *(f"{of}_{name}" for of in ("prefill", "decode") for name in WORKERS)),
}
MODES = ("gemm_quant_mode", "moe_quant_mode")
Settings = dict[str, str | int | None]
FP8_CACHE: Settings = {"kvcache_quant_mode": "fp8"}  # as in NVIDIA's own FP8 and NVFP4 ones
SAME_SHAPE = {
    "meta-llama/Llama-3.1-8B-Instruct": "meta-llama/Meta-Llama-3.1-8B",
    "meta-llama/Llama-3.1-70B": "meta-llama/Meta-Llama-3.1-70B",
    "nvidia/Llama-3.1-8B-Instruct-FP8": "meta-llama/Meta-Llama-3.1-8B",
    "nvidia/Qwen3-32B-NVFP4": "Qwen/Qwen3-32B",
    "nvidia/DeepSeek-R1-NVFP4": "nvidia/DeepSeek-V3.1-NVFP4",
    "zhipuai/GLM-5": "zai-org/GLM-5",
}
"""What the package knows in place of a config that it would download."""
CHECKPOINTS = {  # by model and GEMM mode of a row
    ("meta-llama/Llama-3.1-70B", "fp8"): "nvidia/Llama-3.1-70B-Instruct-FP8",
    ("Qwen/Qwen3-32B", "fp8"): "Qwen/Qwen3-32B-FP8-Static-PerTensor",
    ("Qwen/Qwen3-32B", "fp8_block"): "Qwen/Qwen3-32B-FP8",
    ("Qwen/Qwen3.5-397B-A17B", "nvfp4"): "nvidia/Qwen3.5-397B-A17B-NVFP4",
    ("MiniMaxAI/MiniMax-M2.5", "nvfp4"): "nvidia/MiniMax-M2.5-NVFP4",
    ("deepseek-ai/DeepSeek-R1", "nvfp4"): "nvidia/DeepSeek-V3.1-NVFP4",
    ("deepseek-ai/DeepSeek-V3", "nvfp4"): "nvidia/DeepSeek-V3.1-NVFP4",
    ("moonshotai/Kimi-K2.5", "nvfp4"): "nvidia/Kimi-K2.5-NVFP4",
    ("zhipuai/GLM-5", "fp8"): "zai-org/GLM-5-FP8",
    ("zhipuai/GLM-5", "nvfp4"): "nvidia/GLM-5-NVFP4",
}
OWN = ("openai/", "deepseek-ai/", "MiniMaxAI/", "moonshotai/", "Qwen/Qwen3-235B")
"""Models that are published quantised: MXFP4, FP8 in blocks, INT4."""
UNKNOWN: dict[tuple[str, str], Settings] = {
    ("meta-llama/Llama-3.1-70B", "nvfp4"): FP8_CACHE,
    ("Qwen/Qwen3-32B", "nvfp4"): FP8_CACHE,
    ("Qwen/Qwen3.5-397B-A17B", "fp8"): {"gemm_quant_mode": "fp8_block"},
    ("nvidia/Llama-3.1-8B-Instruct-FP8", "fp8"): {"gemm_quant_mode": "fp8_static"},
}
"""What the columns lack of checkpoints that the package does not know."""


def ways(row: dict[str, str], version: str | None) -> dict[str, Settings]:
    """What `cli_estimate` is asked about a row."""
    model, key = row["model_path"], (row["model_path"], row["gemm_quant_mode"])
    columns: Settings = {
        **{"mode": row["mode"], "system_name": row["system"], "backend_name": row["backend"]},
        **{"backend_version": version, "model_path": SAME_SHAPE.get(model, model)},
        **{name: row[name] or None for name in MODES},
        **{name: int(row[name]) for name in NUMBERS[row["mode"]] if row[name]},
        **(FP8_CACHE if model.startswith("nvidia/") else {}),
    }
    checkpoint = columns | UNKNOWN.get(key, {})
    if name := CHECKPOINTS.get(key, model if model.startswith(OWN) else None):
        checkpoint |= {"model_path": name} | dict.fromkeys(MODES)
    return {"columns": columns, "checkpoint": checkpoint}


def main() -> None:
    """Ask, and write the answers."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rows", nargs="?", type=Path, help="default: the package's own")
    parser.add_argument("answers", nargs="?", type=Path, default=ANSWERS)
    words = parser.parse_args()
    try:
        from aiconfigurator.cli.api import cli_estimate
        from aiconfigurator_core.sdk import perf_database
    except ImportError as error:
        raise SystemExit(f"{error}: it needs `pip install aiconfigurator==0.12.0`") from None
    logging.disable(logging.CRITICAL)
    versions = functools.cache(perf_database.get_version_slots)

    @functools.cache
    def answer(settings: tuple[tuple[str, str | int | None], ...]) -> tuple[str, ...]:
        reason = ""
        for data in ("silicon", "hybrid"):  # all kernels measured, or some estimated
            try:
                with redirect_stdout(io.StringIO()):
                    result = cli_estimate(**dict(settings), database_mode=data.upper())
                return f"{result.ttft:.5g}", f"{result.tpot:.5g}", data, ""
            except Exception as error:  # of any kind: it is the row's reason
                reason = reason or f"{type(error).__name__}: {error}".partition(" at /")[0]
        return "", "", "", reason

    path = words.rows or Path(perf_database.__file__).parents[1] / "systems" / "silicon_sample.csv"
    text, number = io.StringIO(), 1
    table = csv.writer(text, lineterminator="\n")
    table.writerow(("id", "asked", "ttft_ms", "tpot_ms", "data", "reason", "version"))
    try:
        for number, row in enumerate(csv.DictReader(path.read_text().splitlines()), 2):
            slots, stated = versions(row["system"], row["backend"]) or {}, row["backend_version"]
            version = stated if stated in slots.values() else slots.get("current")
            for asked, settings in ways(row, version).items():
                table.writerow((row["id"], asked, *answer(tuple(settings.items())), version))
            if not number % 500:
                print(f"line {number}", file=sys.stderr)
        words.answers.write_bytes(gzip.compress(text.getvalue().encode(), mtime=0))
    except OSError as error:
        raise SystemExit(f"{error.filename}: {error.strerror}") from None
    except (KeyError, ValueError) as error:
        raise SystemExit(f"{path}, line {number}: no column, or no number: {error}") from None


if __name__ == "__main__":
    main()
