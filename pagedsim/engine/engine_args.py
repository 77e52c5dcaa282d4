"""An engine's settings under vLLM's names, to be made once and used for several engines."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from pagedsim.engine.arguments import Arguments
from pagedsim.engine.vllm_names import from_vllm, vllm_errors


class EngineArgs(SimpleNamespace):
    """What `LLM` and `LLMEngine.from_engine_args` take.

    >>> args = EngineArgs(model="tiny", max_num_seqs=8, enable_prefix_caching=True)
    >>> args.arguments().server.max_seqs, args.arguments().server.memory
    (8, 'prefix')
    """

    def __init__(self, model: Any = "tiny", **settings: Any) -> None:
        """`settings` are those of `Arguments` and `ServerSpec`, or vLLM's (vllm_names.py).

        Raises ConfigError for a name or a value that is not to be had, with the reason.
        """
        super().__init__(model=model, **settings)
        self.arguments()

    def arguments(self) -> Arguments:
        """The same under our names."""
        with vllm_errors():
            return Arguments.of(**from_vllm(vars(self)))
