"""Tables of measured steps: how they are read, and that their rows' steps are the scheduler's."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from pagedsim.core import ConfigError, Request, Scheduler, StepPlan
from pagedsim.experiments.fidelity.truth_data import ALONE, DATA, FITTED, tables
from pagedsim.experiments.regenerate import RESULTS
from pagedsim.fidelity.sheets import hardware_named, model_named, stack_named
from pagedsim.fidelity.step_tables.schedule import (
    PREEMPTS,
    TOO_LARGE,
    RowRequests,
    scheduled,
    server_of,
)
from pagedsim.fidelity.step_tables.tables import SHAPELESS, Cell, read_table
from pagedsim.fidelity.step_tables.times import LINK, Constants, Points
from pagedsim.metrics.files import RESULT, read_json
from pagedsim.sim.capacity import sized
from pagedsim.sim.cost import Roofline
from pagedsim.sim.replica import Replica
from pagedsim.sim.simulate import simulate
from pagedsim.sim.stack import Stack
from tests.sim.shapes import plan

EVERY = sorted(DATA.glob("*.csv"))
SPLITWISE = "model,gpu,tensor_parallel,prompt_tokens,batch,output_tokens,prompt_ms,token_ms"
BATCH = "gpu,gpus,model,tokens_in_and_out,batch,latency_s"
LOOP = "model,gpu,precision,input_tokens,output_tokens,concurrency,tensor_parallel,ttft_ms,tpot_ms"


def written(folder: Path, head: str, *rows: str) -> Path:
    path = folder / "table.csv"
    path.write_text("\n".join([head, *rows]) + "\n")
    return path


def cell(head: str, row: str, folder: Path) -> Cell:
    return read_table(written(folder, head, row)).cells[0]


@pytest.mark.parametrize("path", EVERY, ids=lambda path: path.stem)
def test_every_table_is_read_whole(path: Path) -> None:
    """Those of this folder, whichever there are."""
    with path.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    found = read_table(path)
    assert len(found.cells) + sum(found.left_out.values()) == len(rows)
    assert set(found.left_out) <= set(SHAPELESS)
    assert all(one.measured and min(one.measured.values()) > 0 for one in found.cells)


def test_the_committed_result_is_of_the_tables_that_there_are() -> None:
    """A file in conf/cost is no table by its name alone: some are of engines that are not vLLM."""
    rows = [row for table in tables(None, None) for row in table.cells]
    finding = read_json(RESULTS / "truth" / RESULT)["finding"][0]
    assert finding.startswith(f"{sum(len(row.measured) for row in rows):,} measured numbers are")
    assert not [row.place for row in rows if "own" in row.place]
    names = [table.name for table in tables(None, None)]
    assert {*FITTED, "distserve"} <= set(names)
    assert {path.stem for path in EVERY} == set(names) - {*ALONE, "distserve"}


def test_a_row_of_each_layout(tmp_path: Path) -> None:
    steps = cell(SPLITWISE, "llama2-70b,h100-80gb,4,512,8,128,100,30", tmp_path)
    assert steps.model == model_named("llama-2-70b") and steps.hardware == hardware_named("h100")
    assert (steps.way, steps.tensor_parallel, steps.stack) == ("steps", 4, "vllm-2023")
    assert (steps.prompt, steps.at_once, steps.output) == (512, 8, 128)
    assert steps.measured == {"prompt": 0.1, "token": 0.03}

    batch = cell(BATCH, "Nvidia A100 GPU,2,meta-llama/Meta-Llama-3-8B,256,16,2.5", tmp_path)
    assert batch.hardware.name == "a100-40gb" and batch.stack == "vllm-2024"
    assert (batch.way, batch.prompt, batch.output, batch.at_once) == ("batch", 256, 256, 16)
    assert batch.measured == {"latency": 2.5}
    other = read_table(written(tmp_path, BATCH, "l40s,1,qwen3-8b,128,4,1.5"), "vllm-2026").cells[0]
    assert (other.hardware.name, other.stack) == ("l40s", "vllm-2026")

    loop = cell(LOOP, "Llama-3.1-70B,b200_sxm,fp8,1024,8192,64,2,120,11", tmp_path)
    assert (loop.model.products, loop.model.dtype_bytes) == ("fp8", 1.0)
    assert (loop.way, loop.prompt, loop.output, loop.at_once) == ("loop", 1024, 8192, 64)
    assert loop.measured == {"ttft": 0.12, "tpot": 0.011} and loop.stack == "vllm-2026"


@pytest.mark.parametrize(
    ("head", "row", "says"),
    [
        (BATCH, "T800,1,llama-2-7b,128,4,1.5", ":2: gpu=T800: unknown; choose from AMD MI300X GPU"),
        (BATCH, "h100,1,../cost/fitted,128,4,1", ":2: model=../cost/fitted: unknown; choose from "),
        (BATCH, "h100,3,llama-2-7b,128,4,1.5", ":2: tensor_parallel=3: model=llama-2-7b with 32"),
        (BATCH, "h100,1,llama-2-7b,many,4,1.5", ":2: tokens_in_and_out=many: must be a whole numb"),
        (BATCH, "h100,1,llama-2-7b,128,4,nan", ":2: latency_s=nan: must be a time above 0"),
        (BATCH, "h100,1,llama-2-7b,128", ":2: batch=: must be a whole number from 1"),
        (LOOP, "qwen3-32b,h100,fp6,9,9,1,1,5,5", ":2: precision=fp6: must be empty or one of bf1"),
        (LOOP, "qwen3-32b,h100,,9,2,1,1,5,5", ":2: output_tokens=2: must be a whole number from 3"),
        ("a,b", "1,2", ": has the columns a, b: must have model, gpu, tensor_parallel, prompt_tok"),
    ],
)
def test_a_bad_row_is_named(head: str, row: str, says: str, tmp_path: Path) -> None:
    path = written(tmp_path, head, row)
    with pytest.raises(ConfigError) as error:
        read_table(path)
    assert str(error.value).startswith(f"{path}{says}")


# -- steps -----------------------------------------------------------------------------------------


class Seen:
    """What a simulation says of each request."""

    def __init__(self, outputs: Sequence[int]) -> None:
        self.outputs = outputs
        self.ttft: list[float] = []
        self.tpot: list[float] = []
        self.end = 0.0

    def step(self, plan: StepPlan, start: float, end: float, scheduler: Scheduler) -> None:
        pass

    def again(self, end: float, used_blocks: int) -> None:
        pass

    def left(self, request: Request) -> None:
        begun, ended = request.first_token_at, request.finished_at
        assert request.arrival is not None and begun is not None and ended is not None
        self.ttft.append(begun - request.arrival)
        self.tpot.append((ended - begun) / (self.outputs[int(request.id)] - 1))
        self.end = max(self.end, ended)


SLOW = Stack(host_step_ms=9.0, host_request_us=700.0, layer_us=90.0, server_ms=0.0)
"""Of other step times than those with which a row's steps were planned."""


