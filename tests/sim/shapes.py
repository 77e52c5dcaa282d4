"""What the tests of the cost models are about: the shipped configuration, and plans by totals."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from hydra.utils import instantiate
from omegaconf import OmegaConf

from pagedsim import conf
from pagedsim.core import Request, SamplingParams, StepPlan
from pagedsim.core.plan import Chunk
from pagedsim.sim.cost import Roofline
from pagedsim.sim.hardware import Hardware
from pagedsim.sim.model import ModelShape
from pagedsim.sim.replica import Replica
from pagedsim.sim.stack import Stack

CONF = Path(conf.__path__[0])
"""The installed options: tests of a compiled installation have no others."""
PUBLISHED: dict[str, tuple[float, dict[str, Any]]] = {
    name: (one["params"], one["config"])
    for name, one in json.loads(
        (Path(__file__).parent / "published_configs.json").read_text()
    ).items()
}
"""Parameters of published models, and what their config.json says as far as it tells their shape.
Of kimi-k2 only the billions are published."""
REQUEST = Request(0, 1, SamplingParams(max_tokens=1))


# Neither what any config.json says, nor another by a second name.
def _described(group: str, other: str) -> list[str]:
    """The options that a source describes: not those that change a setting of another."""
    files = sorted((CONF / group).glob("*.yaml"))
    return [p.stem for p in files if p.stem != other and "\ndefaults:" not in p.read_text()]


MODELS = _described("model", "hf")
HARDWARE = _described("hardware", "cpu")
"""The GPUs: what a CPU is given there stands on no data sheet."""


def shipped(group: str, name: str) -> Any:
    """The object that conf/<group>/<name>.yaml describes; of a cost model, what still wants
    a replica."""
    config = OmegaConf.load(CONF / group / f"{name}.yaml")
    if group != "cost":
        return instantiate(config)
    # What it takes from the configuration around it: the stack.
    stack = OmegaConf.load(CONF / "stack" / "vllm-0.33.yaml")
    root = OmegaConf.create({"stack": stack, "cost": config})
    return instantiate(root.cost, _partial_=True)


def parameters(shape: ModelShape) -> float:
    """All parameters of a model: its bytes, if each took one."""
    moe = shape.moe and replace(shape.moe, dtype_bytes=None)
    return replace(shape, dtype_bytes=1.0, head_dtype_bytes=1.0, moe=moe).weight_bytes


def model(name: str) -> ModelShape:
    shape = shipped("model", name)
    assert isinstance(shape, ModelShape)
    return shape


def hardware(name: str) -> Hardware:
    gpu = shipped("hardware", name)
    assert isinstance(gpu, Hardware)
    return gpu


def ideal_stack() -> Stack:
    """Software that takes no time."""
    found = shipped("stack", "ideal")
    assert isinstance(found, Stack)
    return found


def ideal(where: Replica, **settings: Any) -> Roofline:
    """Data-sheet rates reached in full, and a host that takes no time."""
    rates = dict.fromkeys(("compute_efficiency", "bandwidth_efficiency", "bus_efficiency"), 1.0)
    return Roofline(where, stack=ideal_stack(), **{**rates, **settings})


def replica(model_name: str, hardware_name: str, **settings: Any) -> Replica:
    return Replica(model(model_name), hardware(hardware_name), **settings)


def plan(
    *chunks: int | tuple[int, int], decodes: int = 0, context: int = 0, number: int = 0
) -> StepPlan:
    """A step: chunks as lengths, or as (start, length), beside decodes and their context."""
    step = StepPlan(number=number, now=0.0)
    for chunk in chunks:
        start, length = (0, chunk) if isinstance(chunk, int) else chunk
        step.add_chunk(Chunk(REQUEST, start, length, samples=True))
    step._decode_count, step._decode_context = decodes, context
    return step
