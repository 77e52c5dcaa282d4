"""What a roofline knows beside data sheets, by name, so that it can be changed and fitted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from pagedsim.fidelity.step_tables.sheets import stack_named, there
from pagedsim.sim.cost import Roofline
from pagedsim.sim.hardware import FAMILIES, OTHER, Family, Hardware
from pagedsim.sim.replica import Replica
from pagedsim.sim.stack import Stack

LINK = "link.interconnect_us"
"""The one constant that data sheets in conf/hardware have for a place."""


@dataclass(frozen=True)
class Constants:
    """Families and stacks by name; a constant's name is theirs and its own, `hopper.cache`."""

    families: Mapping[str, Family]
    stacks: Mapping[str, Stack]
    interconnect_us: float

    @classmethod
    def standing(cls) -> Constants:
        """Those that a simulation takes."""
        stacks = {name: stack_named(name) for name in sorted(there("stack"))}
        return cls(FAMILIES, stacks, Hardware.interconnect_us)

    def __getitem__(self, name: str) -> float:
        """The value of one of them."""
        if name == LINK:
            return self.interconnect_us
        owner, field = name.split(".")
        value: float = getattr(self.families.get(owner) or self.stacks[owner], field)
        return value

    def but(self, values: Mapping[str, float]) -> Constants:
        """The same with some of them changed; KeyError for a name that none of them has."""
        families, stacks = dict(self.families), dict(self.stacks)
        for name, value in values.items():
            owner, _, field = name.partition(".")
            if owner in families:
                families[owner] = families[owner]._replace(**{field: value})
            elif owner in stacks:
                changed: dict[str, Any] = {field: value}
                stacks[owner] = replace(stacks[owner], **changed)
            elif name != LINK:
                raise KeyError(f"{name}: no such constant")
        return Constants(families, stacks, values.get(LINK, self.interconnect_us))

    def cost_of(self, replica: Replica, stack: str) -> Roofline:
        """The cost model of a replica under one of the stacks."""
        name = replica.hardware.family
        family = OTHER if name is None else self.families[name]
        if replica.hardware.interconnect_us == Hardware.interconnect_us:
            hardware = replace(replica.hardware, interconnect_us=self.interconnect_us)
            replica = replace(replica, hardware=hardware)
        return Roofline(replica, stack=self.stacks[stack], family=family)
