"""Fields that clients send, and that mean something only to other servers.

They are accepted where they change nothing about an answer, so that clients work as they are, and
refused where they would.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pagedsim.core.errors import shown
from pagedsim.serve.api.excerpt import excerpt
from pagedsim.serve.api.problem import Bad

ANYTHING = "anything"
"""Whatever it says, answers are the same."""

NOTHING: tuple[Any, ...] = ()
"""Any value but null would change the answer."""

NEUTRAL: Mapping[str, tuple[Any, ...] | str] = {
    # OpenAI's
    "store": ANYTHING,
    "metadata": ANYTHING,
    "service_tier": ANYTHING,
    "safety_identifier": ANYTHING,
    "prompt_cache_key": ANYTHING,
    "prompt_cache_options": ANYTHING,
    "prompt_cache_retention": ANYTHING,
    "prediction": ANYTHING,
    "parallel_tool_calls": ANYTHING,
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "logit_bias": ({},),
    "suffix": ("",),
    "audio": NOTHING,
    "moderation": NOTHING,
    "web_search_options": NOTHING,
    # vLLM's
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "add_special_tokens": (True,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "include_reasoning": (True,),
    "detokenize": (True,),
    "use_beam_search": (False,),
    "length_penalty": (1.0,),
    "early_stopping": (False,),
    "return_tokens_as_token_ids": (False,),
    "bad_words": ([],),
    "documents": ([],),
    "chat_template_kwargs": ({},),
    "mm_processor_kwargs": ({},),
    "vllm_xargs": ({},),
    "truncate_prompt_tokens": NOTHING,
    "prompt_logprobs": NOTHING,
    "prompt_embeds": NOTHING,
    "allowed_token_ids": NOTHING,
    "logits_processors": NOTHING,
    "chat_template": NOTHING,
    "structured_outputs": NOTHING,
    "guided_json": NOTHING,
    "guided_regex": NOTHING,
    "guided_choice": NOTHING,
    "guided_grammar": NOTHING,
    "kv_transfer_params": NOTHING,
    "cache_salt": NOTHING,
}
"""The values of each that are accepted."""


def refuse_strange(name: str, value: object) -> None:
    """Raise Bad for a value that would change the answer."""
    allowed = NEUTRAL[name]
    if allowed == ANYTHING or value in allowed:
        return
    given = excerpt(value, 60)
    words = " or ".join(shown(one) for one in (*allowed, None))
    raise Bad(f"{name}={given}: is not supported here; allowed: {words.replace('None', 'null')}")


def properties() -> dict[str, Any]:
    """The same, for a schema."""
    return {
        name: {} if allowed == ANYTHING else {"enum": [*allowed, None]}
        for name, allowed in NEUTRAL.items()
    }
