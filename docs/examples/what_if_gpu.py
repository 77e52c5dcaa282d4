"""A what-if on other GPUs: the same requests, and what each card has room and speed for.

python docs/examples/what_if_gpu.py
"""

from __future__ import annotations

import pagedsim as ps

GPUS = ("a10", "a100-40gb", "a100-80gb", "h100", "h200")


def main() -> None:
    """Print a line for each GPU."""
    result = ps.compare(
        gpu={name: name for name in GPUS},
        model="llama-3.1-8b",
        batching="unified",
        workload=ps.synthetic(requests=300, rate=8),
        server={"max_model_len": 2048},
        seeds=1,
    )
    print("GPU           blocks  TTFT P99  TPOT mean")
    for run in result.runs:
        ttft, tpot = 1e3 * run.summary["ttft_p99"], 1e3 * run.summary["tpot_mean"]
        blocks = run.summary["total_blocks"]  # what the card has left beside weights
        print(f"{run.arm:12}  {blocks:6,}  {ttft:5.0f} ms  {tpot:6.1f} ms")


if __name__ == "__main__":
    main()
