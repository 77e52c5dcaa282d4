"""What tokens take to experts on other GPUs and back, as published for DeepEP, and as simulated.

    python -m pagedsim.experiments.fidelity.all_to_all

DeepEP's authors timed its kernels for decodes, of DeepSeek-V3's shape with 128 tokens on each GPU,
on H800s with 160 GB/s of NVLink and 400 Gbit/s of network each (github.com/deepseek-ai/DeepEP,
docs/legacy.md). Of all settings only `stack.all_to_all_share` was chosen with that table in sight.
"""

from __future__ import annotations

from dataclasses import replace

from pagedsim.fidelity.sheets import hardware_named, model_named
from pagedsim.sim.cost import Roofline
from pagedsim.sim.cost.base import step
from pagedsim.sim.replica import Replica

TOKENS = 128
"""Of each GPU."""
PUBLISHED = {
    8: (77, 114),
    16: (118, 195),
    32: (155, 273),
    64: (173, 314),
    128: (192, 369),
    256: (194, 360),
}
"""Microseconds per layer of dispatch and combine, by number of GPUs."""


def simulated(gpus: int) -> float:
    """Simulated microseconds per layer, dispatch and combine."""
    h800 = replace(hardware_named("h100"), interconnect_gb_s=160.0)
    where = Replica(model_named("deepseek-v3"), h800, expert_parallel=gpus)
    breakdown = Roofline(where).explain(step(decodes=TOKENS * gpus, context=TOKENS * gpus))
    seconds = sum(term.seconds for term in breakdown.terms if term.name.startswith("all-to-all"))
    return 1e6 * seconds / where.model.moe_layers


def main() -> None:
    """Print the table."""
    print(f"{'GPUs':>4} {'published, µs':>14} {'ours':>6} {'error':>8}")
    for gpus, ways in PUBLISHED.items():
        ours, measured = simulated(gpus), sum(ways)
        print(f"{gpus:>4} {measured:>14} {ours:>6.0f} {100 * (ours / measured - 1):>+6.1f} %")


if __name__ == "__main__":
    main()
