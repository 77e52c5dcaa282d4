"""Tables of measured steps: how they are read, and that their rows' steps are the scheduler's."""

from __future__ import annotations

import csv
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from pagedsim.core import ConfigError, Request, Scheduler, StepPlan
from pagedsim.experiments.fidelity.truth_data import ALONE, DATA, tables
from pagedsim.experiments.regenerate import RESULTS
from pagedsim.fidelity.sheets import hardware_named, model_named, stack_named
from pagedsim.fidelity.step_tables.schedule import (
    PREEMPTS,
    TOO_LARGE,
    RowRequests,
    scheduled,
    server_for,
)
from pagedsim.fidelity.step_tables.tables import SHAPELESS, Cell, read_table
from pagedsim.fidelity.step_tables.times import Constants, Points
from pagedsim.metrics.files import RESULT, read_json
from pagedsim.sim.capacity import sized
from pagedsim.sim.cost import Roofline
from pagedsim.sim.replica import Replica
from pagedsim.sim.simulate import simulate
from pagedsim.sim.stack import Stack
from tests.experiments.fidelity import silicon
from tests.sim.shapes import PUBLISHED, parameters, plan

EVERY = sorted(DATA.glob("*.csv"))
SPLITWISE = "model,gpu,tensor_parallel,prompt_tokens,batch,output_tokens,prompt_ms,token_ms"
BATCH = "gpu,gpus,model,tokens_in_and_out,batch,latency_s"
LOOP = (
    "model,gpu,precision,input_tokens,output_tokens,concurrency,tensor_parallel,ttft_ms,tpot_ms,"
    "server,shortest,rounds,warmup,unique_prompts,max_seqs,max_batched_tokens,kv_cache_dtype"
)
VLLM = "vllm-0.12,0.8,10,,,,,"
"""The protocol of a row: lengths from 0.8 of the nominal, ten rounds, all else as it starts."""


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
    assert {path.stem for path in EVERY} == set(names) - {*ALONE, "distserve"}


def test_a_row_of_each_layout(tmp_path: Path) -> None:
    steps = cell(SPLITWISE, "llama2-70b,h100-80gb,4,512,8,128,100,30", tmp_path)
    assert steps.model == model_named("llama-2-70b") and steps.hardware == hardware_named("h100")
    assert (steps.way, steps.tensor_parallel, steps.stack) == ("steps", 4, "vllm-0.2")
    assert (steps.prompt, steps.at_once, steps.output) == (512, 8, 128)
    assert steps.measured == {"prompt": 0.1, "token": 0.03}

    batch = cell(BATCH, "Nvidia A100 GPU,2,meta-llama/Meta-Llama-3-8B,256,16,2.5", tmp_path)
    assert batch.hardware.name == "a100-40gb" and batch.stack == "vllm-0.6"
    assert (batch.way, batch.prompt, batch.output, batch.at_once) == ("batch", 256, 256, 16)
    assert batch.measured == {"latency": 2.5}
    other = read_table(written(tmp_path, BATCH, "l40s,1,qwen3-8b,128,4,1.5"), "vllm-0.33").cells[0]
    assert (other.hardware.name, other.stack) == ("l40s", "vllm-0.33")

    words = "sglang-0.5 batching.mixed_chunk=true,1,20,2,100,64,8192,fp8"
    row = f"meta-llama/Llama-3.1-70B,b200_sxm,fp8,1024,8192,64,2,120,11,{words}"
    loop = cell(LOOP, row, tmp_path)
    assert (loop.model.products, loop.model.dtype_bytes) == ("fp8", 1.0)
    assert (loop.way, loop.prompt, loop.output, loop.at_once) == ("loop", 1024, 8192, 64)
    assert loop.measured == {"ttft": 0.12, "tpot": 0.011, "e2e": 0.12 + 8191 * 0.011}
    assert loop.stack == "sglang-0.5" and loop.replica.kv_cache_dtype == "fp8"
    protocol = loop.protocol
    assert protocol is not None
    assert protocol.server == ("server=sglang-0.5", "batching.mixed_chunk=true")
    assert (protocol.shortest, protocol.rounds, protocol.warmup) == (1.0, 20, 2)
    assert (protocol.unique_prompts, protocol.max_seqs) == (100, 64)
    server = server_for(loop)
    assert (server.max_seqs, server.max_batched_tokens) == (64, 8192)
    four = cell(LOOP, f"qwen3-32b,b200,fp4,9,9,1,1,5,5,{VLLM}", tmp_path).model
    assert (four.products, four.dtype_bytes) == ("fp4", 9 / 16)  # a scale to each 16 numbers


