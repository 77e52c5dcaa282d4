"""A policy by tenant: requests carry what a trace says of them, and paying tenants go first.

The trace has a column for the tenant. Requests to `python -m pagedsim serve` carry theirs as
vLLM's: `extra_body={"vllm_xargs": {"tenant": "pro"}}`.

    python docs/examples/policy_by_tenant.py
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import pagedsim as ps
from pagedsim.core import Request, ServerState

COLUMNS = {"arrival": "time", "prompt": "in", "output": "out", "client": "tenant"}


class ByTenant(ps.Policy):
    """The tenants of `order` go first, in this order; then all others."""

    rank_changes = "never"

    def __init__(self, order: list[str]) -> None:
        self.places = {tenant: place for place, tenant in enumerate(order)}

    def rank(self, request: Request, state: ServerState) -> float:
        return self.places.get(request.extra["tenant"], len(self.places))


def main(path: Path) -> None:
    """Print the mean time to first token of each tenant, a line for each policy."""
    rows = [f"{i / 20},400,{100 + 23 * i % 200},{'free' if i % 4 else 'pro'}" for i in range(300)]
    path.write_text("\n".join(["time,in,out,tenant", *rows]), encoding="utf-8")
    result = ps.compare(
        {"server.max_seqs": 16},
        policy={"fcfs": "fcfs", "pro first": ps.option(ByTenant, order=["pro"])},
        workload=ps.trace(path, columns={**COLUMNS, "extra": ["tenant"]}),
    )
    for run in result.runs:
        ttft = {tenant: own["ttft_mean"] for tenant, own in run.summary["clients"].items()}
        print(f"{run.arm:10}  " + ", ".join(f"{name}: {ttft[name]:.2f} s" for name in sorted(ttft)))


if __name__ == "__main__":
    with TemporaryDirectory() as folder:
        main(Path(folder) / "trace.csv")
