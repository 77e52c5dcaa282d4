"""Ranks live as long as their engine, and a failed rank is named in the error."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from pagedsim.core import ConfigError, SamplingParams
from pagedsim.engine.engine import LLMEngine
from pagedsim.engine.engine_args import Arguments
from pagedsim.engine.llm import LLM
from pagedsim.engine.models import LoadedModel
from pagedsim.engine.parallel import ranks as ranks_module
from pagedsim.engine.parallel.ranks import RankError
from pagedsim.engine.runtime import uninterrupted
from pagedsim.run.serving import ModelCache
from tests.engine.models.architectures import SHAPE

GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
SMALL: dict[str, Any] = {
    "device": "cpu",
    "tensor_parallel": 2,
    "blocks": 8,
    "max_model_len": 32,
}


def pids(model: LoadedModel) -> list[int]:
    assert model.ranks is not None
    return [member.process.pid for member in model.ranks._news.members]


def there(pid: int) -> bool:
    """Whether it runs; an ended but unreaped one does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.slow
def test_a_rank_that_fails_is_named_and_a_study_goes_on_with_others() -> None:
    keeper, arguments = ModelCache(), Arguments.of(model=LlamaConfig(**SHAPE), **SMALL)
    for what, line in ((killed, "rank 1 of 2 died of SIGKILL"), (failing, "rank 1: AssertionErr")):
        kept = keeper.model(arguments)
        engine = LLMEngine(Arguments.of(model=kept, **SMALL))
        served(engine)
        engine.close()
        assert there(pids(kept)[0])  # for the next engine
        assert keeper.model(arguments) is kept
        engine = LLMEngine(Arguments.of(model=kept, **SMALL))
        what(kept)
        for _ in range(2):
            with pytest.raises(RankError) as caught:
                served(engine)
            assert str(caught.value).startswith(line) and "\n" not in str(caught.value)
            assert not engine.has_unfinished_requests()
        engine.close()
        assert not there(pids(kept)[0])


def served(engine: LLMEngine) -> None:
    engine.add_request("a", [1, 2, 3], GREEDY)
    while engine.has_unfinished_requests():
        engine.step()


def killed(model: LoadedModel) -> None:
    os.kill(pids(model)[0], signal.SIGKILL)


def failing(model: LoadedModel) -> None:
    assert model.ranks is not None
    with model.ranks.together("drop"):  # it has nothing to run any more
        pass
    model.ranks.replies()


@pytest.mark.slow
def test_a_step_that_fails_here_ends_them() -> None:
    engine = LLMEngine(model="tiny", **SMALL)
    (pid,) = pids(engine.model)
    engine.runner.mover = None  # type: ignore[assignment]
    engine.add_request("a", [1, 2, 3], GREEDY)
    with pytest.raises(RankError, match="rank 0: AttributeError: "):
        engine.step()
    assert not there(pid)


@pytest.mark.slow
def test_they_end_with_the_engine() -> None:
    llm = LLM("tiny", device="cpu", tensor_parallel_size=2, num_gpu_blocks=8, max_model_len=32)
    (pid,) = pids(llm.engine.model)
    assert there(pid)
    del llm
    gc.collect()
    assert not there(pid)


SCRIPT = """
import os, signal, torch
from pagedsim.engine.llm import LLM
from pagedsim.engine.models import LoadedModel

torch.set_num_threads(1)
llm = LLM("tiny", device="cpu", tensor_parallel_size=2, num_gpu_blocks=8, max_model_len=32)
print(*(member.process.pid for member in llm.engine.model.ranks._news.members), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
"""As a user writes it: nothing keeps it from being run again by what it starts."""


def test_they_end_with_the_process(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ran = subprocess.run(
        [sys.executable, script], env=env, capture_output=True, text=True, timeout=120
    )
    assert ran.returncode == -signal.SIGKILL, ran.stderr
    (pid,) = map(int, ran.stdout.split())
    until = time.monotonic() + 30
    while there(pid) and time.monotonic() < until:
        time.sleep(0.05)
    assert not there(pid)


def test_processes_that_do_not_come_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks_module, "BOOT", "import sys; sys.exit(7)")
    threads = torch.get_num_threads()
    with pytest.raises(RankError, match=r"^rank [123] of 4 ended with exit code 7$"):
        LLMEngine(model="tiny", **{**SMALL, "tensor_parallel": 4})
    assert torch.get_num_threads() == threads


def test_a_ctrl_c_waits_for_the_end_of_a_step() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), uninterrupted():
        signal.raise_signal(signal.SIGINT)
        done.append(True)
    assert done
    with uninterrupted():
        pass
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"tensor_parallel": 0}, "tensor_parallel=0: must be a whole number of at least 1"),
        ({"tensor_parallel": "2"}, "tensor_parallel='2': must be a whole number of at least 1"),
        ({"pipeline_parallel": 2}, "pipeline_parallel=2: must be 1; "
         "the engine has tensor_parallel alone"),
        ({"expert_parallel": 2}, "expert_parallel=2: must be 1; "
         "the engine has tensor_parallel alone"),
        ({"tensor_parallel": 3}, "tensor_parallel=3: model=tiny with 8 heads and 4 "
         "key-value heads cannot be split so; choose from 1, 2, 4, 8"),
        ({"model_impl": "transformers"}, "tensor_parallel=2: model_impl=transformers: only "
         "the native decoder is split"),
        ({"device": "cuda"}, "tensor_parallel=2: torch finds 1 of the GPUs that it needs"),
        ({"model": "./nowhere"}, "model=./nowhere: no such folder"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_one_line(
    settings: dict[str, Any], line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if settings.get("device") == "cuda":
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(subprocess, "Popen", None)  # no process is started for it
    with pytest.raises(ConfigError) as caught:
        LLMEngine(**{"model": "tiny", **SMALL, **settings})
    assert str(caught.value) == line
