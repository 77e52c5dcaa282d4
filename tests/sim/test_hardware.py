"""The shipped data sheets hold what was printed, once dense and in one direction."""

from math import inf, nan

import pytest

from pagedsim.core import ConfigError
from pagedsim.core.errors import shown
from pagedsim.sim.hardware import Hardware
from tests.sim.shapes import HARDWARE, hardware, replica

# name: (dense fp16 TFLOP/s, GB/s, GB on the data sheet, PCIe both ways)
SHEETS = {
    "a10": (250 / 2, 600, 24, 64),
    "a10g": (140 / 2, 600, 24, 64),
    "l4": (242 / 2, 300, 24, 64),
    "a30": (330 / 2, 933, 24, 64),
    "a40": (299.4 / 2, 696, 48, 64),
    "a6000": (309.7 / 2, 768, 48, 64),
    "a100-40gb": (624 / 2, 1555, 40, 64),
    "a100-80gb": (624 / 2, 2039, 80, 64),
    "a100-80gb-pcie": (624 / 2, 1935, 80, 64),
    "h100": (1979 / 2, 3350, 80, 128),
    "h100-pcie": (1513 / 2, 2000, 80, 128),
    "h200": (1979 / 2, 4800, 141, 128),
    "gh200": (1979 / 2, 4000, 96, 900),
    "b200": (36_000 / 8 / 2, 64_000 / 8, 180, 128),
    "l40s": (362.05, 864, 48, 64),
    "t4": (65, 320, 16, 32),
    "v100": (125, 900, 32, 32),
    "rtx3090": (142 / 2, 936, 24, 64),
    "rtx4090": (330.3 / 2, 1008, 24, 64),
    "rtx-pro-6000": (1007.6 / 2, 1792, 96, 128),
    "rtx-pro-6000-server": (1007.6 / 2, 1597, 96, 128),
    "mi300x": (2614.9 / 2, 5300, 192, 128),
    "ascend-910b": (376, 1600, 64, 64),
}
# of those that have them: (dense fp8 TFLOP/s, int8 TOP/s)
EIGHT_BITS = {
    "a10": (None, 500 / 2),
    "a10g": (None, 280 / 2),
    "l4": (485 / 2, 485 / 2),
    "a30": (None, 330),
    "a40": (None, 598.6 / 2),
    "a6000": (None, 619.3 / 2),
    "a100-40gb": (None, 1248 / 2),
    "a100-80gb": (None, 1248 / 2),
    "a100-80gb-pcie": (None, 1248 / 2),
    "h100": (3958 / 2, 3958 / 2),
    "h100-pcie": (3026 / 2, 3026 / 2),
    "h200": (3958 / 2, 3958 / 2),
    "gh200": (3958 / 2, 3958 / 2),
    "b200": (72_000 / 8 / 2, 72_000 / 8 / 2),
    "l40s": (1466 / 2, 1466 / 2),
    "t4": (None, 130),
    "v100": (None, None),
    "rtx3090": (None, 568 / 2),
    "rtx4090": (660.6 / 2, 1321.2 / 2),
    "rtx-pro-6000": (2015.2 / 2, 2015.2 / 2),
    "rtx-pro-6000-server": (2015.2 / 2, 2015.2 / 2),
    "mi300x": (5229.8 / 2, 5229.8 / 2),
    "ascend-910b": (None, 2 * 376),
}
WATTS = {
    "a10": 150,
    "a10g": 300,
    "l4": 72,
    "a100-40gb": 400,
    "a100-80gb": 400,
    "a100-80gb-pcie": 300,
    "h100": 700,
    "h200": 700,
    "rtx4090": 450,
    "rtx-pro-6000": 600,
    "mi300x": 750,
    "a30": 165,
    "a40": 300,
    "a6000": 300,
    "b200": None,
    "gh200": None,
    "h100-pcie": 350,
    "l40s": 350,
    "rtx-pro-6000-server": 600,
    "rtx3090": 350,
    "t4": 70,
    "v100": 300,
    "ascend-910b": None,
}
# dollars an hour, on demand; at 1.1761 of them a euro
PRICES = {
    "a10": 1.29,
    "a10g": 1.006,
    "l4": 0.44,
    "a30": None,
    "a40": 0.44,
    "a6000": 1.09,
    "a100-40gb": 1.99,
    "a100-80gb": 2.79,
    "a100-80gb-pcie": 2.00,
    "h100": 3.99,
    "h100-pcie": 3.29,
    "h200": 4.29,
    "gh200": 2.29,
    "b200": 6.69,
    "l40s": 1.50,
    "t4": 0.15,
    "v100": 0.79,
    "rtx3090": 0.16,
    "rtx4090": 0.39,
    "rtx-pro-6000": 1.45,
    "rtx-pro-6000-server": 2.04,
    "mi300x": 3.45,
    "ascend-910b": None,
}


