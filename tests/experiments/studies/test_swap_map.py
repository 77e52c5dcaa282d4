"""The map of swap against recompute: its arms, its prices, and what it makes of runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from pagedsim.backends.base import Backend
from pagedsim.backends.engine import Engine
from pagedsim.backends.sim import Simulated
from pagedsim.experiments.studies.swap_map import WAYS, SwapMap
from pagedsim.metrics.arms import Run
from tests.sim.shapes import CONF

MODELS = ("opt-13b", "llama-2-7b", "llama-3.1-8b")
HARDWARE = {"A100": "a100-80gb", "H100": "h100"}


def study(backend: Backend, **more: Any) -> SwapMap:
    settings: dict[str, Any] = {
        "title": "t",
        "question": "q",
        "source": "s",
        "backend": backend,
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
        "measured": [4, 16],
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
    simulated = study(Simulated())
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


def test_the_engine_measures_prices_and_serves_each_way_once() -> None:
    arms = study(Engine(cache_tokens=1024)).arms()
    assert set(arms) == {
        *WAYS,
        "cheapest, a copy a layer, blocks of 4",
        "cheapest, a copy a block, blocks of 4",
    }
    assert "workload.requests=1" in arms["cheapest, a copy a block, blocks of 4"]
    assert "memory.cpu_blocks=256" in arms["swap, a copy a block"]
    assert not any(
        change.startswith(("model=", "hardware=")) for arm in arms.values() for change in arm
    )


def test_measured_prices_are_reported() -> None:
    engine = study(Engine())
    machine = {
        **{"block_size": 16, "blocks": 64, "model": "tiny", "device": "CPU"},
        "prices": {"prefill": (0.0, 1e-3), "transfer": (0.0, 2e-3)},
    }
    made = {
        arm: [
            Run(arm, 0, Path(), {}, {"output_tokens_per_s": 100.0, "machine": dict(machine)}),
            Run(arm, 1, Path(), {}, {"output_tokens_per_s": 100.0, "machine": dict(machine)}),
        ]
        for arm in engine.arms()
    }
    reading = engine.read_arms(made)
    assert reading.listings[0].rows[0][1:] == ["1024", "256", "1,024"]
    assert "0.25 times with" in reading.finding[0]
