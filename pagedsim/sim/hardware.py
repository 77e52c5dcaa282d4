"""A GPU and its links, with data-sheet rates, and the efficiencies of kernels by GPU family."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from pagedsim.core import ConfigError
from pagedsim.core.errors import require_number, require_whole, unknown

GIB = 2**30
FP16 = "fp16"
"""Of 16 bits, also bf16: a number format of products."""


class Products(NamedTuple):
    """What products with weights reach: `us` µs each, and FLOP and bytes of which the slower counts
    the more, the larger `sharpness` is: (compute^s + reading^s)^(1/s)."""

    us: float
    compute: float
    """Achieved fraction of the FLOP rate."""
    bandwidth: float
    """Of the memory bandwidth, by reading weights."""
    sharpness: float


class Family(NamedTuple):
    """Achieved fractions of the data-sheet rates, and latencies of kernels, by GPU family.

    Fitted to kernels that aiconfigurator-core's tables have measured:
    `python -m pagedsim.experiments.fidelity.families` prints them, with their errors.
    """

    products: Mapping[str, Products]
    """By number format."""
    attention: float
    """Of the FLOP rate, by prefill attention."""
    cache: float
    """Of the memory bandwidth, by reading the KV cache."""
    attention_us: float
    """Latency of attention in µs."""
    launch: float = 1.0
    """Launch time of kernels on the typical host CPUs of such GPUs, relative to those of an
    H100."""

    @property
    def compute(self) -> float:
        """Of the FLOP rate, by products in 16 bits."""
        return self.products[FP16].compute

    @property
    def bandwidth(self) -> float:
        """Of the memory bandwidth, by reading weights of 16 bits."""
        return self.products[FP16].bandwidth

    def products_in(self, number_format: str) -> Products:
        """Those in a format; of 8 bits where that is not known, else of 16."""
        known = self.products
        return known.get(number_format) or known.get("fp8") or known[FP16]


FAMILIES = {
    "ampere": Family({"fp16": Products(6.6, 0.78, 0.78, 1.7)}, 0.55, 0.78, 19.1, launch=2.0),
    "ada": Family(
        {"fp16": Products(0.0, 0.59, 0.80, 2.2), "fp8": Products(0.0, 0.53, 0.83, 1.5)},
        *(0.54, 0.80, 9.4),
    ),
    # Accumulating in 32 bits halves the peak rate, so kernels reach most of it. Fitted to a single
    # log: vLLM 0.19 on an RTX 4090.
    "geforce": Family({"fp16": Products(0.0, 0.95, 0.90, 4.0)}, 0.80, 0.90, 9.4),
    "hopper": Family(
        {"fp16": Products(4.2, 0.78, 0.85, 2.7), "fp8": Products(7.7, 0.63, 0.90, 1.3)},
        *(0.62, 0.85, 12.1),
    ),
    "blackwell": Family(
        {
            "fp16": Products(3.9, 0.69, 0.79, 2.2),
            "fp8": Products(7.3, 0.55, 0.79, 1.2),
            "fp4": Products(8.5, 0.43, 0.67, 1.5),
        },
        *(0.51, 0.87, 10.6),
    ),
    "rtx-pro": Family(
        {"fp16": Products(0.1, 0.78, 0.92, 1.6), "fp8": Products(5.1, 0.73, 0.98, 1.35)},
        *(0.55, 0.92, 11.0),
    ),
}
OTHER = Family(
    {"fp16": Products(4.0, 0.75, 0.85, 1.9), "fp8": Products(7.5, 0.60, 0.93, 1.4)},
    *(0.54, 0.86, 11.7),
)
"""For GPUs without a family: what all of these reach together."""


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
    interconnect_us: float = 5.0
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
    fp4_tflops: float | None = None
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
        for key in (
            "fp8_tflops",
            "int8_tops",
            "fp4_tflops",
            "tdp_w",
            "network_gb_s",
            "price_per_hour",
        ):
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
        printed = {
            **{"fp16": self.fp16_tflops, "fp8": self.fp8_tflops},
            **{"int8": self.int8_tops, "fp4": self.fp4_tflops},
        }
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
