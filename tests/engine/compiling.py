"""What an engine has compiled when it begins to serve, and what it would compile as it serves.

A program of its own (`test_warm_up.py` runs it), for a GPU that is not there: kernels are called
as they would be, and where Triton would compile one, its name and its key are noted down instead.

    python -m tests.engine.compiling SETTINGS    # a JSON object
"""

from __future__ import annotations

import json
import random
import sys
from types import SimpleNamespace
from typing import Any

import torch
from triton.runtime.jit import JITFunction

from pagedsim.core import SamplingParams
from pagedsim.engine import profile
from pagedsim.engine.engine import LLMEngine
from pagedsim.engine.models import load_model
from pagedsim.experiments.benchmarks.fake_gpu import use_target
from pagedsim.kernels import ops
from tests.engine.architectures import CONFIGS

LONGEST = 300
"""Tokens of a prompt: more than fill any tile."""
SEQS = 72
"""More than the sequences for which products are kernels of our own."""


def main() -> None:
    """Print what was compiled, when."""
    settings = json.loads(sys.argv[1])
    torch.manual_seed(0)
    torch.set_num_threads(1)
    config: Any = CONFIGS[settings.pop("model")]()
    config.max_position_embeddings = 512
    model = load_model(
        config, device="cpu", dtype="bfloat16", model_impl=settings.pop("model_impl", "auto")
    )  # tried out in plain torch, since nothing is right from here on
    use_target(90)
    setattr(ops, "on_gpu", lambda tensor: True)  # noqa: B010
    setattr(profile, "on_gpu", ops.on_gpu)  # noqa: B010
    compiled: list[str] = []
    note_down(compiled)
    engine = LLMEngine(
        model=model, device="cpu", max_seqs=SEQS, max_model_len=LONGEST + 40, blocks=4000,
        block_size=4, max_batched_tokens=LONGEST + 40, memory="prefix", **settings,
    )  # fmt: skip
    before = len(compiled)
    serve(engine)
    print(json.dumps({"before": sorted(set(compiled[:before])), "serving": compiled[before:]}))


def note_down(compiled: list[str]) -> None:
    """Have nothing compiled and nothing launched; what kernels were to write is 0."""
    for where, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        setattr(where, name, getattr(where, name.replace("empty", "zeros")))
    kernel = SimpleNamespace(
        launch_metadata=lambda *rest: None,
        run=lambda *rest: None,
        function=None,
        packed_metadata=None,
    )

    def compiles(self: Any, key: Any, *rest: Any, **more: Any) -> Any:
        compiled.append(f"{self.__name__} {key}")
        device = next(iter(self.device_caches))
        self.device_caches[device][0][key] = kernel
        return kernel

    setattr(JITFunction, "_do_compile", compiles)  # noqa: B010


def serve(engine: LLMEngine) -> None:
    """Prompts of all lengths by themselves, then batches of every size in order of arrival."""
    rng = random.Random(0)
    for length in (*range(1, 36), *range(36, LONGEST + 1, 11)):
        ask(engine, f"{length} alone", rng, length, SamplingParams(temperature=0, max_tokens=2))
        while engine.has_unfinished_requests():
            engine.step()
    number = 0
    for turn in range(100):
        for _ in range(rng.choice((0, 0, 1, 2, SEQS))):
            ask(engine, number, rng, rng.randint(1, rng.choice((9, 60, LONGEST))), drawn(rng))
            number += 1
        engine.step()
        if turn % 25 == 24:
            while engine.has_unfinished_requests():
                engine.step()


def ask(engine: LLMEngine, name: Any, rng: random.Random, length: int, params: Any) -> None:
    """A random prompt; the one before it may be its beginning."""
    engine.add_request(name, [rng.randrange(3, 90) for _ in range(length)], params)


def drawn(rng: random.Random) -> SamplingParams:
    """Settings of any kind."""
    return SamplingParams(
        temperature=rng.choice((0.0, 0.7, 1.0)),
        top_p=rng.choice((1.0, 0.9)),
        top_k=rng.choice((-1, 5, 60)),
        min_p=rng.choice((0.0, 0.1)),
        n=rng.choice((1, 1, 2)),
        presence_penalty=rng.choice((0.0, 0.5)),
        logprobs=rng.choice((None, 2)),
        max_tokens=rng.randint(1, 24),
    )


if __name__ == "__main__":
    main()
