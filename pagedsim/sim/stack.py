"""A serving stack: what a server's software takes beside the work of its kernels."""

from __future__ import annotations

from dataclasses import dataclass

from pagedsim.core.errors import require_number


@dataclass(frozen=True)
class Stack:
    """Times of one server program of some year.

    The defaults are those of `stack=vllm-2026`.
    """

    name: str = "vllm-2026"
    host_step_ms: float = 1.15
    """Between two steps, while the GPU waits: scheduling, preparing the batch, sampling."""
    host_request_us: float = 56.0
    """The same, for each sequence of the step."""
    layer_us: float = 16.0
    """Of the GPU, for each layer: norms, rotations, gaps between kernels."""
    launch_us: float = 0.0
    """Of the host, for launching a layer's kernels while the GPU works: a step takes no less than
    that of all layers. 0: they are captured in a graph and launched at once."""
    all_reduce_share: float = 0.65
    """What all-reduces reach of the link's bandwidth."""
    all_to_all_share: float = 0.8
    """The same of tokens on their way to experts and back, and from stage to stage."""
    server_ms: float = 20.0
    """A request's way through HTTP and tokenising, before it is queued."""

    def __post_init__(self) -> None:
        for key in ("host_step_ms", "host_request_us", "layer_us", "launch_us", "server_ms"):
            require_number(f"stack.{key}", getattr(self, key), 0)
        for key in ("all_reduce_share", "all_to_all_share"):
            require_number(f"stack.{key}", getattr(self, key), above=0, high=1)
