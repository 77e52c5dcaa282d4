"""A block-size sweep: what a block's size costs where memory is scarce and victims are swapped.

Small blocks waste less memory. But the copies that swap them are smaller, and there are more of
them, because keys and values of each layer are copied by themselves (`kv_layout="layer"`).

    python docs/examples/block_size_sweep.py
"""

from __future__ import annotations

import pagedsim as ps

SLOTS = 15_728
"""Tokens that the cache holds, whatever the size of a block."""


def memory(size: int) -> ps.Option:
    """Blocks of a size, and as many on the CPU."""
    blocks = SLOTS // size
    return ps.option("paged", block_size=size, blocks=blocks, cpu_blocks=blocks, kv_layout="layer")


def main() -> None:
    """Print a line for each size."""
    result = ps.compare(
        model="opt-13b",
        gpu="a100-40gb",
        workload=ps.synthetic(requests=200, rate=4),
        preemption="swap",
        memory={f"{size}": memory(size) for size in (1, 8, 16, 64, 256)},
        seeds=1,
    )
    print("block size  E2E mean  swapped blocks  slots without a token")
    for run in result.runs:
        e2e, swapped = run.summary["e2e_mean"], run.summary["swapped_blocks"]
        print(f"{run.arm:>10}  {e2e:6.1f} s  {swapped:14,}  {run.summary['kv_waste_mean']:21.1%}")


if __name__ == "__main__":
    main()
