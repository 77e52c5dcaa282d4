"""What `LLM.generate` takes as prompts, in all the forms that vLLM's users write them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any

from pagedsim.core import RequestError, SamplingParams
from pagedsim.core.errors import is_number

Tokens = Sequence[int]
Prompt = str | Tokens | Mapping[str, Any]
"""A text, token ids, or either with its name: {"prompt": "a"}, {"prompt_token_ids": [5, 6]}."""

NAMES = ("prompt", "prompt_token_ids")


def prompts_of(
    prompts: Prompt | Sequence[Prompt] | None,
    token_ids: Tokens | Sequence[Tokens] | None = None,
) -> list[str | Tokens]:
    """The prompts as a list of texts and token ids, also where only one was given.

    >>> prompts_of({"prompt": "a"}), prompts_of([5, 6]), prompts_of(None, [[5], [6]])
    (['a'], [[5, 6]], [[5], [6]])
    """
    if token_ids is None:
        return _listed("prompts", prompts)
    if prompts is not None:
        raise RequestError("generate: give prompts or prompt_token_ids, not both")
    listed = _listed("prompt_token_ids", token_ids)
    for one in listed:
        if isinstance(one, str):
            raise RequestError(f"prompt_token_ids: {one!r} must be a list of token ids")
    return listed


def params_of(given: Any, count: int) -> Sequence[SamplingParams]:
    """Settings for each of so many prompts."""
    if isinstance(given, SamplingParams):
        return [given] * count
    if not isinstance(given, Sequence) or not all(isinstance(p, SamplingParams) for p in given):
        raise RequestError(f"sampling_params={given!r}: must be SamplingParams, or a list of them")
    if len(given) != count:
        raise RequestError(f"sampling_params: {len(given)} for {count} prompts")
    return given


def ranks_of(given: Any, count: int) -> Sequence[float]:
    """A priority for each of so many prompts."""
    if given is None:
        return [0] * count
    if not isinstance(given, Sequence) or not all(is_number(one) for one in given):
        raise RequestError(f"priority={given!r}: must be a list of numbers")
    if len(given) != count:
        raise RequestError(f"priority: {len(given)} for {count} prompts")
    return given


def _listed(name: str, prompts: Any) -> list[str | Tokens]:
    if isinstance(prompts, str | Mapping):
        return [_prompt(name, prompts)]
    if not isinstance(prompts, Iterable):
        raise RequestError(f"{name}={prompts!r}: must be a text, token ids, or a list of these")
    several: list[Any] = list(prompts)
    if several and all(isinstance(one, Integral) for one in several):
        return [[int(one) for one in several]]
    return [_prompt(name, one) for one in several]


def _prompt(name: str, one: Any) -> str | Tokens:
    if isinstance(one, Mapping):
        one = _named(name, one)
    if isinstance(one, str):
        return one
    if not isinstance(one, Sequence) or not all(isinstance(token, Integral) for token in one):
        raise RequestError(f"{name}: {one!r} must be a text or a list of token ids")
    return one


def _named(name: str, prompt: Mapping[str, Any]) -> Any:
    """What stands in a prompt that says what it is."""
    given = {key: value for key, value in prompt.items() if value is not None}
    if len(given) != 1 or next(iter(given)) not in NAMES:
        keys = ", ".join(map(str, given)) or "nothing"
        raise RequestError(f"{name}: has {keys}: must have one of {' and '.join(NAMES)}")
    ((key, value),) = given.items()
    if isinstance(value, str) != (key == "prompt"):
        kind = "a text" if key == "prompt" else "a list of token ids"
        raise RequestError(f"{name}: {key}={value!r}: must be {kind}")
    return value
