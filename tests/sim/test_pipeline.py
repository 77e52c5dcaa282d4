"""Pipelines: memory of each stage, step times and bubbles."""

from __future__ import annotations

import pytest

from pagedsim.build import make_memory, make_scheduler
from pagedsim.core import ConfigError, StepPlan
from pagedsim.metrics.recorder import Recorder
from pagedsim.sim.capacity import capacity, cpu_blocks
from pagedsim.sim.cost import CostModel, Roofline
from pagedsim.sim.cost.base import Breakdown
from pagedsim.sim.cost.work import step_work, total_work
from pagedsim.sim.footprint import weights_of
from pagedsim.sim.products import products
from pagedsim.sim.replica import Replica
from pagedsim.sim.simulate import simulate
from pagedsim.sim.stack import Stack
from tests.sim.harness import Jobs
from tests.sim.shapes import ideal_stack, plan, replica, shipped

LLAMA_70B = replica("llama-2-70b", "h100", tensor_parallel=2, pipeline_parallel=4)


def ideal(where: Replica) -> Roofline:
    """At all of the data sheet's rates, and with software that takes no time."""
    return Roofline(where, stack=ideal_stack(), compute_efficiency=1.0, bandwidth_efficiency=1.0)


def seconds(told: Breakdown, name: str) -> float:
    return next((term.seconds for term in told.terms if term.name == name), 0.0)


# Memory


def test_each_stage_keeps_its_layers_and_the_ends_theirs() -> None:
    whole, half = (replica("llama-2-7b", "a100-80gb", pipeline_parallel=n) for n in (1, 2))
    model = whole.model
    end = 32_000 * 4096 * 2  # the embeddings on the first GPU, as much of an LM head on the other
    assert half.weight_bytes == pytest.approx((model.weight_bytes - 2 * end) / 2 + end)
    assert half.kv_bytes_per_token == whole.kv_bytes_per_token / 2
    assert half.copies_per_block == whole.copies_per_block == 1
    assert capacity(half).blocks > 2 * capacity(whole).blocks
    assert cpu_blocks(half, 4.0) == 2 * cpu_blocks(whole, 4.0)
    assert (half.gpus, whole.gpus, LLAMA_70B.gpus) == (2, 1, 8)


def test_of_uneven_stages_the_largest_counts() -> None:
    where = replica("llama-2-7b", "a100-80gb", pipeline_parallel=3)
    assert [stage.layers for stage in where.stages] == [11, 11, 10]
    assert where.kv_bytes_per_token == pytest.approx(where.model.kv_bytes_per_token * 11 / 32)
    assert (
        replica("llama-2-7b", "a10", kv_layout="layer", pipeline_parallel=3).copies_per_block == 22
    )


def test_tied_embeddings_stand_at_both_ends() -> None:
    whole, half = (replica("llama-3.2-3b", "a10", pipeline_parallel=n) for n in (1, 2))
    end = 128_256 * 3072 * 2
    assert whole.model.tied_embeddings
    assert half.weight_bytes == pytest.approx((whole.weight_bytes - end) / 2 + end)


@pytest.mark.parametrize("stages", [1, 2, 3, 5])
@pytest.mark.parametrize("name", ["llama-2-7b", "llama-3.2-3b", "mixtral-8x7b", "opt-13b"])
def test_parts_of_the_fullest_stage_add_up_to_its_weights(name: str, stages: int) -> None:
    where = replica(name, "h200", tensor_parallel=2, pipeline_parallel=stages)
    assert sum(weights_of(where).values()) == pytest.approx(where.weight_bytes, rel=1e-12)


# Times, by hand


def test_one_sequence_passes_stage_after_stage_and_is_no_faster() -> None:
    one, four = (ideal(replica("llama-2-7b", "h100", pipeline_parallel=n)) for n in (1, 4))
    hop = 4096 * 2 / 450e9 + 18e-6
    assert four.decode_seconds(1, 1000) == pytest.approx(one.decode_seconds(1, 1000) + 3 * hop)
    told = four.explain(plan(decodes=1, context=1000))
    assert seconds(told, "bubbles") == pytest.approx(0.75 * told.seconds)
    assert told.bound == "pipeline"


def test_decodes_keep_all_stages_busy() -> None:
    """A quarter of the sequences passes all layers, while three other quarters do."""
    one, four = (ideal(replica("llama-2-7b", "h100", pipeline_parallel=n)) for n in (1, 4))
    hop = 16 * 4096 * 2 / 450e9 + 18e-6
    found = four.decode_seconds(64, 64_000)
    assert found == pytest.approx(one.decode_seconds(16, 16_000) + 3 * hop)
    assert seconds(four.explain(plan(decodes=64, context=64_000)), "bubbles") == 0.0