def test_every_shipped_gpu_is_checked() -> None:
    assert set(SHEETS) == set(EIGHT_BITS) == set(WATTS) == set(PRICES) == set(HARDWARE)


@pytest.mark.parametrize("name", PRICES)
def test_prices_are_those_of_the_list_in_euros(name: str) -> None:
    found, dollars = hardware(name).price_per_hour, PRICES[name]
    assert found == (dollars and pytest.approx(dollars / 1.1761, rel=5e-4))


def test_a_replica_costs_what_all_its_gpus_do() -> None:
    one, four = (replica("llama-2-7b", "h100", tensor_parallel=n).euros_per_hour for n in (1, 4))
    assert (one, four) == (3.393, 4 * 3.393)
    assert replica("llama-2-7b", "a30").euros_per_hour is None


@pytest.mark.parametrize("name", WATTS)
def test_power_is_that_of_the_data_sheet(name: str) -> None:
    assert hardware(name).tdp_w == WATTS[name]


@pytest.mark.parametrize("name", SHEETS)
def test_rates_are_those_of_the_data_sheet(name: str) -> None:
    gpu, (tflops, bandwidth, memory, pcie) = hardware(name), SHEETS[name]
    assert gpu.name == name
    assert gpu.flop_rate == pytest.approx(tflops * 1e12, rel=1e-3)
    assert gpu.bandwidth == bandwidth * 1e9
    assert gpu.pcie == pcie / 2 * 1e9
    assert 0.91 * memory < gpu.memory_gib <= memory  # of GDDR6, ECC takes a sixteenth


@pytest.mark.parametrize("name", EIGHT_BITS)
def test_8_bit_rates_are_given_where_supported(name: str) -> None:
    found = hardware(name).rates
    assert list(found) == [key for key in ("fp16", "fp8", "int8") if key in found]
    assert found["fp16"] == hardware(name).flop_rate
    for key, tera in zip(("fp8", "int8"), EIGHT_BITS[name], strict=True):
        assert found.get(key) == (tera and pytest.approx(tera * 1e12, rel=1e-3))


# One way, GB/s for each GPU, of those that servers with a usual network have.
NETWORK = {
    "a100-40gb": 25,
    "a100-80gb": 25,
    "h100": 50,
    "h200": 50,
    "b200": 50,
    "mi300x": 50,
    "v100": 6.25,
    "ascend-910b": 25,
}


@pytest.mark.parametrize("name", SHEETS)
def test_networks_are_those_of_servers(name: str) -> None:
    gpu = hardware(name)
    assert gpu.network_gb_s == NETWORK.get(name)
    if gpu.network_gb_s is None:
        line = rf"^hardware\.network_gb_s=null: hardware={name} needs it, in GB/s for each GPU"
        with pytest.raises(ConfigError, match=line):
            _ = gpu.network
    else:
        assert gpu.network == gpu.network_gb_s * 1e9


def test_a_node_of_ascend_holds_16() -> None:
    where = replica("llama-3.1-70b", "ascend-910b", tensor_parallel=16)
    assert where.weight_bytes == where.model.weight_bytes / 16


def test_without_a_link_of_their_own_gpus_talk_over_pcie() -> None:
    gpu = Hardware("plain", memory_gib=24, bandwidth_gb_s=600, fp16_tflops=125, pcie_gb_s=32)
    assert gpu.interconnect == gpu.pcie == 32e9


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("fp16_tflops", 0.0),
        ("fp16_tflops", inf),
        ("memory_gib", nan),
        ("memory_gib", "80GB"),
        ("bandwidth_gb_s", None),
        ("pcie_gb_s", True),
        ("pcie_copy_us", -1.0),
        ("interconnect_us", nan),
        ("fp8_tflops", 0),
        ("int8_tops", "624"),
        ("tdp_w", 0),
        ("tdp_w", "400 W"),
        ("network_gb_s", 0),
        ("network_us", -1.0),
        ("price_per_hour", 0),
        ("price_per_hour", "3 EUR"),
        ("gpus_per_node", 2.5),
        ("gpus_per_node", 0),
    ],
)
def test_impossible_rates_are_refused(key: str, value: object) -> None:
    rates = {"memory_gib": 24.0, "bandwidth_gb_s": 600.0, "fp16_tflops": 125.0, "pcie_gb_s": 32.0}
    with pytest.raises(ConfigError, match=f"hardware.{key}={shown(value)}: must be"):
        Hardware("odd", **(rates | {key: value}))  # type: ignore[arg-type]
