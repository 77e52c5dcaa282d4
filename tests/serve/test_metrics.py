"""What Prometheus reads is what was sent; the lag of a server that is slower than its own clock."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Iterator

import pytest
from prometheus_client.parser import text_string_to_metric_families

from pagedsim.build import make_memory, make_scheduler
from pagedsim.core import (
    PrefixMemory,
    Request,
    SamplingParams,
    Scheduler,
    StepPlan,
    Unified,
)
from pagedsim.core.offload import OffloadConnector
from pagedsim.metrics.recorder import Recorder
from pagedsim.serve.async_engine import LagMonitor
from pagedsim.serve.metrics import Metrics
from pagedsim.serve.realtime_sim import RealtimeSimulator
from pagedsim.sim.copies import CopyTimes
from pagedsim.sim.simulate import simulate
from pagedsim.sim.transfers import Transfers
from tests.serve.serving import Server, paced, serving, until
from tests.serve.test_realtime_sim import Clock
from tests.sim.harness import Constant, Jobs
from tests.sim.test_transfers import Even

NAMES = {
    *("num_requests_running", "num_requests_waiting", "num_requests_swapped"),
    *("kv_cache_usage_perc", "cpu_cache_usage_perc", "cache_config_info"),
    *("prefix_cache_queries", "prefix_cache_hits", "num_preemptions"),
    *("external_prefix_cache_queries", "external_prefix_cache_hits", "prompt_tokens_by_source"),
    *("prompt_tokens", "generation_tokens", "request_success"),
    *("iteration_tokens_total", "request_prompt_tokens", "request_generation_tokens"),
    *("request_params_n", "request_params_max_tokens", "time_to_first_token_seconds"),
    *("inter_token_latency_seconds", "request_time_per_output_token_seconds"),
    *("e2e_request_latency_seconds", "request_queue_time_seconds"),
    *("request_inference_time_seconds", "request_prefill_time_seconds"),
    "request_decode_time_seconds",
}
"""What dashboards of vLLM ask for."""
SOURCES = ("local_compute", "local_cache_hit", "external_kv_transfer")


def numbers(server: Server, **labels: str) -> dict[str, float]:
    """Every sample that has these labels beside the model's and the engine's, by its name."""
    found = {}
    for family in text_string_to_metric_families(server.http.get("/metrics").text):
        for sample in family.samples:
            told = dict(sample.labels)
            assert told.pop("model_name") == "model" and told.pop("engine") == "0"
            if told == labels:
                found[sample.name.removeprefix("vllm:")] = sample.value
    return found


def test_the_names_are_those_of_vllm() -> None:
    metrics = Metrics()
    with serving(paced(metrics=metrics), metrics=metrics) as server:
        families = list(text_string_to_metric_families(server.http.get("/metrics").text))
    own = {f"pagedsim:{name}" for name in ("max_seqs", "max_batched_tokens", "pacing_lag_seconds")}
    assert {family.name for family in families} == own | {f"vllm:{name}" for name in NAMES}


def test_counts_of_requests_and_tokens() -> None:
    metrics = Metrics()
    with serving(paced(metrics=metrics, max_seqs=4), metrics=metrics) as server:
        for tokens in (1, 5, 20):
            server.post("/v1/completions", prompt=[7] * 10, max_tokens=tokens, n=2)
        answer = server.post("/v1/completions", prompt=[[1] * 3] * 6, max_tokens=10).json()
        assert answer["usage"]["total_tokens"] == 78
        found = numbers(server)
    assert found["prompt_tokens_total"] == 3 * 10 + 6 * 3
    assert found["generation_tokens_total"] == 2 * (1 + 5 + 20) + 6 * 10
    assert found["request_prompt_tokens_count"] == 9
    assert found["request_prompt_tokens_sum"] == 48
    assert found["request_generation_tokens_sum"] == 26 + 60
    assert found["request_params_n_sum"] == 3 * 2 + 6
    assert found["request_params_max_tokens_sum"] == 26 + 60
    assert found["time_to_first_token_seconds_count"] == 9
    # Of every sequence each token but the first comes after another.
    assert found["inter_token_latency_seconds_count"] == 2 * (0 + 4 + 19) + 6 * 9
    assert found["num_requests_running"] == found["num_requests_waiting"] == 0
    assert found["kv_cache_usage_perc"] == found["num_preemptions_total"] == 0
    assert found["iteration_tokens_total_sum"] == 48 + 2 * (0 + 4 + 19) + 6 * 9


def test_times_are_those_of_the_steps() -> None:
    metrics = Metrics()
    with serving(paced(metrics=metrics, step=0.03), metrics=metrics) as server:
        server.post("/v1/completions", prompt=[7] * 10, max_tokens=21)
        found = numbers(server)
    assert found["inter_token_latency_seconds_sum"] == pytest.approx(20 * 0.03)
    assert found["request_time_per_output_token_seconds_sum"] == pytest.approx(0.03)
    assert found["request_decode_time_seconds_sum"] == pytest.approx(20 * 0.03)
    assert found["request_prefill_time_seconds_sum"] == pytest.approx(0.03)
    whole = found["request_queue_time_seconds_sum"] + found["request_inference_time_seconds_sum"]
    assert found["e2e_request_latency_seconds_sum"] == pytest.approx(whole)


def test_preempted_and_aborted_requests_are_counted() -> None:
    metrics = Metrics()
    engine = paced(metrics=metrics, speed=10.0, step=0.01)
    with serving(engine, metrics=metrics) as server:
        fields = {"prompt": [[1] * 1000] * 4, "max_tokens": 100}
        server.post("/v1/completions", **fields)  # 4 × 1,100 tokens; there is room for 4,096
        server.post("/v1/completions", prompt="a", max_tokens=3000, timeout=0.3)
        until(lambda: numbers(server, finished_reason="abort") == {"request_success_total": 1})
        found = numbers(server)
    assert found["num_preemptions_total"] >= 1
    assert found["generation_tokens_total"] >= 400
    assert found["request_generation_tokens_sum"] == 400


def test_prefix_cache_lookups_are_counted() -> None:
    metrics = Metrics()
    with serving(paced("prefix", metrics=metrics), metrics=metrics) as server:
        cached = [
            server.post("/v1/completions", prompt=[5] * 40, max_tokens=2).json()["usage"]
            for _ in range(2)
        ]
        found = numbers(server)
    assert [one["prompt_tokens_details"]["cached_tokens"] for one in cached] == [0, 32]
    assert (found["prefix_cache_queries_total"], found["prefix_cache_hits_total"]) == (80, 32)


def test_what_a_simulated_server_copies_and_finds_in_host_memory_is_counted() -> None:
    metrics = Metrics()
    scheduler = make_scheduler(
        memory=make_memory("prefix", blocks=8, block_size=16),
        batching="unified",
        connector=OffloadConnector(64),
    )
    copies = Transfers(CopyTimes(1e6, 1, bus=1e9))
    engine = RealtimeSimulator(
        scheduler, Constant(0.02), speed=1000.0, observer=metrics, transfers=copies
    )
    with serving(engine, metrics=metrics) as server:
        for token in (1, 2, 1):  # the second has the GPU's blocks of the first but two
            server.post("/v1/completions", prompt=[token] * 100, max_tokens=2)
        found = numbers(server)
        told = {name: numbers(server, source=name) for name in SOURCES}
        both = {name: numbers(server, transfer_type=name) for name in ("CPU_to_GPU", "GPU_to_CPU")}
    gpu, host = found["prefix_cache_hits_total"], found["external_prefix_cache_hits_total"]
    assert (found["prefix_cache_queries_total"], gpu + host) == (300, 96) and host > 0
    assert found["external_prefix_cache_queries_total"] == 300 - gpu
    assert [told[name]["prompt_tokens_by_source_total"] for name in SOURCES] == [204, gpu, host]
    assert found["kv_offload_load_bytes_total"] == host / 16 * 1e6
    assert found["kv_offload_store_bytes_total"] == 12 * 1e6
    assert found["kv_offload_load_size_count"] == 1
    assert found["kv_offload_load_time_total"] == pytest.approx(
        CopyTimes(1e6, 1, bus=1e9).seconds(int(host / 16), "dma")
    )
    assert both["CPU_to_GPU"]["kv_offload_total_bytes_total"] == host / 16 * 1e6
    assert both["GPU_to_CPU"]["kv_offload_total_time_total"] > 0


class Observed(Recorder):
    """Tells metrics of its steps."""

    def __init__(self) -> None:
        super().__init__()
        self.metrics = Metrics()

    def step(self, plan: StepPlan, start: float, end: float, scheduler: Scheduler) -> None:
        self.metrics.step(plan, start, end, scheduler)
        super().step(plan, start, end, scheduler)


class Halves(Jobs):
    """Prompts whose first halves are those of one of two texts."""

    def requests(self) -> Iterator[tuple[Request, int]]:
        for number, (arrival, tokens, answer) in enumerate(self.rows):
            half = tokens // 2
            shared = [1000 * (number % 2) + place for place in range(half)]
            own = [10_000 * (number + 1) + place for place in range(tokens - half)]
            yield Request(number, shared + own, arrival=arrival), answer


@pytest.mark.parametrize("seed", range(5))
def test_a_prompt_that_is_preempted_came_from_where_it_was_first_found(seed: int) -> None:
    draw = random.Random(seed)
    scheduler = Scheduler(
        memory=PrefixMemory(draw.choice([12, 16, 24]), 4),
        batching=Unified(),
        connector=OffloadConnector(200),
        max_seqs=4,
        max_batched_tokens=draw.choice([8, 12]),
    )
    rows = [(float(n), draw.randint(8, 40), draw.randint(1, 8)) for n in range(25)]
    recorder = Observed()
    simulate(scheduler, Halves(rows), Constant(), recorder, transfers=Transfers(Even(0.01)))
    metrics = recorder.metrics
    assert list(metrics.prompt_tokens.values())[1:] == [metrics.cache_hits, metrics.below_hits]
    assert sum(metrics.prompt_tokens.values()) == sum(tokens for _, tokens, _ in rows)
    assert metrics.preemptions and metrics.below_hits


def test_finish_reasons_are_those_of_the_answers() -> None:
    metrics = Metrics()
    with serving(paced(metrics=metrics), metrics=metrics) as server:
        told = [
            server.post("/v1/chat/completions", messages=[{"role": "user", "content": "a"}], **more)
            for more in ({}, {"max_tokens": 3}, {})
        ]
        assert [one.json()["choices"][0]["finish_reason"] for one in told] == [
            "stop", "length", "stop",
        ]  # fmt: skip
        assert numbers(server, finished_reason="stop") == {"request_success_total": 2}
        assert numbers(server, finished_reason="length") == {"request_success_total": 1}


def test_the_cache_configuration() -> None:
    metrics = Metrics()
    with serving(paced(metrics=metrics), metrics=metrics) as server:
        found = numbers(server, block_size="16", num_gpu_blocks="256", num_cpu_blocks="0")
    assert found == {"cache_config_info": 1}


def test_a_step_that_ends_late_is_a_lag() -> None:
    clock = Clock()
    engine = RealtimeSimulator(paced().scheduler, Constant(1.0), speed=10.0, clock=clock)
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
