"""FLOP and bytes of a step by hand, and bounds of power; a run is the sum of its steps by
`tests/metrics/accountant.py`."""

from __future__ import annotations

import random

import pytest

from pagedsim.metrics.recorder import Recorder
from pagedsim.sim.cost.work import Work, step_work, total_work
from pagedsim.sim.power import EnergyRoofline
from tests.sim.shapes import plan, replica


def test_a_step_by_hand() -> None:
    where = replica("llama-2-7b", "a100-80gb", tensor_parallel=2)
    model = where.model
    body, head, pair = model.body_params, model.head_params, 4 * 32 * 32 * 128
    step = plan((96, 32), decodes=3, context=900)
    pairs = sum(range(97, 129)) + 900
    # 35 tokens pass the layers, 4 are sampled; the chunk finds 96 tokens in memory.
    found = step_work(where, step)
    assert found.flop == pytest.approx((35 * 2 * body + 4 * 2 * head + pairs * pair) / 2)
    kept = (96 + 900) * model.kv_bytes_per_token
    assert found.bytes == pytest.approx((2 * (body + head) + kept) / 2)
    assert step_work(where, plan()) == Work(0.0, 0.0)
    assert total_work(where, Recorder().steps_table()) == Work(0.0, 0.0)


# -- power -----------------------------------------------------------------------------------------


POWER = EnergyRoofline(idle=0.1, busy=0.3, compute=1.2, bandwidth=0.7)


def test_a_gpu_draws_at_least_what_it_does_idle_and_at_most_its_tdp() -> None:
    draw = random.Random(0)
    for _ in range(300):
        idle, busy = sorted((draw.random(), draw.random()))
        power = EnergyRoofline(idle, busy, 3 * draw.random(), 3 * draw.random())
        mfu, mbu = draw.random(), draw.random()
        assert idle <= power.share(0, 0) <= power.share(mfu, mbu) <= 1
        assert power.share(mfu, mbu) <= power.share(min(1, 1.1 * mfu), min(1, 1.1 * mbu))


def test_without_a_tdp_there_is_no_power() -> None:
    where = replica("llama-2-7b", "ascend-910b")
    assert POWER.watts(where, Work(1e12, 1e9), 1.0) is None
    assert POWER.idle_watts(where) is None
    assert POWER.joules(where, Recorder().steps_table()) is None
