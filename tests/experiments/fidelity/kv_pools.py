"""The KV pools that servers logged, beside those that our rules give.

    python -m tests.experiments.fidelity.kv_pools

The GPU, where none is named, is taken for an H100. Rows that constants of `pagedsim/sim/pools.py`
were derived from are marked.
"""

from __future__ import annotations

from pathlib import Path
from statistics import median

from pagedsim.fidelity.rows import Row, read_rows
from pagedsim.fidelity.sheets import hardware_named, model_named
from pagedsim.server import ServerSpec
from pagedsim.sim.capacity import sized
from pagedsim.sim.replica import Replica

TABLE = Path(__file__).parents[3] / "experiments" / "data" / "kv-pools.csv"
_TITLE = ("model", "hardware", "tensor_parallel", "weights", "kv_cache_dtype", "rule")


def tokens(row: Row) -> int:
    """The tokens that the row's rule gives."""
    server = ServerSpec(
        tensor_parallel=int(row.number("tensor_parallel")),
        quantization=row.text("weights") or None,
        kv_cache_dtype=row.text("kv_cache_dtype") or "auto",
        gpu_memory_utilization=row.number("utilization") if row.text("utilization") else None,
        max_batched_tokens=int(row.number("batched_tokens")),
        max_seqs=int(row.number("seqs")),
    )
    gpu = hardware_named(row.text("hardware") or "h100")
    replica = Replica.of(server, model_named(row.text("model")), gpu)
    complete = sized(server, replica, pool=row.text("rule"))
    return (complete.blocks or 0) * complete.block_size


def main() -> None:
    """Print the table, and the errors of fitted rows and of the others."""
    errors: dict[str, list[float]] = {"fitted": [], "other": []}
    for row in read_rows(TABLE, "table"):
        stated, ours = row.number("tokens", above=0), tokens(row)
        kind = "fitted" if row.text("fitted") else "other"
        errors[kind].append(abs(ours / stated - 1))
        title = " ".join(filter(None, map(row.text, _TITLE)))
        print(f"{title:40} {stated:10,.0f} {ours:10,} {ours / stated - 1:+6.1%} {kind}")
    for kind, each in errors.items():
        print(f"{kind}: {len(each)} rows, median {median(each):.1%}, worst {max(each):.1%}")


if __name__ == "__main__":
    main()