@pytest.mark.parametrize(
    ("model", "gpu", "ours"),
    [
        ("meta-llama/Llama-3.1-405B-Instruct-FP8", "H100", ("llama-3.1-405b", "h100")),
        ("amd/Llama-3.1-405B-Instruct-FP8-KV", "AMD Instinct MI300X", ("llama-3.1-405b", "mi300x")),
        ("RedHatAI/Meta-Llama-3.1-405B-FP8-dynamic", "MI300X", ("llama-3.1-405b", "mi300x")),
        ("meta-llama/Llama-3.3-70B-Instruct", "NVIDIA H200", ("llama-3.1-70b", "h200")),
    ],
)
def test_names_of_checkpoints_and_gpus(
    model: str, gpu: str, ours: tuple[str, str], tmp_path: Path
) -> None:
    row = cell(LOOP, f"{model},{gpu},fp8,1024,256,16,8,1,1,{VLLM}", tmp_path)
    assert (row.model.name, row.hardware.name, row.model.products) == (*ours, "fp8")


def test_the_stack_of_amd_is_of_tables_that_name_no_server(tmp_path: Path) -> None:
    batch = cell(BATCH, "AMD MI300X GPU,8,llama-2-70b,128,4,1.5", tmp_path)
    assert batch.stack == "vllm-0.6-rocm"
    named = "llama-3.1-405b,mi300x,FP8,1024,256,16,8,1,1,vllm-0.6{},1,1,,,,,"
    assert cell(LOOP, named.format(""), tmp_path).stack == "vllm-0.6"  # as of any command
    assert cell(LOOP, named.format(" stack=vllm-0.6-rocm"), tmp_path).stack == "vllm-0.6-rocm"


def test_a_model_by_its_config(tmp_path: Path) -> None:
    """Of a family that conf/ has no model of; as fp8 by the table."""
    count, config = PUBLISHED["granite-3.1-8b"]
    (tmp_path / "granite").mkdir()
    (tmp_path / "granite" / "config.json").write_text(json.dumps(config))
    row = f"{tmp_path / 'granite'},h100,fp8,512,64,8,1,1,1,{VLLM}"
    shape = cell(LOOP, row, tmp_path).model
    assert parameters(shape) == pytest.approx(count, rel=0.003)
    assert (shape.products, shape.dtype_bytes) == ("fp8", 1.0)
    (tmp_path / "granite" / "config.json").write_text("{}")
    with pytest.raises(
        ConfigError, match=r":2: model=.*granite: .*config\.json: has no model_type"
    ):
        cell(LOOP, row, tmp_path)


def test_a_loop_by_the_time_of_all_of_it(tmp_path: Path) -> None:
    """As of `vllm bench latency`: a batch whose prompts and answers differ in length."""
    head = LOOP.replace("ttft_ms,tpot_ms", "latency_s")
    row = cell(head, "qwen3-32b,h100,fp8,2048,128,8,1,5.5,vllm-0.12,1,1,,,,,", tmp_path)
    assert (row.prompt, row.output, row.at_once) == (2048, 128, 8)
    assert row.measured == {"latency": 5.5}
    schedule = scheduled(row)
    # 16,384 tokens of prompts in steps of 8,192, and 127 tokens after the first of each answer.
    steps = schedule.totals[:, -1] * schedule.weights["latency"]
    assert schedule.weights["latency"].sum() == pytest.approx(2 + 127, abs=2)
    assert steps.sum() == pytest.approx(schedule.weights["latency"].sum())


def test_a_row_without_a_server_has_that_of_the_command(tmp_path: Path) -> None:
    path = written(tmp_path, LOOP, "qwen3-32b,h100,,512,64,8,4,1,1,,1,2,,,,,")
    words = ["server=vllm-0.33", "memory=paged", "server.max_seqs=7"]
    (row,) = read_table(path, server=words).cells
    assert row.stack == "vllm-0.33"
    server = server_for(row)
    assert (server.memory, server.max_seqs, server.async_scheduling) == ("paged", 7, True)


def test_a_quarter_of_the_servers_is_held_out() -> None:
    """By the hash alone: whole servers, of each backend some; and all of experts."""
    (table,) = (table for table in tables(None, None) if table.name == "servers")
    held: dict[tuple[str, ...], set[bool]] = {}
    rows = csv.DictReader((DATA / "servers.csv").open(encoding="utf-8"))
    for cell, row in zip(table.cells, rows, strict=True):
        if cell.model.moe:
            assert cell.held_out
            continue
        server = tuple(row[key] for key in ("model", "gpu", "backend", "version"))
        held.setdefault(server, set()).add(cell.held_out)
    assert sum(cell.model.moe is not None for cell in table.cells) == 110
    assert all(len(states) == 1 for states in held.values())
    assert {server[2] for server, states in held.items() if states == {True}} == {
        *("vllm", "sglang", "trtllm")
    }


