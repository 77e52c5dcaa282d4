"""What kernels reach of a GPU's data sheet, by the GPU's family.

These numbers and those of conf/stack are from an earlier fit of both together to the step tables in
experiments/data, which weighed rows otherwise than `python -m experiments.fidelity.constants`. That
fits them again and prints where it differs; docs/fidelity.md says how far they carry.
"""

from __future__ import annotations

from typing import NamedTuple


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