@pytest.mark.parametrize("stages", [2, 4, 8])
def test_a_prompt_fills_and_empties_the_pipeline(stages: int) -> None:
    """p + m - 1 turns of a stage, of which m are work; m is p here."""
    cost = ideal(replica("llama-2-7b", "h100", pipeline_parallel=stages))
    told = cost.explain(plan(4096))
    assert seconds(told, "bubbles") / told.seconds == pytest.approx((stages - 1) / (2 * stages - 1))
    model = cost.replica.model
    flop = 4096 * model.flop_per_token + model.flop_per_sample
    flop += model.prefill_pair_flop * 4096 * 4097 / 2
    hops = (stages - 1) * (4096 / stages * 4096 * 2 / 450e9 + 18e-6)
    turn = (flop / stages / cost.replica.hardware.flop_rate + hops) / stages
    assert told.seconds == pytest.approx((2 * stages - 1) * turn)


def test_the_slowest_stage_sets_the_pace() -> None:
    """32 layers in stages of 11, 11 and 10: three micro-batches pass one of 11 in turn."""
    three = ideal(replica("llama-2-7b", "h100", pipeline_parallel=3))
    told = three.explain(plan(decodes=96, context=9600))
    passing = told.seconds / (3 * 11 / 32)
    assert seconds(told, "bubbles") == pytest.approx(passing / 32)


def test_hops_between_nodes_take_the_network() -> None:
    inside = replica("llama-2-70b", "h100", tensor_parallel=4, pipeline_parallel=2)
    beyond = replica("llama-2-70b", "h100", tensor_parallel=4, pipeline_parallel=5)
    alone = replica("llama-2-70b", "h100", tensor_parallel=8, pipeline_parallel=4)
    assert [where.hops for where in (inside, beyond, alone)] == [(1, 0), (2, 2), (0, 3)]
    assert [where.spans_nodes for where in (inside, beyond, alone)] == [False, True, True]
    told = ideal(beyond).explain(plan(decodes=5, context=500))
    each = 8192 * 2 / 4  # bytes that each of four GPUs sends of a token
    assert seconds(told, "to the next stage") == pytest.approx(2 * (each / 450e9 + 18e-6))
    outside = seconds(told, "to the next stage between nodes")
    assert outside == pytest.approx(2 * (each / 50e9 + 14e-6))


def test_launches_and_the_host_are_counted_once_for_each_round() -> None:
    stack = Stack(launch_us=200.0, layer_us=0.0, host_step_ms=2.0, host_request_us=0.0)
    cost = Roofline(replica("tiny", "h100", pipeline_parallel=2), stack=stack)
    launching = cost.replica.model.layers * 200e-6
    for step, rounds in ((plan(decodes=2, context=20), 1.0), (plan(16), 1.5)):
        assert cost.step_seconds(step) == pytest.approx(rounds * launching + 2e-3)
        step.ahead = True
        assert cost.step_seconds(step) == pytest.approx(rounds * launching + 2e-3)


# What holds for any


COSTS = {
    "4 stages of 2": Roofline(LLAMA_70B),
    "uneven": Roofline(replica("llama-2-7b", "h100", pipeline_parallel=3)),
    "launched": Roofline(
        replica("llama-2-7b", "h100", pipeline_parallel=2), stack=Stack(launch_us=200.0)
    ),
    "experts": Roofline(replica("mixtral-8x7b", "h100", pipeline_parallel=2, expert_parallel=4)),
    "experts, shared": Roofline(
        replica("mixtral-8x7b", "h100", tensor_parallel=2, expert_parallel=2)
    ),
    "deepseek": Roofline(replica("deepseek-v3", "h200", expert_parallel=8), expert_skew=1.5),
    "two nodes": Roofline(
        replica("deepseek-v3", "h200", tensor_parallel=2, pipeline_parallel=2, expert_parallel=16)
    ),
    "distserve": shipped("cost", "distserve-opt-13b-tp1")(
        replica=replica("opt-13b", "a100-80gb", pipeline_parallel=4)
    ),
}
STEPS = [
    plan(decodes=1, context=9),
    plan(decodes=3, context=900),
    plan(decodes=200, context=200_000),
    plan(1),
    plan(1000),
    plan((512, 300), 7, decodes=40, context=20_000),
]


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("cost", COSTS.values(), ids=COSTS)
def test_the_parts_of_a_step_add_up(cost: CostModel, ahead: bool) -> None:
    for step in STEPS:
        step.ahead = ahead
        assert cost.explain(step).seconds == pytest.approx(cost.step_seconds(step), rel=1e-9)
        step.ahead = False


@pytest.mark.parametrize("cost", COSTS.values(), ids=COSTS)
def test_answers_agree(cost: CostModel) -> None:
    for step in STEPS[:3]:
        found = cost.decode_seconds(step.decode_count, step.decode_context)
        assert found == cost.step_seconds(step)
    assert cost.recompute_seconds(1000) == pytest.approx(cost.step_seconds(plan(1000)))
    assert cost.recompute_seconds(0) == 0.0


