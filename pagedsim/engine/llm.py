"""Prompts in, answers out: the engine for who has a list of prompts and no server."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any

from tqdm import tqdm  # type: ignore[import-untyped]

from pagedsim.core import ConfigError, RequestError, SamplingParams
from pagedsim.core.errors import unknown
from pagedsim.engine.arguments import SETTINGS, Arguments
from pagedsim.engine.engine import LLMEngine
from pagedsim.engine.models.reading import brief
from pagedsim.engine.output import RequestOutput

Prompt = str | Sequence[int]
"""A text, or token ids."""

Chat = Sequence[Mapping[str, str]]
"""Messages, each with its `role` and its `content`."""

VLLM_NAMES: Mapping[str, str] = {
    "max_seqs": "max_num_seqs",
    "max_batched_tokens": "max_num_batched_tokens",
    "blocks": "num_gpu_blocks",
    "cpu_blocks": "num_cpu_blocks",
    "swap_space_gib": "swap_space",
    "tensor_parallel": "tensor_parallel_size",
}
"""What vLLM calls some of our settings. They are translated here and nowhere else."""


class LLM:
    """A model that answers.

    >>> llm = LLM("tiny", device="cpu")
    >>> answers = llm.generate(
    ...     ["Once", "upon"], SamplingParams(temperature=0, max_tokens=4), use_tqdm=False
    ... )
    >>> [len(answer.outputs[0].token_ids) for answer in answers]
    [4, 4]
    """

    def __init__(self, model: Any = "tiny", **settings: Any) -> None:
        """`settings` are those of `Arguments` and `ServerSpec`: dtype, block_size, preemption, ...

        Six of them are called as in vLLM: `max_num_seqs`, `max_num_batched_tokens`,
        `num_gpu_blocks`, `num_cpu_blocks`, `swap_space` (in GiB) and `tensor_parallel_size`; in
        errors, too.
        """
        arguments = {"model": model, **_from_vllm(settings)}
        try:
            self.engine = LLMEngine(Arguments.of(**arguments))
        except ConfigError as error:
            raise ConfigError(_to_vllm(str(error))) from error
        self._served = 0

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: Sequence[float] | None = None,
    ) -> list[RequestOutput]:
        """Answer all prompts, texts or lists of token ids; the answers come in their order.

        One `sampling_params` holds for all prompts, a list has one for each. A smaller `priority`
        is more urgent, where the policy asks for it.
        """
        asked = _listed(prompts)
        params = _params(sampling_params, len(asked))
        ranks = priority if priority is not None else [0] * len(asked)
        if len(ranks) != len(asked):
            raise RequestError(f"priority: {len(ranks)} for {len(asked)} prompts")
        if self.engine.has_unfinished_requests():
            raise RequestError(
                "generate: the engine serves requests that were added to it; step it until they end"
            )
        first = self._served
        self._served += len(asked)
        added: list[str] = []
        try:
            for i, prompt in enumerate(asked):
                name = str(first + i)
                self.engine.add_request(name, prompt, params[i], priority=ranks[i])
                added.append(name)
            return self._answers(added, use_tqdm)
        finally:
            self._drop(added)

    def chat(
        self,
        messages: Chat | Sequence[Chat],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answer one chat or several, each put into the words of the model's chat template."""
        one = bool(messages) and isinstance(messages[0], Mapping)
        prompts = [self._templated(chat) for chat in ([messages] if one else messages)]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def close(self) -> None:
        """End the processes that share the model, if there are any."""
        self.engine.close()

    def _templated(self, chat: Any) -> list[int]:
        backend: Any = getattr(self.engine.tokenizer, "backend", None)
        if getattr(backend, "chat_template", None) is None:
            raise RequestError("chat: the model's tokenizer has no chat template")
        try:
            return list(backend.apply_chat_template(chat, add_generation_prompt=True)["input_ids"])
        except Exception as error:  # a template raises what it likes
            raise RequestError(f"messages: the template refuses them: {brief(error)}") from error

    def _answers(self, names: Sequence[str], use_tqdm: bool) -> list[RequestOutput]:
        answers: dict[str, RequestOutput] = {}
        with tqdm(total=len(names), unit="prompt", disable=not use_tqdm) as bar:
            while self.engine.has_unfinished_requests():
                self.engine.check_progress()
                for output in self.engine.step():
                    answers[str(output.request_id)] = output
                    bar.update()
        return [answers[name] for name in names]

    def _drop(self, names: Sequence[str]) -> None:
        """Nobody waits for these any more: an error or a Ctrl-C leaves nothing behind."""
        for name in names:
            if name in self.engine.scheduler.requests:
                self.engine.abort_request(name)
        while self.engine.has_unfinished_requests():  # a step was planned ahead
            self.engine.step()


def _from_vllm(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings under our names."""
    ours = {VLLM_NAMES.get(name, name): name for name in SETTINGS}
    for name in settings:
        if name not in ours:
            raise unknown("engine setting", name, ours)
    return {ours[name]: value for name, value in settings.items()}


def _to_vllm(text: str) -> str:
    """An error's text with the settings that it names, as in blocks=3, under vLLM's names."""
    names = "|".join(VLLM_NAMES)
    return re.sub(rf"\b({names})(?=[=:])", lambda found: VLLM_NAMES[found[1]], text)


def _listed(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """The prompts as a list, also where only one was given."""
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Iterable):
        raise RequestError(f"prompts={prompts!r}: must be a text, token ids, or a list of these")
    several: list[Any] = list(prompts)
    if several and all(isinstance(one, Integral) for one in several):
        return [[int(one) for one in several]]
    for one in several:
        if not isinstance(one, (str, Sequence)):
            raise RequestError(f"prompts: {one!r} must be a text or a list of token ids")
    return several


def _params(given: Any, count: int) -> Sequence[SamplingParams]:
    """Settings for each prompt."""
    if given is None:
        return [SamplingParams()] * count
    if isinstance(given, SamplingParams):
        return [given] * count
    if not isinstance(given, Sequence) or not all(isinstance(p, SamplingParams) for p in given):
        raise RequestError(f"sampling_params={given!r}: must be SamplingParams, or a list of them")
    if len(given) != count:
        raise RequestError(f"sampling_params: {len(given)} for {count} prompts")
    return given
