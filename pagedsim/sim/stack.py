"""Overheads of a serving stack: host time, launches, collectives and HTTP."""

from __future__ import annotations

from dataclasses import dataclass

from pagedsim.core.errors import require_number


@dataclass(frozen=True)
class Stack:
    """Overheads of one version of a serving engine.

    The defaults are those of `stack=vllm-0.33`.
    """

    name: str = "vllm-0.33"
    host_step_ms: float = 1.0
    """Host time between two steps, while the GPU idles: scheduling, preparing the batch,
    sampling."""
    host_request_us: float = 15.0
    """Host time per sequence of the step."""
    latencies: float = 1.4
    """What kernels take to start, relative to measurements of one at a time: less if the server
    fuses them or starts one before the last has ended, more if the GPU waits between them."""
    ideal_kernels: bool = False
    """Whether kernels start at once, and compute all the while that they read."""
    fp8_cache: float = 0.75
    """Speed of reading keys and values of 8 bits, in bytes, relative to those of 16 bits."""
    launch_us: float = 0.0
    """Host time of launching a layer's kernels, while the GPU works; the sum over layers bounds a
    step from below. 0: kernels are launched as a CUDA graph."""
    prompt_launch_us: float = 0.0
    """The same of a step with prompts, where those are not captured: kernels of a dense layer that
    are launched from Python take 0.3 to 0.56 ms (experiments/data/README.md)."""
    latent_launch_us: float = 0.0
    """The same of a layer with latent attention and experts, DeepSeek's."""
    all_reduce_share: float = 0.5
    """Achieved fraction of the link bandwidth by all-reduces."""
    all_to_all_share: float = 0.8
    """Achieved fraction of the link bandwidth by all-to-alls of experts and by transfers between
    pipeline stages."""
    server_ms: float = 20.0
    """Time of HTTP and tokenisation, before a request is queued."""

    def __post_init__(self) -> None:
        for key in (
            "host_step_ms",
            "host_request_us",
            "latencies",
            "launch_us",
            "server_ms",
            "prompt_launch_us",
            "latent_launch_us",
        ):
            require_number(f"stack.{key}", getattr(self, key), 0)
        for key in ("fp8_cache", "all_reduce_share", "all_to_all_share"):
            require_number(f"stack.{key}", getattr(self, key), above=0, high=1)
