"""Offline (batch) inference API, compatible with vLLM's `LLM`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any

from tqdm import tqdm  # type: ignore[import-untyped]

from pagedsim.core import RequestError, SamplingParams
from pagedsim.core.errors import is_number
from pagedsim.engine.engine import LLMEngine
from pagedsim.engine.engine_args import EngineArgs
from pagedsim.engine.output import RequestOutput
from pagedsim.engine.tokenizer import Chat, chat_tokens, wrapped


def speed(read: int, generated: int, seconds: float) -> str:
    """Tokens per second of prompts and outputs, in vLLM's format, which tools parse.

    >>> speed(100, 20, 2.0)
    'est. speed input: 50.00 toks/s, output: 10.00 toks/s'
    """
    rates = (tokens / seconds if seconds else 0.0 for tokens in (read, generated))
    return "est. speed input: {:.2f} toks/s, output: {:.2f} toks/s".format(*rates)


Tokens = Sequence[int]
Prompt = str | Tokens | Mapping[str, Any]
"""A text, token ids, or a mapping: {"prompt": "a"}, {"prompt_token_ids": [5, 6]}."""

NAMES = ("prompt", "prompt_token_ids")


def prompts_of(
    prompts: Prompt | Sequence[Prompt] | None,
    token_ids: Tokens | Sequence[Tokens] | None = None,
) -> list[str | Tokens]:
    """The prompts as a list of texts and token ids; a single one becomes a list, too.

    >>> prompts_of({"prompt": "a"}), prompts_of([5, 6]), prompts_of(None, [[5], [6]])
    (['a'], [[5, 6]], [[5], [6]])
    """
    if token_ids is None:
        return _listed("prompts", prompts)
    if prompts is not None:
        raise RequestError("generate: give prompts or prompt_token_ids, not both")
    listed = _listed("prompt_token_ids", token_ids)
    for ids in listed:
        if isinstance(ids, str):
            raise RequestError(f"prompt_token_ids: {ids!r} must be a list of token ids")
    return listed


def _one_each(
    name: str, given: Any, count: int, fine: Callable[[Any], bool], what: str
) -> Sequence[Any]:
    """Settings, one for each of `count` prompts; `what` must be given."""
    if not isinstance(given, Sequence) or not all(map(fine, given)):
        raise RequestError(f"{name}={given!r}: must be {what}")
    if len(given) != count:
        raise RequestError(f"{name}: {len(given)} for {count} prompts")
    return given


def _listed(name: str, prompts: Any) -> list[str | Tokens]:
    if isinstance(prompts, str | Mapping):
        return [_prompt(name, prompts)]
    if not isinstance(prompts, Iterable):
        raise RequestError(f"{name}={prompts!r}: must be a text, token ids, or a list of these")
    several: list[Any] = list(prompts)
    if several and all(isinstance(token, Integral) for token in several):
        return [[int(token) for token in several]]
    return [_prompt(name, prompt) for prompt in several]


def _prompt(name: str, prompt: Any) -> str | Tokens:
    if isinstance(prompt, Mapping):
        prompt = _named(name, prompt)
    if isinstance(prompt, str):
        return prompt
    if not isinstance(prompt, Sequence) or not all(isinstance(token, Integral) for token in prompt):
        raise RequestError(f"{name}: {prompt!r} must be a text or a list of token ids")
    return prompt


def _named(name: str, prompt: Mapping[str, Any]) -> Any:
    given = {key: value for key, value in prompt.items() if value is not None}
    if len(given) != 1 or next(iter(given)) not in NAMES:
        keys = ", ".join(map(str, given)) or "nothing"
        raise RequestError(f"{name}: has {keys}: must have one of {' and '.join(NAMES)}")
    ((key, value),) = given.items()
    if isinstance(value, str) != (key == "prompt"):
        kind = "a text" if key == "prompt" else "a list of token ids"
        raise RequestError(f"{name}: {key}={value!r}: must be {kind}")
    return value


class LLM:
    """Offline inference with a model.

    >>> llm = LLM("tiny", device="cpu")
    >>> answers = llm.generate(
    ...     ["Once", "upon"], SamplingParams(temperature=0, max_tokens=4), use_tqdm=False
    ... )
    >>> [len(answer.outputs[0].token_ids) for answer in answers]
    [4, 4]
    """

    def __init__(self, model: Any = "tiny", **settings: Any) -> None:
        """`settings` are those of `Arguments` and `ServerSpec`: dtype, block_size, preemption, ...
        `server=ps.preset("sglang-0.5")` decides as a real server, where no setting says otherwise.

        Six of them have vLLM's names, also in errors: `max_num_seqs`, `max_num_batched_tokens`,
        `num_gpu_blocks`, `num_cpu_blocks`, `swap_space` (in GiB) and `tensor_parallel_size`. vLLM's
        other arguments are translated if possible, or else refused with a reason (engine_args.py).
        """
        self.engine = LLMEngine.from_engine_args(EngineArgs(model, **settings))
        self._served = 0

    @property
    def llm_engine(self) -> LLMEngine:
        """The engine, by vLLM's name."""
        return self.engine

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt] | None = None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Tokens | Sequence[Tokens] | None = True,
        *,
        prompt_token_ids: Tokens | Sequence[Tokens] | None = None,
        priority: Sequence[float] | None = None,
    ) -> list[RequestOutput]:
        """Complete all prompts, texts or lists of token ids; outputs are in their order.

        A prompt may also be a mapping, {"prompt": text} or {"prompt_token_ids": ids}, and ids may
        be passed as `prompt_token_ids`, in third position, too. One `sampling_params` holds for all
        prompts, a list has one for each; the default is `get_default_sampling_params`. A smaller
        `priority` is more urgent, if the policy uses it.
        """
        if not isinstance(use_tqdm, bool):
            if prompt_token_ids is not None:
                raise RequestError(f"use_tqdm={use_tqdm!r}: must be true or false")
            prompt_token_ids, use_tqdm = use_tqdm, True
        requests = prompts_of(prompts, prompt_token_ids)
        count = len(requests)
        if sampling_params is None:
            sampling_params = self.get_default_sampling_params()
        if isinstance(sampling_params, SamplingParams):
            sampling_params = [sampling_params] * count
        params = _one_each(
            "sampling_params",
            sampling_params,
            count,
            lambda value: isinstance(value, SamplingParams),
            "SamplingParams, or a list of them",
        )
        ranks: Sequence[float] = [0] * count
        if priority is not None:
            ranks = _one_each("priority", priority, count, is_number, "a list of numbers")
        if self.engine.has_unfinished_requests():
            raise RequestError(
                "generate: the engine serves requests that were added to it; step it until they end"
            )
        first = self._served
        self._served += count
        added: list[str] = []
        try:
            for i, prompt in enumerate(requests):
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
        use_tqdm: bool = True,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
    ) -> list[RequestOutput]:
        """Answer one chat or several, formatted by the model's chat template.

        `chat_template` is another template, in Jinja; without `add_generation_prompt` the model
        continues the last message.
        """
        if not isinstance(messages, list | tuple):
            raise RequestError(f"messages={messages!r}: must be a list of messages, or of chats")
        single = bool(messages) and isinstance(messages[0], Mapping)
        template = {} if chat_template is None else {"chat_template": chat_template}
        chats: Sequence[Any] = [messages] if single else messages
        prompts = [
            chat_tokens(self.engine.tokenizer, chat, add_generation_prompt, **template)
            for chat in chats
        ]
        return self.generate(prompts, sampling_params, use_tqdm)

    def get_default_sampling_params(self) -> SamplingParams:
        """The model's generation_config.json, if `generation_config` is auto."""
        return SamplingParams(**self.engine.default_sampling)

    def get_tokenizer(self) -> Any:
        """The model's tokenizer, unwrapped if it is one of transformers; None if there is none."""
        return getattr(self.engine.tokenizer, "backend", self.engine.tokenizer)

    def set_tokenizer(self, tokenizer: Any) -> None:
        """Replace the tokenizer, by one of transformers or with `encode` and `decode`."""
        self.engine.tokenizer = wrapped(tokenizer)

    def close(self) -> None:
        """End the other processes of a tensor-parallel model, and give CPU threads back."""
        self.engine.close()

    def _answers(self, names: Sequence[str], use_tqdm: bool) -> list[RequestOutput]:
        """Step the engine until all are answered, with a progress bar."""
        answers: dict[str, RequestOutput] = {}
        read = generated = 0
        with tqdm(
            total=len(names),
            desc="Processed prompts",
            unit="prompt",
            postfix=speed(0, 0, 0.0),
            dynamic_ncols=True,
            disable=not use_tqdm,
        ) as bar:
            while self.engine.has_unfinished_requests():
                self.engine.check_progress()
                for output in self.engine.step():
                    answers[str(output.request_id)] = output
                    if use_tqdm:
                        read += len(output.prompt_token_ids)
                        generated += sum(len(completion.token_ids) for completion in output.outputs)
                        elapsed = bar.format_dict["elapsed"]
                        bar.set_postfix_str(speed(read, generated, elapsed), refresh=False)
                        bar.update()
        return [answers[name] for name in names]

    def _drop(self, names: Sequence[str]) -> None:
        """Abort unfinished requests after an error or Ctrl-C."""
        for name in names:
            if name in self.engine.scheduler.requests:
                self.engine.abort_request(name)
        while self.engine.has_unfinished_requests():  # a step was planned ahead
            self.engine.step()
