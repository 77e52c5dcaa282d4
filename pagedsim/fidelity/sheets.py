"""Models, GPUs and stacks by the names of their files in conf/."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from pagedsim import conf
from pagedsim.sim.hardware import Hardware
from pagedsim.sim.model import ModelShape
from pagedsim.sim.stack import Stack
from pagedsim.spec.objects import make

CONF = Path(conf.__file__).parent


@cache
def option_names(group: str) -> frozenset[str]:
    """The names that a group has."""
    return frozenset(path.stem for path in (CONF / group).glob("*.yaml"))


@cache
def model_named(name: str) -> ModelShape:
    """A model's shape."""
    return make("model", settings("model", name), ModelShape)


@cache
def hardware_named(name: str) -> Hardware:
    """A GPU's data sheet."""
    return make("hardware", settings("hardware", name), Hardware)


@cache
def stack_named(name: str) -> Stack:
    """The overheads of a serving stack beside its kernels."""
    return make("stack", settings("stack", name), Stack)


def settings(group: str, name: str) -> Any:
    """The settings in an option's file."""
    return OmegaConf.to_container(OmegaConf.load(CONF / group / f"{name}.yaml"))
