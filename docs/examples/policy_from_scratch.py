"""A policy from scratch: of two clients, the one that was served less goes first.

The policy keeps state: it observes every request that leaves, and counts its tokens. It then
serves the same requests as first come, first served, in the simulator.

    python docs/examples/policy_from_scratch.py
"""

from __future__ import annotations

from collections import Counter

from hydra.utils import instantiate
from omegaconf import OmegaConf

from pagedsim.build import make_memory, make_scheduler
from pagedsim.core import Event, Left, Policy, Request, ServerState
from pagedsim.metrics.recorder import Recorder
from pagedsim.metrics.summary import summarise
from pagedsim.sim.cost import Roofline
from pagedsim.sim.replica import Replica
from pagedsim.sim.simulate import simulate
from pagedsim.workload import Workload, synthetic


class LeastServed(Policy):
    """The client whose finished requests took the fewest tokens goes first."""

    rank_changes = "always"  # what a client has had changes while its requests wait

    def __init__(self) -> None:
        self.tokens: Counter[str] = Counter()

    def rank(self, request: Request, state: ServerState) -> float:
        return self.tokens[request.client]

    def observe(self, event: Event) -> None:
        if isinstance(event, Left):
            self.tokens[event.request.client] += event.request.prompt_len + event.request.generated


def serve(policy: str | Policy, workload: Workload) -> dict[str, float]:
    """Mean time to first token of each client, in seconds."""
    llama = instantiate(OmegaConf.load("conf/model/llama-2-7b.yaml"))
    a100 = instantiate(OmegaConf.load("conf/hardware/a100-80gb.yaml"))
    scheduler = make_scheduler(memory=make_memory(blocks=2000), policy=policy, max_seqs=16)
    recorder = Recorder()
    simulate(scheduler, workload, Roofline(Replica(llama, a100)), recorder)
    requests, steps = recorder.requests_table(), recorder.steps_table()
    summary = summarise(requests, steps, total_blocks=2000, block_size=16, max_seqs=16)
    return {client: own["ttft_mean"] for client, own in summary["clients"].items()}


def main() -> None:
    """Print a line for each policy."""
    clients = {"heavy": 0.9, "light": 0.1}  # nine of ten requests are of one client
    workload = synthetic(requests=300, rate=10, max_len=2048, client=clients)
    for name, policy in (("fcfs", "fcfs"), ("least served", LeastServed())):
        ttft = serve(policy, workload)
        print(f"{name:12}  " + ", ".join(f"{who}: {ttft[who]:.2f} s" for who in sorted(ttft)))


if __name__ == "__main__":
    main()