@pytest.mark.parametrize("cost", COSTS.values(), ids=COSTS)
def test_more_work_never_takes_less_time(cost: CostModel) -> None:
    def grow(steps: list[StepPlan]) -> None:
        found = [cost.step_seconds(step) for step in steps]
        assert found == sorted(found)

    sizes = (1, 2, 3, 4, 5, 7, 8, 9, 16, 63, 64, 65, 200, 201)
    grow([plan(decodes=n, context=100 * n) for n in sizes])
    grow([plan(n) for n in sizes])
    grow([plan(500, decodes=n, context=100 * n) for n in (0, *sizes)])
    grow([plan(*([100] * n)) for n in range(1, 20)])
    grow([plan(decodes=64, context=6400), plan(1, decodes=64, context=6400)])


@pytest.mark.parametrize("cost", COSTS.values(), ids=COSTS)
def test_products_add_up_to_the_work_of_a_step(cost: CostModel) -> None:
    where: Replica = cost.replica  # type: ignore[attr-defined]
    for step in STEPS:
        work = step_work(where, step)
        found = products(where, step)
        assert sum(one.flop for one in found) == pytest.approx(work.flop, rel=1e-12)
        assert sum(one.bytes for one in found) == pytest.approx(work.bytes, rel=1e-12)


@pytest.mark.parametrize("cost", COSTS.values(), ids=COSTS)
def test_a_run_in_quiet_steps_is_the_run_step_by_step(cost: CostModel) -> None:
    tables = []
    for fast_forward in (False, True):
        scheduler = make_scheduler(
            memory=make_memory(blocks=64, block_size=4), max_seqs=8, max_model_len=64
        )
        recorder = Recorder()
        jobs = Jobs([(0.1 * i, 5 + 7 * i % 23, 3 + 5 * i % 19) for i in range(30)])
        simulate(scheduler, jobs, cost, recorder, fast_forward=fast_forward)
        tables.append(recorder.steps_table())
        where: Replica = cost.replica  # type: ignore[attr-defined]
        assert total_work(where, tables[-1]).flop > 0
    assert tables[0] == tables[1]


def test_the_work_of_recorded_steps_counts_every_reading_of_the_weights() -> None:
    recorder = Recorder()
    scheduler = make_scheduler(memory=make_memory(blocks=64, block_size=16), max_model_len=128)
    simulate(scheduler, Jobs([(0.0, 50, 3)]), Roofline(LLAMA_70B), recorder)
    total = total_work(LLAMA_70B, recorder.steps_table())
    # A prompt of four micro-batches, then two decodes of one each; 8 GPUs have the weights.
    read = LLAMA_70B.model.read_bytes(1) * (4 + 1 + 1) / 8
    kept = (51 + 52) * LLAMA_70B.model.kv_bytes_per_token / 8
    assert total.bytes == pytest.approx(read + kept)


# DistServe's fits


def test_a_published_fit_is_dealt_to_stages_as_in_its_authors_simulator() -> None:
    """A stage takes its part of a + b Σcontext + c batch, of a quarter of the batch."""
    made = shipped("cost", "distserve-opt-13b-tp1")
    four = made(replica=replica("opt-13b", "a100-80gb", pipeline_parallel=4))
    quarter = 23.48 + 10_000 * 5.93e-4 + 20 * 0.0607
    assert 1e3 * four.decode_seconds(80, 40_000) == pytest.approx(quarter)
    lone = 23.48 + 500 * 5.93e-4 + 0.0607
    assert 1e3 * four.decode_seconds(1, 500) == pytest.approx(lone)
    large = 20.21 + 25_000 * 4.91e-4 + 100 * 0.120  # from 95 in a micro-batch on
    assert 1e3 * four.decode_seconds(400, 100_000) == pytest.approx(large)
    assert any("each stage is taken to need its part" in line for line in four.notices)


# What is refused


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"pipeline_parallel": 0}, "pipeline_parallel=0: must be a whole number of at least 1"),
        ({"pipeline_parallel": 33}, "pipeline_parallel=33: must be at most 32, the layers of "),
        ({"tensor_parallel": 16}, "tensor_parallel=16: must be at most gpus_per_node=8"),
        ({"pipeline_parallel": 16}, "hardware.network_gb_s=null: hardware=a10 needs it"),
    ],
)
def test_impossible_pipelines_are_refused(settings: dict[str, int], line: str) -> None:
    with pytest.raises(ConfigError, match=f"^{line}"):
        replica("llama-2-7b", "a10", **settings)


def test_what_does_not_fit_names_the_whole_split() -> None:
    with pytest.raises(ConfigError, match="tensor_parallel=1, pipeline_parallel=2: a GPU would"):
        capacity(replica("llama-2-70b", "a10", pipeline_parallel=2))