def test_samples_get_the_protocol_of_their_source(tmp_path: Path) -> None:
    given = {
        **{"id": "a", "backend": "vllm", "backend_version": "", "precision": "fp8"},
        **{"model_path": "meta-llama/Llama-3.1-70B", "system": "h100_sxm", "mode": "agg"},
        **{"isl": "1024", "osl": "1024", "batch_size": "16", "tp_size": "4"},
        **{"silicon_ttft_ms": "1", "silicon_tpot_ms": "2"},
        "silicon_data_source": "source_file=2026-04-06.csv; measured=2025-10-29T00:00:00.000Z",
    }
    grid = given | {
        **{"id": "b", "backend": "trtllm", "model_path": "Qwen/Qwen3-32B"},
        "silicon_data_source": "source_file=aic-auto-gap-analysis/data/x.csv",
    }
    alone = {"tp_size": "4", "moe_tp_size": "4", "moe_ep_size": "1"}
    deepseek = given | {
        **{"id": "e", "model_path": "deepseek-ai/DeepSeek-V3", "isl": "8192", **alone},
        **{"system": "b200_sxm", "backend": "trtllm", "backend_version": "1.2.0rc6.post2"},
        "silicon_data_source": "db-dump/2026-04-27; measured=2026-01-29T00:00:00.000Z",
    }
    others = [given | {"id": "c", "mode": "disagg"}, given | {"id": "d", "precision": "int4"}]
    others += [deepseek | {"moe_ep_size": "4"}, deepseek | {"backend_version": ""}]
    others += [deepseek | {"silicon_data_source": "source_file=2026-04-06.csv"}]
    path = tmp_path / "samples.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(deepseek), restval="")
        writer.writeheader()
        writer.writerows([given, grid, *others, deepseek])
    reasons = Counter[str]()
    first, second, third = silicon.rows(path, reasons)
    assert sorted(reasons.values()) == [1] * len(others)
    assert third["server"] == "trtllm-1 memory.gpu_memory_utilization=0.75"  # 0.8 but for these
    assert (third["max_batched_tokens"], third["kv_cache_dtype"]) == (8320, "fp8")
    assert (first["id"], first["measured"], first["shortest"]) == ("a", "2025-10-29", 0.8)
    assert (first["max_seqs"], first["max_batched_tokens"]) == ("16", 8192)
    assert "memory=paged" in str(first["server"]) and first["kv_cache_dtype"] == "fp8"
    assert (second["id"], second["shortest"], second["rounds"]) == ("b", 1, 20)
    assert second["max_batched_tokens"] == 2560  # 16 + 1,024 + 1,500, in blocks of 32