@pytest.mark.parametrize(
    ("head", "row", "mark"),
    [
        (BATCH, "a100-40gb,1,llama-2-7b,128,16,1", ""),
        (BATCH, "a100-40gb,1,llama-2-7b,1024,64,1", PREEMPTS),
        (BATCH, "a100-40gb,2,mixtral-8x7b,256,8,1", TOO_LARGE),
        (LOOP, "qwen3-32b,h100,,512,64,8,4,1,1", ""),
        (LOOP, "llama-3.1-70b,h100,fp8,4096,256,32,2,1,1", ""),
    ],
)
def test_a_schedule_tells_what_a_simulation_does(
    head: str, row: str, mark: str, tmp_path: Path
) -> None:
    """Steps planned under some times, summed up under others, are those planned under these."""
    one = cell(head, row, tmp_path)
    found = scheduled(one)
    assert found.mark == mark
    cost = Roofline(one.replica, stack=SLOW)
    predicted = Points([(one, found)]).predicted(lambda replica, stack: cost).tolist()

    server, requests = server_of(one), RowRequests.of(one).workload
    if mark == TOO_LARGE:
        server = replace(server, blocks=1 << 16)
    else:
        server = sized(server, one.replica)
    latencies = Seen(requests.output_len.tolist())
    simulate(server.scheduler(), requests, cost, latencies)
    if one.way == "batch":
        assert predicted == pytest.approx([latencies.end], rel=1e-3)
    else:
        means = [sum(of) / len(of) for of in (latencies.ttft, latencies.tpot)]
        assert predicted == pytest.approx(means, rel=1e-3)


# -- constants -------------------------------------------------------------------------------------


def test_constants_that_stand_are_those_of_a_simulation() -> None:
    standing = Constants.standing()
    for gpu, stack in (("a100-80gb", "vllm-2023"), ("h100", "vllm-2026"), ("mi300x", "vllm-2024")):
        replica = Replica(model_named("llama-2-70b"), hardware_named(gpu), 8)
        ours, plain = standing.cost_of(replica, stack), Roofline(replica, stack=stack_named(stack))
        step = plan(700, 200, decodes=20, context=9000)
        assert ours.step_seconds(step) == plain.step_seconds(step)
    changed = standing.but({"hopper.cache": 0.5, "vllm-2024.layer_us": 7.0, LINK: 40.0})
    assert (changed["hopper.cache"], changed["vllm-2024.layer_us"], changed[LINK]) == (0.5, 7, 40)
    assert changed["ampere.cache"] == standing["ampere.cache"]
