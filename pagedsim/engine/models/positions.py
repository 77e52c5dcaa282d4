"""How long a sequence may get, and rotary embeddings that change with it.

Two kinds of rotary scaling, `dynamic` and `longrope`, choose their frequencies by the longest
sequence of a forward pass. In a step of many sequences one would change another's tokens, and keys
in the cache were rotated by what held when they came. So a model goes only up to the length where
the choice begins, and its frequencies stay those of the short sequences.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from pagedsim.core.errors import ConfigError, require_whole

SWITCHING = ("dynamic", "longrope")


def longest(config: Any, asked: int | None, where: str) -> int:
    """The longest sequence, prompt and output: what was asked for, if the model can do it.

    `config` is that of the text model, `where` begins the error that says it cannot.
    """
    stated = getattr(config, "max_position_embeddings", None)
    limit, why = stated, "its max_position_embeddings"
    for rope in _ropes(config):
        if rope.get("rope_type") in SWITCHING:
            begins = rope.get("original_max_position_embeddings") or stated
            if begins is not None and (limit is None or begins < limit):
                limit, why = begins, f"where its {rope['rope_type']} rotary scaling begins"
    if asked is None:
        if limit is None:
            raise ConfigError(f"{where}: its config has no max_position_embeddings: "
                              "give max_model_len")  # fmt: skip
        return int(limit)
    require_whole("max_model_len", asked, 1)
    if limit is not None and asked > limit:
        raise ConfigError(f"max_model_len={asked}: {where} goes up to {limit}, {why}")
    return asked


def hold_frequencies(module: nn.Module) -> None:
    """Have rotary embeddings keep the frequencies of short sequences, and never look again."""
    part: Any
    for part in module.modules():
        kinds = getattr(part, "rope_type", None)
        if kinds in SWITCHING:
            part.rope_type = "held"
            if hasattr(part, "original_inv_freq"):  # the module may have seen long ones already
                part.inv_freq.copy_(part.original_inv_freq)
        elif isinstance(kinds, dict):
            part.rope_type = {
                layers: "held" if kind in SWITCHING else kind for layers, kind in kinds.items()
            }


def _ropes(config: Any) -> list[dict[str, Any]]:
    """The rotary settings: of all layers, or of each kind of layer."""
    rope = getattr(config, "rope_parameters", None)
    if not isinstance(rope, dict):
        return []
    return [rope, *(inner for inner in rope.values() if isinstance(inner, dict))]
