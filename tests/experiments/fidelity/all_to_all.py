"""What tokens take to experts on other GPUs and back with DeepEP, as measured and as simulated.

    python -m tests.experiments.fidelity.all_to_all [FOLDER]

DeepEP's authors timed its kernels for decodes, of DeepSeek-V3's shape with 128 tokens on each GPU,
on H800s with 160 GB/s of NVLink and 400 Gbit/s of network each (github.com/deepseek-ai/DeepEP,
docs/legacy.md). FOLDER has tables of them by shape in the layout of aiconfigurator-core; without it
the installed ones are taken. `stack.all_to_all_share`, the latency and the share inside a node were
chosen with both in sight.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

import pyarrow.parquet as pq

from pagedsim.experiments.benchmarks.harness import table
from pagedsim.experiments.fidelity.kernels import folder_of_tables
from pagedsim.fidelity.sheets import hardware_named, model_named, option_names
from pagedsim.report.numbers import percent, signed
from pagedsim.sim.cost.roofline import all_to_all
from pagedsim.sim.hardware import Hardware
from pagedsim.sim.model import ModelShape
from pagedsim.sim.replica import Replica
from pagedsim.sim.stack import Stack

TOKENS = 128
"""Of each GPU, as published."""
PUBLISHED = {
    8: (77, 114),
    16: (118, 195),
    32: (155, 273),
    64: (173, 314),
    128: (192, 369),
    256: (194, 360),
}
"""Microseconds per layer of dispatch and combine, by number of GPUs."""
SHAPE = ("node_num", "num_token", "hidden_size", "num_topk", "num_experts")
"""Columns of a table; the tokens are those of each GPU."""


def simulated(hardware: Hardware, model: ModelShape, gpus: int, tokens: int) -> float:
    """Simulated microseconds per layer, there and back, for these tokens of each GPU."""
    where = Replica(model, hardware, expert_parallel=gpus)
    terms = all_to_all(where, Stack().all_to_all_share)
    seconds = max(term.seconds.step + tokens * term.seconds.token for term in terms)
    return 1e6 * seconds / model.moe_layers


def errors(path: Path, hardware: Hardware) -> dict[int, list[float]]:
    """The errors of a table's rows, by number of nodes."""
    model, by_nodes = model_named("deepseek-v3"), defaultdict(list)
    assert model.moe is not None
    for row in pq.read_table(path).to_pylist():
        nodes, tokens, hidden, chosen, experts = (int(row[name]) for name in SHAPE)
        gpus = nodes * hardware.gpus_per_node
        if experts % gpus == 0:  # without experts that are there twice
            moe = replace(model.moe, experts=experts, experts_per_token=chosen)
            ours = simulated(hardware, replace(model, hidden=hidden, moe=moe), gpus, tokens)
            measured = float(row["dispatch_avg_t_us"]) + float(row["combine_avg_t_us"])
            by_nodes[nodes].append(ours / measured - 1)
    return by_nodes


def published() -> list[list[str]]:
    """Each published number beside ours."""
    h800 = replace(hardware_named("h100"), interconnect_gb_s=160.0)
    rows = []
    for gpus, ways in PUBLISHED.items():
        ours, measured = simulated(h800, model_named("deepseek-v3"), gpus, TOKENS), sum(ways)
        rows.append([f"{gpus}", f"{measured}", f"{ours:.0f}", signed(ours / measured - 1, 1)])
    return rows


def tables(folder: Path) -> list[list[str]]:
    """Median errors by GPU, version and number of nodes."""
    rows = []
    for path in sorted(folder.glob("*/comm/sglang/*/wideep_deepep_ll_perf.parquet")):
        gpu = path.parts[-5].removesuffix("_sxm")
        if gpu in option_names("hardware"):
            for nodes, each in sorted(errors(path, hardware_named(gpu)).items()):
                medians = percent(median(map(abs, each))), signed(median(each), 1)
                rows.append([gpu, path.parent.name, f"{nodes}", f"{len(each)}", *medians])
    return rows


def main(words: Sequence[str] | None = None) -> None:
    """Print both tables."""
    folder = folder_of_tables(__doc__, words)
    print(table(["GPUs", "published, µs", "ours", "error"], published()), "\n")
    print(table(["GPU", "SGLang", "nodes", "rows", "median error", "bias"], tables(folder)))


if __name__ == "__main__":
    main()
