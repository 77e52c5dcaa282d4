"""Reading the table of steps: what a run did, step by step, as columns.

Each row is a step: its times, its work, the queues and the memory. A command leaves the same table
in outputs/<date>/<time>-<experiment>/runs/<arm>/seed-<n>/steps.parquet.

    python docs/examples/read_steps.py
"""

from __future__ import annotations

import pyarrow.compute as pc

import pagedsim as ps


def main() -> None:
    """Print what the columns of a run whose memory does not suffice come down to."""
    workload = ps.synthetic(requests=200, rate=10)
    steps = ps.simulate({"memory.blocks": 600}, workload=workload, seeds=1).steps
    print("columns:", ", ".join(steps.column_names))
    seconds = pc.subtract(steps["end"], steps["start"])
    prefills = pc.greater(steps["prefill_tokens"], 0)
    for name, mask in (("with a prefill", prefills), ("decodes alone", pc.invert(prefills))):
        own = seconds.filter(mask)
        print(f"{name:15} {len(own):5} steps, {pc.mean(own).as_py() * 1e3:5.1f} ms on average")
    print(f"preempted: {pc.sum(steps['preempted'])}, most waiting: {pc.max(steps['waiting'])}")


if __name__ == "__main__":
    main()
