"""Figure 19 on small runs: prices as the arithmetic says, and the reading of whole runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from experiments.papers.preemption import Preemptions
from experiments.studies.swap_map import Priced
from pagedsim.metrics.arms import Run
from tests.sim.shapes import CONF

SIZES = (1, 16, 64)
BUSES = {"PCIe 4": 32.0, "PCIe 3": 16.0}


def config(size: int = 16, rate: float = 32.0) -> dict[str, Any]:
    def option(group: str, name: str) -> Any:
        return OmegaConf.to_container(OmegaConf.load(CONF / group / f"{name}.yaml"))

    return {
        "model": option("model", "opt-13b"),
        "hardware": {**option("hardware", "a100-40gb"), "pcie_gb_s": rate},
        "cost": option("cost", "distserve-opt-13b-tp1"),
        "memory": {"block_size": size, "kv_layout": "layer"},
        "tensor_parallel": 1,
        "kv_cache_dtype": "auto",
    }


def test_swap_pays_eighty_copies_a_block_both_ways() -> None:
    price = Priced(config())(512)
    block = 16 * 819_200 / (32e9 * 0.8) + 80 * 5e-6
    assert price.swap == pytest.approx(2 * 32 * block)
    assert price.recompute == pytest.approx(1e-3 * (22.05 + 512 * 0.1405 + 512**2 * 8.08e-6))


def test_a_block_that_is_not_full_moves_as_a_whole() -> None:
    assert Priced(config())(497).swap == Priced(config())(512).swap > Priced(config())(496).swap


def test_beside_decodes_the_weights_are_read_already() -> None:
    price = Priced(config())(512, 25, 8000)
    assert price.beside == pytest.approx(1e-3 * (512 * 0.1405 + 512**2 * 8.08e-6))


def test_layout_block_size_and_bus_may_be_others() -> None:
    given = Priced(config(), block_size=1, layout="block", pcie_gb_s=64.0)(100)
    assert given.swap == pytest.approx(2 * 100 * (819_200 / (64e9 * 0.8) + 5e-6))


def study(**more: Any) -> Preemptions:
    settings: dict[str, Any] = {
        "title": "t",
        "question": "q",
        "source": "s",
        "sizes": SIZES,
        "slots": 15728,
        "length": 512,
        "lengths": [128],
        "batch": [25, 8000],
        "buses": BUSES,
        "variants": {"apart": ["batching=prefill_first"]},
    }
    return Preemptions(**(settings | more))


LATENCY = {"swap, PCIe 4": (9.0, 1.0, 0.8), "swap, PCIe 3": (18.0, 1.1, 1.0)}


def runs() -> dict[str, list[Run]]:
    made = {}
    for arm in study().arms():
        way, size = arm.split(", blocks of ")
        number, _, name = size.partition(", ")
        place = SIZES.index(int(number))
        value = LATENCY.get(f"{way}, {name}", (1.0, 1.0, 1.0))[place]
        settings = config(int(number), BUSES.get(name, 32.0))
        made[arm] = [Run(arm, 0, Path(), settings, {"normalized_latency_mean": value})]
    return made


def test_the_reading_holds_each_claim_against_the_runs() -> None:
    rows = {row.what: row for row in study().read_arms(runs()).rows}
    assert rows["whole runs, PCIe 4: swap over recompute, blocks of 1"].ours == 9
    assert rows["whole runs, PCIe 4: recompute over swap, at most"].ours == 1.25
    assert rows["whole runs, PCIe 4: recompute over swap, at most"].difference > 0
    assert rows["whole runs, PCIe 3: recompute over swap, at most"].difference == 0
    assert rows["one sequence: recompute, largest over smallest"].ours == 1
    assert rows["one sequence, PCIe 4: smallest block at which swap is cheaper"].ours == 16


def test_the_claim_is_held_against_a_recompute_in_a_step_of_its_own() -> None:
    # 512 tokens: 96 ms to compute again, 35.4 ms over PCIe 4, of which 2.6 ms are copies.
    rows = {row.what: row for row in study().read_arms(runs()).rows}
    row = rows["one sequence, PCIe 4: recompute over swap, at most"]
    price = Priced(config(64))(512, 25, 8000)
    assert row.ours == pytest.approx(price.recompute / price.swap)
    assert f"{price.beside / price.swap:.2f} × if computed beside decodes" in row.why
    meets = 32 * 1.2 * price.swap / price.recompute
    assert f"one of about {meets:.2g} GB/s would meet it" in row.why


def test_a_claim_that_is_met_needs_no_reason() -> None:
    slow = {bus: rate / 10 for bus, rate in BUSES.items()}
    made = runs()
    for arm, of in made.items():
        rate = of[0].config["hardware"]["pcie_gb_s"] / 10
        made[arm] = [Run(arm, 0, Path(), config(64, rate), of[0].summary)]
    rows = study(buses=slow).read_arms(made).rows
    assert not any(row.why for row in rows if "at most" in row.what)
