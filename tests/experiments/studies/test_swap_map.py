"""The map of swap against recompute: its arms, its prices, and what it makes of runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from pagedsim.experiments.studies.swap_map import WAYS, SwapMap
from pagedsim.metrics.arms import Run
from tests.sim.shapes import CONF

MODELS = ("opt-13b", "llama-2-7b", "llama-3.1-8b")
HARDWARE = {"A100": "a100-80gb", "H100": "h100"}


def study(**more: Any) -> SwapMap:
    settings: dict[str, Any] = {
        "title": "t",
        "question": "q",
        "source": "s",
        "models": MODELS,
        "modern": "llama-3.1-8b",
        "machines": {name: [f"hardware={gpu}"] for name, gpu in HARDWARE.items()},
        "buses": {"PCIe 3": 16.0, "PCIe 4": 32.0, "PCIe 5": 64.0},
        "own": {"A100": "PCIe 4", "H100": "PCIe 5"},
        "sizes": [1, 16, 256],
        "usual": 16,
        "length": 1024,
        "batch": [25, 8000],
        "batchings": {"unified": ["batching=unified"]},
    }
    return SwapMap(**(settings | more))


def option(group: str, name: str) -> Any:
    return OmegaConf.to_container(OmegaConf.load(CONF / group / f"{name}.yaml"))


def runs(simulated: SwapMap) -> dict[str, list[Run]]:
    """Two seeds an arm, in which swap with a copy a block serves a tenth more."""
    made = {}
    for arm in simulated.arms():
        model, machine, rest = arm.split(", ", 2)
        config = {
            "model": option("model", model),
            "hardware": option("hardware", HARDWARE[machine]),
            "cost": option("cost", "roofline") | {"stack": option("stack", "vllm-0.33")},
            "memory": {"block_size": 16, "kv_layout": "block"},
            "tensor_parallel": 1,
            "kv_cache_dtype": "auto",
        }
        more = 1.1 if rest == "unified: swap, a copy a block" else 1.0
        rates = 1000 * more * (1 + 1e-3 * (more - 1)), 2000 * more
        made[arm] = [
            Run(arm, seed, Path(), config, {"output_tokens_per_s": rate})
            for seed, rate in enumerate(rates)
        ]
    return made


def test_prices_are_the_cost_models_over_the_whole_grid() -> None:
    simulated = study()
    arms = simulated.arms()
    assert len(arms) == len(MODELS) * len(HARDWARE) * len(WAYS)
    assert arms["llama-3.1-8b, H100, unified: swap, a copy a layer"] == [
        *("model=llama-3.1-8b", "hardware=h100", "batching=unified"),
        *("preemption=swap", "memory.kv_layout=layer"),
    ]
    prices = simulated.read_arms(runs(simulated)).data["prices"]
    assert isinstance(prices, list)
    assert len(prices) == len(MODELS) * len(HARDWARE) * 3 * 2
    place = {"model": "llama-3.1-8b", "machine": "H100", "bus": "PCIe 5", "layout": "block"}
    (one,) = [price for price in prices if price.items() >= place.items()]
    tokens = 2 * 32 * 8 * 128 * 2 * 16 / (64e9 * 0.8)  # seconds for the keys and values of a block
    assert one["swap"] == pytest.approx(
        [2 * 1024 * (tokens / 16 + 5e-6), 2 * 64 * (tokens + 5e-6), 2 * 4 * (16 * tokens + 5e-6)]
    )
    assert one["recompute"] > one["beside"] > 0
