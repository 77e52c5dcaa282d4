"""A server that is slower than its own clock says so."""

from __future__ import annotations

import logging
import time

import pytest

from pagedsim.core import SamplingParams
from pagedsim.serve.async_engine import LagMonitor
from pagedsim.serve.metrics import Metrics
from pagedsim.serve.realtime_sim import RealtimeSimulator
from tests.serve.serving import paced, serving
from tests.serve.test_realtime_sim import Clock
from tests.sim.harness import Constant


@pytest.mark.parametrize("speed", [1.0, 10.0])
def test_a_step_that_ends_late_is_a_lag(speed: float) -> None:
    clock = Clock()
    engine = RealtimeSimulator(paced().scheduler, Constant(1.0), speed=speed, clock=clock)
    engine.add_request("a", [1], SamplingParams(max_tokens=2))
    engine.step()
    clock.time += engine.pause
    engine.step()
    assert engine.lag == pytest.approx(0.0)
    clock.time += engine.pause + 0.5
    engine.step()
    assert engine.lag == pytest.approx(0.5)


def test_a_large_lag_is_warned_of_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    lag = LagMonitor()
    with caplog.at_level(logging.WARNING):
        for tenth in range(1200):  # two minutes
            lag.note(0.5 if tenth % 2 else 0.01, now=tenth / 10)
        assert len(caplog.records) == 2 and "0.50 s after they are due" in caplog.text
        assert lag.worst(120.0) == 0.5
        caplog.clear()
        LagMonitor().note(0.02, now=0.0)
        assert not caplog.records


def test_the_lag_is_a_metric() -> None:
    metrics = Metrics()
    with serving(paced(metrics=metrics), metrics=metrics) as server:
        server.engine._lag.note(0.75, now=time.monotonic())
        assert 'pagedsim:pacing_lag_seconds{engine="0",model_name="model"} 0.75' in (
            server.http.get("/metrics").text
        )
