"""Bytes per weight and format of products, from a config.json's quantization_config."""

from __future__ import annotations

from collections.abc import Mapping

from pagedsim.core import ConfigError
from pagedsim.sim.huggingface.keys import Keys
from pagedsim.sim.model import FP16


def weight_bytes(keys: Keys) -> float:
    """Bytes per weight, except the embeddings and the LM head.

    Serving engines hold float32 checkpoints in 16 bits, so only quantisation matters.
    """
    found = keys.part("quantization_config")
    method = found.values.get("quant_method")
    if method is None or method == "mxfp4":  # mxfp4 applies to experts only
        return 2.0
    if method in ("fp8", "fbgemm_fp8"):
        return 1.0
    if method == "bitsandbytes":
        return 0.5 if found.flag("load_in_4bit", False) else 1.0
    if method == "compressed-tensors":
        return _compressed(found)
    if "bits" in found.values:
        return found.whole("bits") / 8
    raise ConfigError(
        f"{found.where}.quant_method={method!r}: choose bitsandbytes, compressed-tensors, fp8, "
        "mxfp4, or one that states its bits"
    )


def products(keys: Keys) -> str:
    """Format of products with weights: 8 bits if activations are quantised, too."""
    found = keys.part("quantization_config")
    method = found.values.get("quant_method")
    if method in ("fp8", "fbgemm_fp8"):
        return "fp8"
    if method != "compressed-tensors":
        return FP16
    groups = found.part("config_groups")
    rounded = {
        groups.part(name).part("input_activations").values.get("type")
        for name, group in groups.values.items()
        if isinstance(group, Mapping)
        and isinstance(inputs := group.get("input_activations"), Mapping)
        and inputs.get("num_bits") == 8
    }
    return {"float": "fp8", "int": "int8"}.get(str(*rounded), FP16) if len(rounded) == 1 else FP16


def _compressed(found: Keys) -> float:
    """Bytes per weight; all groups of layers must agree."""
    groups = found.part("config_groups")
    bits = {
        groups.part(name).part("weights").whole("num_bits")
        for name, group in groups.values.items()
        if isinstance(group, Mapping) and group.get("weights") is not None
    }
    if len(bits) != 1:
        found_bits = ", ".join(map(str, sorted(bits))) or "none"
        raise ConfigError(
            f"{groups.where}: num_bits of weights is {found_bits}: must be one number"
        )
    return bits.pop() / 8