@pytest.mark.parametrize(
    ("head", "row", "says"),
    [
        (
            BATCH,
            "T800,1,llama-2-7b,128,4,1.5",
            ":2: gpu=T800: unknown; choose from AMD Instinct MI",
        ),
        (BATCH, "h100,1,../cost/fitted,128,4,1", ":2: model=../cost/fitted: unknown; choose from "),
        (BATCH, "h100,3,llama-2-7b,128,4,1.5", ":2: tensor_parallel=3: model=llama-2-7b with 32"),
        (BATCH, "h100,1,llama-2-7b,many,4,1.5", ":2: tokens_in_and_out=many: must be a whole numb"),
        (BATCH, "h100,1,llama-2-7b,128,4,nan", ":2: latency_s=nan: must be a time above 0"),
        (BATCH, "h100,1,llama-2-7b,128", ":2: batch=: must be a whole number from 1"),
        (LOOP, f"qwen3-32b,h100,fp6,9,9,1,1,5,5,{VLLM}", ":2: precision=fp6: must be empty or one"),
        (LOOP, f"q/Qwen3-32B-FP8,h100,,9,9,1,1,5,5,{VLLM}", ":2: precision=: must be fp8, as mod"),
        (LOOP, f"qwen3-32b,h100,,9,2,1,1,5,5,{VLLM}", ":2: output_tokens=2: must be a whole numb"),
        (
            LOOP,
            "qwen3-32b,h100,,9,9,1,1,5,5,,1,1,,,,,",
            ":2: server=: must be an option of conf/se",
        ),
        (
            LOOP,
            "qwen3-32b,h100,,9,9,1,1,5,5,x,1,1,,,,,",
            ":2: server=x: unknown; choose fr",
        ),
        (LOOP, "qwen3-32b,h100,,9,9,1,1,5,5,vllm-0.12,2,1,,,,,", ":2: shortest=2: must be a shar"),
        (LOOP, "qwen3-32b,h100,,9,9,1,1,5,5,vllm-0.12,1,0,,,,,", ":2: rounds=0: must be a whole n"),
        (LOOP, "qwen3-32b,h100,,9,9,1,1,5,5,vllm-0.12,1,1,,,,,q", ":2: kv_cache_dtype=q: must be"),
        (
            ",".join(LOOP.split(",")[:9]),
            "qwen3-32b,h100,,9,9,1,1,5,5",
            ": has no column server, shortest, rounds: a closed loop needs its protocol (server: ",
        ),
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

    def __init__(self, outputs: Sequence[int], unmeasured: int) -> None:
        self.outputs, self.unmeasured = outputs, unmeasured
        self.ttft: list[float] = []
        self.tpot: list[float] = []
        self.end = 0.0

    def step(self, plan: StepPlan, start: float, end: float, scheduler: Scheduler) -> None:
        pass

    def again(self, end: float, used_blocks: int) -> None:
        pass

    def left(self, request: Request) -> None:
        if int(request.id) < self.unmeasured:
            return
        begun, ended = request.first_token_at, request.finished_at
        assert request.arrival is not None and begun is not None and ended is not None
        self.ttft.append(begun - request.arrival)
        self.tpot.append((ended - begun) / (self.outputs[int(request.id)] - 1))
        self.end = max(self.end, ended)


SLOW = Stack(host_step_ms=9.0, host_request_us=700.0, latencies=5.0, server_ms=0.0)
"""Of other step times than those with which a row's steps were planned."""


@pytest.mark.parametrize(
    ("head", "row", "mark"),
    [
        (BATCH, "a100-40gb,1,llama-2-7b,128,16,1", ""),
        (BATCH, "a100-40gb,1,llama-2-7b,1024,64,1", PREEMPTS),
        (BATCH, "a100-40gb,2,mixtral-8x7b,256,8,1", TOO_LARGE),
        (LOOP, f"qwen3-32b,h100,,512,64,8,4,1,1,{VLLM}", ""),
        (LOOP, f"llama-3.1-70b,h100,fp8,4096,256,32,2,1,1,{VLLM}", ""),
        (LOOP, "qwen3-32b,h100,,512,64,8,4,1,1,vllm-0.12 memory=prefix,1,4,1,3,8,1024,", ""),
        (LOOP, "qwen3-32b,h100,,512,64,8,4,1,1,sglang-0.5,1,4,2,,,,", ""),
        (LOOP, "qwen3-32b,h100,,512,64,8,4,1,1,trtllm-1,0.8,4,2,,8,2048,", ""),
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

    server, requests = server_for(one), RowRequests.of(one).workload
    if mark == TOO_LARGE:
        server = replace(server, blocks=1 << 16)
    else:
        replica = replace(one.replica, block_size=server.block_size)
        server = sized(server, replica, **RowRequests.of(one).pool)
    latencies = Seen(requests.output_len.tolist(), RowRequests.of(one).unmeasured)
    simulate(server.scheduler(), requests, cost, latencies)
    if one.way == "batch":
        assert predicted == pytest.approx([latencies.end], rel=1e-3)
    else:
        ttft, tpot = (sum(of) / len(of) for of in (latencies.ttft, latencies.tpot))
        means = [ttft, tpot, ttft + (one.output - 1) * tpot]
        assert predicted == pytest.approx(means, rel=0.005)


# -- constants -------------------------------------------------------------------------------------


def test_constants_that_stand_are_those_of_a_simulation() -> None:
    standing = Constants.standing()
    for gpu, stack in (("a100-80gb", "vllm-0.2"), ("h100", "vllm-0.33"), ("mi300x", "vllm-0.6")):
        replica = Replica(model_named("llama-2-70b"), hardware_named(gpu), 8)
        ours, plain = standing.cost_of(replica, stack), Roofline(replica, stack=stack_named(stack))
        step = plan(700, 200, decodes=20, context=9000)
        assert ours.step_seconds(step) == plain.step_seconds(step)
    changed = standing.but({"vllm-0.6.latencies": 7.0, "vllm-0.2.host_step_ms": 3.0})
    assert (changed["vllm-0.6.latencies"], changed["vllm-0.2.host_step_ms"]) == (7.0, 3.0)
    assert changed["vllm-0.33.latencies"] == standing["vllm-0.33.latencies"]
