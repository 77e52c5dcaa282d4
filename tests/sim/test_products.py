"""The products of a step: by hand, and as much in all as the step's work."""

from dataclasses import replace

import pytest

from pagedsim.core import StepPlan
from pagedsim.sim.cost.base import step
from pagedsim.sim.cost.work import step_work
from pagedsim.sim.model import mlp_matrices
from pagedsim.sim.products import Product, products
from pagedsim.sim.replica import Replica
from tests.sim.shapes import MODELS, hardware, model, plan, replica


def by_name(where: Replica, plan: StepPlan) -> dict[str, Product]:
    return {one.name: one for one in products(where, plan)}


@pytest.mark.parametrize(
    ("name", "gpus"),
    [(name, n) for name in MODELS for n in (1, 8) if n == 1 or not model(name).kv_heads % n],
)
def test_they_add_up_to_the_work_of_the_step(name: str, gpus: int) -> None:
    where = replica(name, "h200", tensor_parallel=gpus)
    for one in (
        plan(1000),
        plan(decodes=32, context=64_000),
        plan((500, 100), 40, decodes=3, context=100),
    ):
        found, work = products(where, one), step_work(where, one)
        assert sum(product.flop for product in found) == pytest.approx(work.flop, rel=1e-12)
        assert sum(product.bytes for product in found) == pytest.approx(work.bytes, rel=1e-12)
    assert products(where, plan()) == []


def test_a_decode_of_llama_2_7b_product_by_product() -> None:
    """2 M K N FLOP each, and the weights once: 4096 × 12288, 4096 × 4096, and the MLP."""
    found = by_name(replica("llama-2-7b", "a10"), step(decodes=16, context=16 * 1000))
    shapes = {name: (one.rows, one.inputs, one.outputs, one.times) for name, one in found.items()}
    assert shapes == {
        "QKV": (16, 4096, 3 * 4096, 32),
        "output": (16, 4096, 4096, 32),
        "up": (16, 4096, 2 * 11008, 32),
        "down": (16, 11008, 4096, 32),
        "LM head": (16, 4096, 32000, 1),
        "scores": (1, 128, 1000, 32 * 32 * 16),
        "values": (1, 1000, 128, 32 * 32 * 16),
    }
    for name, one in found.items():
        assert one.inputs is not None
        assert one.outputs is not None
        assert one.flop == 2 * one.rows * one.inputs * one.outputs * one.times, name
    assert found["QKV"].bytes == 2 * 4096 * 3 * 4096 * 32
    assert found["scores"].bytes + found["values"].bytes == 16 * 1000 * 512 * 1024


def test_heads_that_share_keys_and_values_meet_them_together() -> None:
    found = by_name(replica("llama-3.1-8b", "h100"), step(decodes=2, context=200))
    scores = found["scores"]
    assert (scores.rows, scores.inputs, scores.outputs, scores.times) == (4, 128, 100, 32 * 8 * 2)
    assert scores.flop == 2 * 4 * 128 * 100 * scores.times
    assert found["QKV"].outputs == (32 + 2 * 8) * 128


def test_a_prompt_attends_to_half_of_the_square_and_reads_nothing_back() -> None:
    found = by_name(replica("llama-2-7b", "a10"), step(350))
    assert found["scores"].flop == 2 * 32 * 32 * 128 * (350 * 351 // 2)
    assert found["scores"].bytes == found["values"].bytes == 0.0
    assert found["LM head"].rows == 1


def test_experts_are_those_that_some_token_chooses() -> None:
    where = replica("mixtral-8x7b", "h200")
    one, many = (by_name(where, step(decodes=n, context=n)) for n in (1, 64))
    assert one["expert up"].times == pytest.approx(32 * 2)
    assert one["expert up"].rows == pytest.approx(1)
    assert many["expert up"].times == pytest.approx(32 * 8, rel=1e-3)
    assert many["expert up"].rows == pytest.approx(64 * 2 / 8, rel=1e-3)
    assert one["router"].outputs == 8


def test_a_compressed_vector_is_read_once_for_keys_and_values() -> None:
    found = by_name(replica("deepseek-v3", "h200", tensor_parallel=8), step(decodes=4, context=400))
    scores, values = found["scores"], found["values"]
    assert (scores.rows, scores.inputs, scores.outputs) == (128, 512 + 64, 100)
    assert (values.rows, values.inputs, values.outputs) == (128, 100, 512)
    assert (scores.bytes, values.bytes) == (400 * 576 * 2 * 61, 0.0)
    assert found["shared up"].times == 58
    assert found["up"].times == 3


def test_weights_that_are_only_a_number_are_one_product() -> None:
    where = Replica(replace(model("llama-2-7b"), params=7e9), hardware("a10"))
    found = by_name(where, step(350))
    assert found["all weights"].flop == 350 * 2 * 7e9
    assert found["all weights"].bytes == 14e9
    assert found["all weights"].inputs is None


def test_up_has_the_gate_where_there_is_one() -> None:
    gated, plain = (mlp_matrices(model(name), 100) for name in ("llama-2-7b", "opt-13b"))
    assert [one.outputs for one in gated] == [200, 4096]
    assert [one.outputs for one in plain] == [100, 5120]
