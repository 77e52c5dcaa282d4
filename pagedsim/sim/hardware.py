"""A GPU and its links, with data-sheet rates, and the efficiencies of kernels by GPU family."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from pagedsim.core import ConfigError
from pagedsim.core.errors import require_number, require_whole, unknown

GIB = 2**30


class Family(NamedTuple):
    """Achieved fractions of the data-sheet rates, fitted together with conf/stack to the step
    tables in experiments/data by an earlier, differently weighted fit than that of
    `experiment=truth`, which prints where it differs; docs/fidelity.md has the accuracy."""

    compute: float
    """Of the FLOP rate, by products with weights in a prefill step."""
    attention: float
    """Of the FLOP rate, by prefill attention."""
    bandwidth: float
    """Of the memory bandwidth, by reading weights."""
    cache: float
    """Of the memory bandwidth, by reading the KV cache."""
    eight_bits: float = 0.8
    """Efficiency of 8-bit products relative to `compute`."""
    launch: float = 1.0
    """Launch time of kernels on the typical host CPUs of such GPUs, relative to those of an
    H100."""


FAMILIES = {
    "ampere": Family(compute=0.68, attention=0.42, bandwidth=0.80, cache=0.70, launch=2.0),
    # Accumulating in 32 bits halves the peak rate, so kernels reach most of it. Fitted to a single
    # log: vLLM 0.19 on an RTX 4090.
    "geforce": Family(compute=0.95, attention=0.80, bandwidth=0.90, cache=0.90),
    "hopper": Family(compute=0.65, attention=0.42, bandwidth=0.86, cache=0.92),
    # Kernels of vLLM 0.19 on an RTX PRO 6000 (Server Edition), for Llama-3.1-8B and Qwen3-32B:
    # profiler/perf of github.com/casys-kaist/LLMServingSim. Products of 1,024 tokens and more reach
    # 0.73 to 0.79, chunks of 2,048 tokens 0.40 to 0.58, those of up to 16 tokens 0.89 to 0.93 of
    # the bandwidth, 128 decodes and more of 1,024 tokens 0.83 to 0.90.
    "rtx-pro": Family(compute=0.77, attention=0.50, bandwidth=0.89, cache=0.88),
}
OTHER = Family(compute=0.65, attention=0.42, bandwidth=0.84, cache=0.84)
"""For GPUs without a family, to which no constants are fitted."""


def family_of(name: str | None) -> Family:
    """The efficiencies of a family; OTHER for None."""
    return OTHER if name is None else FAMILIES[name]


@dataclass(frozen=True)
class Hardware:
    """Peak rates of one GPU, in the units of data sheets; the properties give bytes and seconds.

    FLOP/s are dense (data sheets often state the doubled rate for sparse matrices) and with 32-bit
    accumulation. Link bandwidths are for one direction (data sheets often state the sum of both).
    One GB is 1e9 bytes, one GiB 2**30.
    """

    name: str
    memory_gib: float
    """Memory available to programs (torch.cuda.mem_get_info): less than the data sheet and
    nvidia-smi state, since ECC and the driver take a part."""
    bandwidth_gb_s: float
    fp16_tflops: float
    pcie_gb_s: float
    pcie_copy_us: float = 5.0
    interconnect_gb_s: float = 0.0
    """Between the GPUs of a node: NVLink, Infinity Fabric or PCIe. 0: as PCIe."""
    interconnect_us: float = 18.0
    """Latency of one all-reduce."""
    gpus_per_node: int = 8
    network_gb_s: float | None = None
    """Bandwidth per GPU to other nodes, one way; None if there is no typical network."""
    network_us: float = 14.0
    """Latency of one message between nodes: that of a network hop in NCCL's tuning model (protocol
    Simple, `src/graph/tuning.cc`)."""
    fp8_tflops: float | None = None
    """Rate of FP8 products; None if unsupported or not in a data sheet."""
    int8_tops: float | None = None
    tdp_w: float | None = None
    """Maximum power in W (TDP, TBP or TGP); None if not in a data sheet."""
    family: str | None = None
    """The family of its kernels, if constants are fitted to it; see `FAMILIES`."""
    price_per_hour: float | None = None
    """On-demand cloud price in euros; None if no list price is known. Prices in dollars were
    divided by 1.1761, the European Central Bank's rate of 8 May 2026."""

    def __post_init__(self) -> None:
        for key in ("memory_gib", "bandwidth_gb_s", "fp16_tflops", "pcie_gb_s"):
            require_number(f"hardware.{key}", getattr(self, key), above=0)
        for key in ("pcie_copy_us", "interconnect_gb_s", "interconnect_us", "network_us"):
            require_number(f"hardware.{key}", getattr(self, key), 0)
        for key in ("fp8_tflops", "int8_tops", "tdp_w", "network_gb_s", "price_per_hour"):
            if getattr(self, key) is not None:
                require_number(f"hardware.{key}", getattr(self, key), above=0)
        require_whole("hardware.gpus_per_node", self.gpus_per_node, 1)
        if self.family is not None and str(self.family) not in FAMILIES:
            raise unknown("hardware.family", str(self.family), FAMILIES)

    @property
    def memory_bytes(self) -> float:
        return self.memory_gib * GIB

    @property
    def bandwidth(self) -> float:
        """Memory bandwidth in bytes/s."""
        return self.bandwidth_gb_s * 1e9

    @property
    def flop_rate(self) -> float:
        """Dense fp16 or bf16 FLOP/s."""
        return self.fp16_tflops * 1e12

    @property
    def rates(self) -> dict[str, float]:
        """Dense operations/s by number format."""
        printed = {"fp16": self.fp16_tflops, "fp8": self.fp8_tflops, "int8": self.int8_tops}
        return {name: rate * 1e12 for name, rate in printed.items() if rate is not None}

    @property
    def pcie(self) -> float:
        """Bytes/s to the host, one way."""
        return self.pcie_gb_s * 1e9

    @property
    def interconnect(self) -> float:
        """Bytes/s to the other GPUs of the node, one way."""
        return (self.interconnect_gb_s or self.pcie_gb_s) * 1e9

    @property
    def network(self) -> float:
        """Bytes/s to another node, one way; raises ConfigError if unknown."""
        if self.network_gb_s is None:
            raise ConfigError(
                f"hardware.network_gb_s=null: hardware={self.name} needs it, in GB/s for each GPU, "
                "to reach another node"
            )
        return self.network_gb_s * 1e9
