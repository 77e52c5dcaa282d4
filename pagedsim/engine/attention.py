"""The setting `attention`: whose kernels attend, and what they do not go with."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.metadata import PackageNotFoundError, version

import torch

from pagedsim.core import ConfigError
from pagedsim.kernels.batch import Attention
from pagedsim.kernels.float8 import name_of
from pagedsim.kernels.ops import attend_cached
from pagedsim.kernels.others import FlashAttention, FlashInfer

TRITON = "triton"
PACKAGES = {"flashinfer": "flashinfer-python", "fa": "flash-attn"}
"""What an attention needs. None is among the extras: they are not tried with every release."""
ATTENTIONS = (TRITON, *PACKAGES)
EAGER = ("flashinfer",)
"""Those that a CUDA graph cannot hold."""
FLASH_3 = "flash-attn-3"
"""FlashAttention's other package, which is built from source, for Hopper."""
OLDEST = (8, 0)
"""Capability of a GPU that they run on."""


def require(name: str, device: torch.device) -> None:
    """Raise ConfigError unless the device is one for this attention and its package is there."""
    if name == TRITON:
        return
    if device.type != "cuda":
        raise ConfigError(f"attention={name}: must be {TRITON} on device={device.type}")
    if (capability := torch.cuda.get_device_capability(device)) < OLDEST:
        version = ".".join(map(str, capability))
        raise ConfigError(
            f"attention={name}: must be {TRITON} on a GPU of capability {version}, below 8.0"
        )
    if not _installed(PACKAGES[name]) and not (name == "fa" and _third(device)):
        raise ConfigError(
            f"attention={name}: needs {PACKAGES[name]}, which is not installed: "
            f"pip install --no-build-isolation {PACKAGES[name]}"
        )


def attention_of(
    name: str,
    device: torch.device,
    *,
    dtype: torch.dtype,
    held: torch.dtype,
    head_dim: int,
    block_size: int,
) -> Attention:
    """The attention of that name, for queries in `dtype` and a cache in `held`.

    Raises ConfigError where it does not go with the device, with these, or with what is installed.
    """
    if name == TRITON:
        return attend_cached
    require(name, device)
    if dtype not in (torch.float16, torch.bfloat16):
        raise ConfigError(f"dtype={str(dtype)[6:]}: attention={name} has float16 and bfloat16")
    if name == "flashinfer":
        if head_dim not in FlashInfer.HEAD_DIMS:
            raise ConfigError(
                f"attention={name}: must be {TRITON} for heads of {head_dim}; it has heads of "
                f"{', '.join(map(str, FlashInfer.HEAD_DIMS))}"
            )
        return _constructed(name, partial(FlashInfer, device))
    if head_dim % 8 or head_dim > 256:
        raise ConfigError(
            f"attention={name}: must be {TRITON} for heads of {head_dim}; it has multiples of 8, "
            "up to 256"
        )
    if held != dtype:
        raise ConfigError(
            f"kv_cache_dtype={name_of(held)}: attention={name} reads a cache in the model's dtype; "
            "choose auto"
        )
    third = _third(device)
    if block_size % FlashAttention.PAGE and not third:
        raise ConfigError(
            f"block_size={block_size}: attention={name} needs a multiple of {FlashAttention.PAGE}, "
            f"but for {FLASH_3} on Hopper, which takes any"
        )
    return _constructed(name, partial(FlashAttention, third))


def _third(device: torch.device) -> bool:
    """Whether FlashAttention is its third version."""
    return torch.cuda.get_device_capability(device)[0] == 9 and _installed(FLASH_3)


def _installed(package: str) -> bool:
    try:
        version(package)
    except PackageNotFoundError:
        return False
    return True


def _constructed(name: str, make: Callable[[], Attention]) -> Attention:
    """Its package may have been built for another torch or CUDA."""
    try:
        return make()
    except (ImportError, OSError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ConfigError(f"attention={name}: cannot be imported: {reason}") from error
