"""A block-size sweep: what a block's size costs where memory is scarce and victims are swapped.

Small blocks waste less memory. But the copies that swap them are smaller, and there are more of
them, because keys and values of each layer are copied by themselves (`kv_layout="layer"`).

    python docs/examples/block_size_sweep.py
"""

from __future__ import annotations

from hydra.utils import instantiate
from omegaconf import OmegaConf

from pagedsim.build import make_memory, make_scheduler
from pagedsim.metrics.recorder import Recorder
from pagedsim.metrics.summary import summarise
from pagedsim.sim.cost import Roofline
from pagedsim.sim.replica import Replica
from pagedsim.sim.simulate import simulate
from pagedsim.workload import synthetic

SLOTS = 15_728  # tokens that the cache holds, whatever the size of a block


def main() -> None:
    """Print a line for each size."""
    model = instantiate(OmegaConf.load("conf/model/opt-13b.yaml"))
    hardware = instantiate(OmegaConf.load("conf/hardware/a100-40gb.yaml"))
    workload = synthetic(requests=200, rate=4, max_len=2048)
    print("block size  E2E mean  swapped blocks  slots without a token")
    for size in (1, 8, 16, 64, 256):
        blocks = SLOTS // size
        scheduler = make_scheduler(
            memory=make_memory(blocks=blocks, block_size=size, cpu_blocks=blocks),
            preemption="swap",
        )
        recorder = Recorder()
        replica = Replica(model, hardware, block_size=size, kv_layout="layer")
        simulate(scheduler, workload, Roofline(replica), recorder)
        requests, steps = recorder.requests_table(), recorder.steps_table()
        found = summarise(requests, steps, total_blocks=blocks, block_size=size, max_seqs=256)
        print(
            f"{size:10}  {found['e2e_mean']:6.1f} s  {found['swapped_blocks']:14,}"
            f"  {found['kv_waste_mean']:21.1%}"
        )


if __name__ == "__main__":
    main()
