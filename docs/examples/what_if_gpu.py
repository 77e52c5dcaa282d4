"""A what-if on other GPUs: the same requests, and what each card has room and speed for.

python docs/examples/what_if_gpu.py
"""

from __future__ import annotations

from hydra.utils import instantiate
from omegaconf import OmegaConf

from pagedsim.metrics.recorder import Recorder
from pagedsim.metrics.summary import summarise
from pagedsim.server import ServerSpec
from pagedsim.sim.capacity import sized
from pagedsim.sim.cost import Roofline
from pagedsim.sim.replica import Replica
from pagedsim.sim.simulate import simulate
from pagedsim.workload import synthetic


def main() -> None:
    """Print a line for each GPU."""
    model = instantiate(OmegaConf.load("conf/model/llama-3.1-8b.yaml"))
    workload = synthetic(requests=300, rate=8, max_len=2048)
    print("GPU           blocks  TTFT P99  TPOT mean")
    for name in ("a10", "a100-40gb", "a100-80gb", "h100", "h200"):
        replica = Replica(model, instantiate(OmegaConf.load(f"conf/hardware/{name}.yaml")))
        # The server gets as many blocks as the card has left beside weights and activations.
        server = sized(ServerSpec(batching="unified", max_model_len=2048), replica)
        scheduler = server.scheduler()
        blocks = scheduler.memory.total
        recorder = Recorder()
        simulate(scheduler, workload, Roofline(replica), recorder)
        requests, steps = recorder.requests_table(), recorder.steps_table()
        found = summarise(requests, steps, total_blocks=blocks, block_size=16, max_seqs=256)
        print(
            f"{name:12}  {blocks:6,}  {found['ttft_p99'] * 1e3:5.0f} ms"
            f"  {found['tpot_mean'] * 1e3:6.1f} ms"
        )


if __name__ == "__main__":
    main()
