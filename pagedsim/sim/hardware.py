"""A GPU and its links, by the data sheet; what of that is reached is the cost model's matter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from pagedsim.core import ConfigError
from pagedsim.core.errors import require_number, require_whole, unknown

GIB = 2**30


class Family(NamedTuple):
    """Shares of the sheet's rates."""

    compute: float
    """Of the rate of matrix products, by products with weights in a prompt's step."""
    attention: float
    """Of the same, by attention of prompts."""
    bandwidth: float
    """Of the memory's, by reading weights."""
    cache: float
    """Of the memory's, by reading keys and values."""
    eight_bits: float = 0.8
    """What products of 8-bit numbers reach of their own rate, against `compute`."""
    launch: float = 1.0
    """How much longer than beside an H100 the CPUs that such GPUs came with take for a launch."""


FAMILIES = {
    "ampere": Family(compute=0.68, attention=0.42, bandwidth=0.80, cache=0.70, launch=2.0),
    # Tensor units that accumulate in 32 bits at half their rate keep up with the kernels. By one
    # log only: vLLM 0.19 on an RTX 4090.
    "geforce": Family(compute=0.95, attention=0.80, bandwidth=0.90, cache=0.90),
    "hopper": Family(compute=0.65, attention=0.42, bandwidth=0.86, cache=0.92),
}
OTHER = Family(compute=0.65, attention=0.42, bandwidth=0.84, cache=0.84)
"""Of GPUs without a family: there are tables of some, but no constant is fitted to them."""


def family_of(name: str | None) -> Family:
    """A family's shares; OTHER where there is no table of it."""
    return OTHER if name is None else FAMILIES[name]


@dataclass(frozen=True)
class Hardware:
    """Peak rates of one GPU, in the units of data sheets; the properties give bytes and seconds.

    FLOP/s are dense (data sheets like to print the twice as large rate for sparse matrices) and
    with 32-bit accumulation. Link bandwidths are for one direction (data sheets like to print
    both added up). One GB is 1e9 bytes, one GiB 2**30.
    """

    name: str
    memory_gib: float
    """What CUDA offers to programs (torch.cuda.mem_get_info): less than the data sheet and
    nvidia-smi say, since ECC and the driver take a part."""
    bandwidth_gb_s: float
    fp16_tflops: float
    pcie_gb_s: float
    pcie_copy_us: float = 5.0
    """Fixed time of one copy over PCIe, however small."""
    interconnect_gb_s: float = 0.0
    """Between the GPUs of a node: NVLink, Infinity Fabric or PCIe. 0: as PCIe."""
    interconnect_us: float = 18.0
    """Fixed time of one all-reduce, however small."""
    gpus_per_node: int = 8
    network_gb_s: float | None = None
    """Of a GPU, to other nodes, one way; None where GPUs come without a usual network."""
    network_us: float = 14.0
    """Fixed time of one message between nodes: NCCL's tuning model takes so much for a hop over a
    network (protocol Simple, `src/graph/tuning.cc`)."""
    fp8_tflops: float | None = None
    """Of products of 8-bit numbers; None where there is no such unit, or no data sheet says."""
    int8_tops: float | None = None
    tdp_w: float | None = None
    """The most power that it draws, in W, by whatever name the data sheet has it (TDP, TBP, TGP);
    None where none says."""
    family: str | None = None
    """Whose kernels it runs, where step tables say what they reach; see `hardware.py`."""
    price_per_hour: float | None = None
    """Euros that a cloud takes for it on demand; None where no list price is known. Those in
    dollars were divided by 1.1761, the European Central Bank's rate of 8 May 2026."""

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
        """Bytes of memory."""
        return self.memory_gib * GIB

    @property
    def bandwidth(self) -> float:
        """Bytes a second from memory."""
        return self.bandwidth_gb_s * 1e9

    @property
    def flop_rate(self) -> float:
        """Dense fp16 or bf16 FLOP a second."""
        return self.fp16_tflops * 1e12

    @property
    def rates(self) -> dict[str, float]:
        """Dense operations a second, by the format of what is multiplied."""
        printed = {"fp16": self.fp16_tflops, "fp8": self.fp8_tflops, "int8": self.int8_tops}
        return {name: rate * 1e12 for name, rate in printed.items() if rate is not None}

    @property
    def pcie(self) -> float:
        """Bytes a second to the host, one way."""
        return self.pcie_gb_s * 1e9

    @property
    def interconnect(self) -> float:
        """Bytes a second to the other GPUs of the node, one way."""
        return (self.interconnect_gb_s or self.pcie_gb_s) * 1e9

    @property
    def network(self) -> float:
        """Bytes a second to another node, one way; raises ConfigError where none is known."""
        if self.network_gb_s is None:
            raise ConfigError(
                f"hardware.network_gb_s=null: hardware={self.name} needs it, in GB/s for each GPU, "
                "to reach another node"
            )
        return self.network_gb_s * 1e9
