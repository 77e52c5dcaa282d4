"""The test of a loaded model: logits through the paged cache against transformers' own.

It finds what the probe cannot: positions that are counted instead of taken, attention that does
more than it declares.
"""

from __future__ import annotations

import torch

from pagedsim.engine.models.loaded import LoadedModel
from pagedsim.engine.models.probe import Refusal, attention
from pagedsim.kernels.batch import AttentionBatch

LENGTHS = (7, 5)
"""Tokens of the two sequences that share the steps."""
BLOCK_SIZE = 4
TABLES = ((2, 0), (3, 1))


def try_out(model: LoadedModel) -> None:
    """Raise Refusal unless two short sequences come out as each does alone."""
    lengths = [min(length, model.max_model_len) for length in LENGTHS]
    prompts = [
        torch.arange(length, device=model.device) * 37 % model.vocab_size + i
        for i, length in enumerate(lengths)
    ]
    prompts = [prompt.clamp(max=model.vocab_size - 1) for prompt in prompts]
    alone = torch.stack([_alone(model, prompt) for prompt in prompts])
    together = _together(model, prompts)
    difference = float((together - alone).abs().mean() / alone.abs().mean())
    # Half precision rounds, and rounding may send a token to other experts; what is wrong in
    # float32 is wrong by far more than its rounding.
    allowed = 1e-3 if model.dtype == torch.float32 else 0.25
    if difference > allowed:  # False where transformers' own are NaN
        raise Refusal(
            f"its logits through the paged cache differ from transformers' own by {difference:.2%}"
        )


def _alone(model: LoadedModel, prompt: torch.Tensor) -> torch.Tensor:
    """The logits after `prompt`, as transformers computes them."""
    with attention(model.module, "eager"), torch.no_grad():
        output = model.module(input_ids=prompt.unsqueeze(0), use_cache=False, return_dict=True)
    last: torch.Tensor = output.logits[0, -1]
    return last.float()


def _together(model: LoadedModel, prompts: list[torch.Tensor]) -> torch.Tensor:
    """The logits after each of two prompts, in three steps that they share.

    The first is cut into a prefill, a chunk and a decode, the second begins with the chunk.
    """
    cache = model.new_cache(4, BLOCK_SIZE)
    first, second = (len(prompt) for prompt in prompts)
    chunk = first // 2
    _forward(model, cache, prompts, [0, 0], [chunk, 0])
    _forward(model, cache, prompts, [chunk, 0], [first - 1, second - 1])
    return _forward(model, cache, prompts, [first - 1, second - 1], [first, second])


def _forward(
    model: LoadedModel,
    cache: torch.Tensor,
    prompts: list[torch.Tensor],
    begins: list[int],
    ends: list[int],
) -> torch.Tensor:
    """The logits after tokens `begins[i]` to `ends[i]` of each prompt i, for ranges that are not
    empty."""
    parts = [i for i in range(len(prompts)) if begins[i] < ends[i]]
    if not parts:
        return torch.empty(0)
    lengths = [ends[i] - begins[i] for i in parts]
    batch = AttentionBatch.build(
        [TABLES[i] for i in parts],
        [begins[i] for i in parts],
        lengths,
        block_size=BLOCK_SIZE,
        device=model.device,
    )
    ids = torch.cat([prompts[i][begins[i] : ends[i]] for i in parts])
    positions = torch.cat([torch.arange(begins[i], ends[i]) for i in parts]).to(model.device)
    last = torch.tensor(lengths).cumsum(0).sub(1).to(model.device)
    return model.forward(ids, positions, batch, cache, last)
