"""The shipped data sheets hold what was printed, once dense and in one direction."""

from math import inf, nan
from typing import NamedTuple

import pytest

from pagedsim.core import ConfigError
from pagedsim.core.errors import shown
from pagedsim.sim.hardware import Hardware
from tests.sim.shapes import HARDWARE, hardware


class Sheet(NamedTuple):
    """Dense 16-bit TFLOP/s, GB/s, GB, PCIe both ways, dense fp8 TFLOP/s and int8 TOP/s where there
    are units for them, watts, dollars an hour on demand, and GB/s of the network one way for each
    GPU of servers with a usual one."""

    tflops: float
    bandwidth: float
    memory: float
    pcie: float
    fp8: float | None
    int8: float | None
    watts: float | None
    dollars: float | None
    network: float | None


SHEETS = {
    "a10": Sheet(250 / 2, 600, 24, 64, None, 500 / 2, 150, 1.29, None),
    "a10g": Sheet(140 / 2, 600, 24, 64, None, 280 / 2, 300, 1.006, None),
    "l4": Sheet(242 / 2, 300, 24, 64, 485 / 2, 485 / 2, 72, 0.44, None),
    "a30": Sheet(330 / 2, 933, 24, 64, None, 330, 165, None, None),
    "a40": Sheet(299.4 / 2, 696, 48, 64, None, 598.6 / 2, 300, 0.44, None),
    "a6000": Sheet(309.7 / 2, 768, 48, 64, None, 619.3 / 2, 300, 1.09, None),
    "a100-40gb": Sheet(624 / 2, 1555, 40, 64, None, 1248 / 2, 400, 1.99, 25),
    "a100-80gb": Sheet(624 / 2, 2039, 80, 64, None, 1248 / 2, 400, 2.79, 25),
    "a100-80gb-pcie": Sheet(624 / 2, 1935, 80, 64, None, 1248 / 2, 300, 2.0, None),
    "h100": Sheet(1979 / 2, 3350, 80, 128, 3958 / 2, 3958 / 2, 700, 3.99, 50),
    "h100-pcie": Sheet(1513 / 2, 2000, 80, 128, 3026 / 2, 3026 / 2, 350, 3.29, None),
    "h200": Sheet(1979 / 2, 4800, 141, 128, 3958 / 2, 3958 / 2, 700, 4.29, 50),
    "gh200": Sheet(1979 / 2, 4000, 96, 900, 3958 / 2, 3958 / 2, None, 2.29, None),
    "b200": Sheet(36000 / 8 / 2, 64000 / 8, 180, 128, 72000 / 8 / 2, 72000 / 8 / 2, None, 6.69, 50),
    "l40s": Sheet(362.05, 864, 48, 64, 1466 / 2, 1466 / 2, 350, 1.5, None),
    "t4": Sheet(65, 320, 16, 32, None, 130, 70, 0.15, None),
    "v100": Sheet(125, 900, 32, 32, None, None, 300, 0.79, 6.25),
    "rtx3090": Sheet(142 / 2, 936, 24, 64, None, 568 / 2, 350, 0.16, None),
    "rtx4090": Sheet(330.3 / 2, 1008, 24, 64, 660.6 / 2, 1321.2 / 2, 450, 0.39, None),
    "rtx-pro-6000": Sheet(1007.6 / 2, 1792, 96, 128, 2015.2 / 2, 2015.2 / 2, 600, 1.45, None),
    "rtx-pro-6000-server": Sheet(
        1007.6 / 2, 1597, 96, 128, 2015.2 / 2, 2015.2 / 2, 600, 2.04, None
    ),
    "mi300x": Sheet(2614.9 / 2, 5300, 192, 128, 5229.8 / 2, 5229.8 / 2, 750, 3.45, 50),
    "ascend-910b": Sheet(376, 1600, 64, 64, None, 2 * 376, None, None, 25),
}


def test_every_shipped_gpu_is_checked() -> None:
    assert set(SHEETS) == set(HARDWARE)


@pytest.mark.parametrize("name", SHEETS)
def test_a_shipped_gpu_is_that_of_its_data_sheet(name: str) -> None:
    gpu, sheet = hardware(name), SHEETS[name]
    assert gpu.name == name
    assert gpu.flop_rate == pytest.approx(sheet.tflops * 1e12, rel=1e-3)
    assert gpu.bandwidth == sheet.bandwidth * 1e9
    assert gpu.pcie == sheet.pcie / 2 * 1e9
    assert 0.91 * sheet.memory < gpu.memory_gib <= sheet.memory  # of GDDR6, ECC takes a sixteenth
    found = gpu.rates
    assert list(found) == [key for key in ("fp16", "fp8", "int8") if key in found]
    assert found["fp16"] == gpu.flop_rate
    for key in ("fp8", "int8"):
        tera = getattr(sheet, key)
        assert found.get(key) == (tera and pytest.approx(tera * 1e12, rel=1e-3))
    assert gpu.tdp_w == sheet.watts
    # The list is in dollars, at 1.1761 of them a euro.
    assert gpu.price_per_hour == (sheet.dollars and pytest.approx(sheet.dollars / 1.1761, rel=5e-4))
    assert gpu.network_gb_s == sheet.network
    if sheet.network is None:
        line = rf"^hardware\.network_gb_s=null: hardware={name} needs it, in GB/s for each GPU"
        with pytest.raises(ConfigError, match=line):
            _ = gpu.network
    else:
        assert gpu.network == sheet.network * 1e9


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("fp16_tflops", 0.0),
        ("fp16_tflops", inf),
        ("memory_gib", nan),
        ("bandwidth_gb_s", None),
        ("pcie_copy_us", -1.0),
        ("int8_tops", "624"),
        ("tdp_w", 0),
        ("network_gb_s", 0),
        ("price_per_hour", 0),
        ("gpus_per_node", 2.5),
    ],
)
def test_impossible_rates_are_refused(key: str, value: object) -> None:
    rates = {"memory_gib": 24.0, "bandwidth_gb_s": 600.0, "fp16_tflops": 125.0, "pcie_gb_s": 32.0}
    with pytest.raises(ConfigError, match=f"hardware.{key}={shown(value)}: must be"):
        Hardware("odd", **(rates | {key: value}))  # type: ignore[arg-type]
