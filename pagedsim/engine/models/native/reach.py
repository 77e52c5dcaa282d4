"""Which models the native decoder knows, down to their last module."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from pagedsim.engine.models.weights import skeleton

SPLIT = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
"""Those of which there are shards."""
FAMILIES = (*SPLIT, "MixtralForCausalLM", "Qwen3MoeForCausalLM", "DeepseekV3ForCausalLM")
SCORING = "sigmoid"
"""How transformers' DeepseekV3 scores experts, whatever its configuration says."""


def unknown(module: Any) -> str | None:
    """Why the native decoder does not take a model; None if it does.

    A clause without a subject's name. It must be transformers' model of one of the families, not
    something derived from it, and nothing in it may be replaced, quantised or hooked.
    """
    from transformers.activations import ACT2FN

    kind = type(module)
    if kind.__name__ not in FAMILIES or not kind.__module__.startswith("transformers.models."):
        return f"it is none of transformers' {', '.join(FAMILIES[:-1])} and {FAMILIES[-1]}"
    if module.config.hidden_act != "silu":
        return f"its MLP has hidden_act={module.config.hidden_act}, not silu"
    if getattr(module.config, "scoring_func", SCORING) != SCORING:
        return f"its experts have scoring_func={module.config.scoring_func}, not {SCORING}"
    plain = nn.Linear, nn.Embedding, nn.ModuleList, type(ACT2FN["silu"])
    for name, part in module.named_modules():
        own = type(part).__module__ == kind.__module__
        if not own and type(part) not in plain:
            return f"its {name} is a {type(part).__name__}"
        if "forward" in vars(part) or part._forward_hooks or part._forward_pre_hooks:
            return f"its {name or 'forward'} was changed from outside"
    if _shapes(module) != _shapes(skeleton(module.config)):
        return "its weights are not those that its configuration makes"
    dtypes = {str(weight.dtype).removeprefix("torch.") for weight in module.parameters()}
    if len(dtypes) > 1:
        return f"its weights are {' and '.join(sorted(dtypes))}"
    return None


def _shapes(module: nn.Module) -> dict[str, torch.Size]:
    return {name: weight.shape for name, weight in module.named_parameters()}
