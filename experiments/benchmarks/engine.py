"""Tokens per CPU second of the engine against transformers' `generate_batch`, in one run.

    python -m experiments.benchmarks.engine

The tiny model, greedy, the same prompts and lengths, one thread; all are warm, and what they
allocate at their start is not counted. A ratio is of the best of `--repeats` rounds each, which
take turns. The engine runs twice: with its own forward pass, and with that of transformers. What
counts is the processor's time, as long as the wall clock's where nobody else uses the machine.
"""

from __future__ import annotations

import argparse
import logging
import random
import time
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig

from pagedsim.core import SamplingParams
from pagedsim.engine.llm import LLM
from pagedsim.engine.models import load_model

Prompts = list[list[int]]


def main() -> None:
    """Print both rates and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=_Plain)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64, help="generated for each prompt")
    parser.add_argument("--repeats", type=int, default=3)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    rng = random.Random(0)
    prompts = [
        [rng.randrange(3, 250) for _ in range(rng.randint(8, 64))] for _ in range(asked.prompts)
    ]
    llms = [LLM("tiny", device="cpu", model_impl=one) for one in ("native", "transformers")]
    peer = _Peer(asked.tokens)
    rates: list[list[float]] = []
    try:
        for _ in range(asked.repeats + 1):
            ours = [_ours(llm, prompts, asked.tokens) for llm in llms]
            rates.append([*ours, peer.rate(prompts)])
    finally:
        peer.close()
    native, module, theirs = (max(column) for column in zip(*rates[1:], strict=True))  # once warm
    print(f"{asked.prompts} prompts of 8 to 64 tokens, {asked.tokens} tokens generated for each")
    print(f"pagedsim                           {native:8,.0f} tokens per CPU second")
    print(f"pagedsim, model_impl=transformers  {module:8,.0f} tokens per CPU second")
    print(f"transformers' generate_batch       {theirs:8,.0f} tokens per CPU second")
    print(f"ratio to model_impl=transformers   {native / module:8.2f}")
    print(f"ratio to generate_batch            {native / theirs:8.2f}")


PATIENCE = 600
"""Seconds."""


class _Plain(argparse.RawDescriptionHelpFormatter):
    pass


def _ours(llm: LLM, prompts: Prompts, tokens: int) -> float:
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    begin = time.process_time()
    answers = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.process_time() - begin
    return sum(len(answer.outputs[0].token_ids) for answer in answers) / seconds


class _Peer:
    """transformers' continuous batching over the same weights, kept running between rounds."""

    def __init__(self, tokens: int) -> None:
        module: Any = load_model("tiny").module
        module.set_attn_implementation("sdpa")
        config = GenerationConfig(
            max_new_tokens=tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
        )
        self.tokens = tokens
        # Room for all that is asked here; by default it takes most of the machine's memory, and
        # minutes to do so.
        room = ContinuousBatchingConfig(num_blocks=64, page_size=256, max_batch_tokens=4096)
        self.manager = module.init_continuous_batching(
            generation_config=config, continuous_batching_config=room
        )
        self.manager.start()

    def rate(self, prompts: Prompts) -> float:
        """Tokens per CPU second."""
        begin = time.process_time()
        self.manager.add_requests(prompts, max_new_tokens=self.tokens)
        done, produced = 0, 0
        while done < len(prompts):
            result = self.manager.get_result(timeout=PATIENCE)
            if result is None:
                raise RuntimeError(f"generate_batch gave no answer within {PATIENCE} s")
            if result.is_finished():
                done += 1
                produced += len(result.generated_tokens)
        return produced / (time.process_time() - begin)

    def close(self) -> None:
        """Stop its thread."""
        self.manager.stop(block=True)


if __name__ == "__main__":
    main()
