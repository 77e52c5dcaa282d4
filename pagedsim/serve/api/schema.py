"""Request schemas under OpenAI's and vLLM's field names, and their OpenAPI description."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from dataclasses import fields as fields_of
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, WithJsonSchema

from pagedsim.core import SamplingParams
from pagedsim.serve.api.parsing import (
    messages,
    prompts,
    properties,
    request_name,
    stop_ids,
    stops,
    token_ids,
)

INT32 = 2**31 - 1
MOST_LOGPROBS = 20
LONGEST_WAIT = 1e6
"""Seconds."""

_SAMPLED = {field.name for field in fields_of(SamplingParams)}

_TEXT = {"type": "string"}
_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}}
_TEXTS = {"type": "array", "items": _TEXT}
_MESSAGE = {
    "type": "object",
    "properties": {"role": _TEXT, "content": {"anyOf": [_TEXT, {"type": "array"}]}},
    "required": ["role", "content"],
}

Whole = Annotated[int, Field(ge=-INT32, le=INT32)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Stops = Annotated[
    tuple[str, ...], PlainValidator(stops), WithJsonSchema({"anyOf": [_TEXT, _TEXTS]})
]
Ids = Annotated[list[int], PlainValidator(token_ids), WithJsonSchema(_IDS)]
StopIds = Annotated[list[int], PlainValidator(stop_ids), WithJsonSchema(_IDS)]
Prompts = Annotated[
    list[Any],
    PlainValidator(prompts),
    WithJsonSchema({"anyOf": [_TEXT, _TEXTS, _IDS, {"type": "array", "items": _IDS}]}),
]
Messages = Annotated[
    list[Any],
    PlainValidator(messages),
    WithJsonSchema({"type": "array", "items": _MESSAGE, "minItems": 1}),
]
Name = Annotated[str, PlainValidator(request_name), WithJsonSchema(_TEXT)]


def _also_neutral(schema: dict[str, Any]) -> None:
    schema["properties"] |= {
        name: allowed for name, allowed in properties().items() if name not in schema["properties"]
    }


class Fields(BaseModel):
    """Base of request schemas: strict types, no extra fields."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    model: str | None = None


class StreamOptions(BaseModel):
    """OpenAI's `stream_options`."""

    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False
    include_obfuscation: bool | None = False


class Sampling(Fields):
    """Sampling and scheduling fields of all generation requests."""

    model_config = ConfigDict(json_schema_extra=_also_neutral)

    max_tokens: Whole | None = None
    min_tokens: Whole = 0
    temperature: Annotated[float, Field(ge=0, le=1e4)] = 1.0
    top_p: float = 1.0
    top_k: Whole = 0
    min_p: float = 0.0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] = 1.0
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: Stops = ()
    stop_token_ids: StopIds = []
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    user: Annotated[str, Field(max_length=256)] = ""
    """The client's name, for fairness policies."""
    priority: Annotated[float, Field(ge=-1e9, le=1e9)] = 0.0
    """The smaller the more urgent."""
    deadline: Annotated[float, Field(ge=0, le=LONGEST_WAIT)] | None = None
    """Seconds until the answer is due, for deadline policies."""
    timeout: Annotated[float, Field(gt=0, le=LONGEST_WAIT)] | None = None
    """Seconds after which the request is aborted."""
    request_id: Name | None = None
    vllm_xargs: dict[str, Any] = {}
    """Anything else, for policies, which find it in `Request.extra`."""

    def fill(self, defaults: Mapping[str, Any], most: int) -> None:
        """Apply the model's sampling defaults to absent fields.

        At most `most` tokens can be generated. A path's own default of max_tokens has precedence.
        """
        for name, value in defaults.items():
            if name == "max_tokens":
                self.max_tokens = self.max_tokens or min(value, most)
            elif name not in self.model_fields_set:
                setattr(self, name, value)

    def sampling_params(self, **more: Any) -> SamplingParams:
        """SamplingParams for the engine; raises RequestError for invalid values."""
        given = {name: value for name, value in self if name in _SAMPLED}
        return SamplingParams(**given | {"max_tokens": getattr(self, self.bound)} | more)

    @property
    def bound(self) -> str:
        """The field that sets the maximum number of output tokens."""
        return "max_tokens"

    @property
    def labels(self) -> dict[str, Any]:
        """Scheduling labels for policies, and the timeout."""
        return {
            "priority": self.priority,
            "client": self.user,
            "deadline": self.deadline,
            "timeout": self.timeout,
            "extra": self.vllm_xargs,
        }


class Choices(Sampling):
    """Requests answered with choices, whole or streamed."""

    n: Whole = 1
    stream: bool = False
    stream_options: Annotated[StreamOptions, WithJsonSchema(StreamOptions.model_json_schema())] = (
        StreamOptions()
    )
    return_token_ids: bool = False

    @property
    def reports_usage(self) -> bool:
        """Whether a stream ends with its token usage."""
        return bool(self.stream_options.include_usage)

    @property
    def reports_usage_in_chunks(self) -> bool:
        """Whether every chunk includes the token usage."""
        return self.reports_usage and bool(self.stream_options.continuous_usage_stats)


class CompletionRequest(Choices):
    """`POST /v1/completions`."""

    prompt: Prompts
    max_tokens: Whole = 16
    best_of: Whole | None = None
    echo: bool = False
    logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None


class ChatRequest(Choices):
    """`POST /v1/chat/completions`."""

    messages: Messages
    max_completion_tokens: Whole | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] = 0

    @property
    def bound(self) -> str:
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    def sampling_params(self, **more: Any) -> SamplingParams:
        return super().sampling_params(logprobs=self.top_logprobs if self.logprobs else None)


class GenerateRequest(Sampling):
    """`POST /generate`."""

    prompt: Prompts
    max_tokens: Whole = 100
    max_length: Whole | None = None
    """Another name of max_tokens."""

    @property
    def bound(self) -> str:
        return "max_tokens" if self.max_length is None else "max_length"


@dataclass(frozen=True)
class ParsedRequest:
    """A validated request: prompts to be served together, and their parameters."""

    name: str
    """The request's id; the engine's, too, where there is one prompt."""
    prompts: Sequence[Sequence[int]]
    params: SamplingParams
    labels: dict[str, Any]
    """As `AsyncLLMEngine.open` takes them."""


class TokenizeRequest(Fields):
    """`POST /tokenize`: a prompt, or messages."""

    prompt: str | None = None
    messages: Messages | None = None
    add_generation_prompt: bool = True
    return_token_strs: bool = False


class DetokenizeRequest(Fields):
    """`POST /detokenize`."""

    tokens: Ids


class ErrorText(BaseModel):
    """What an error says."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorReply(BaseModel):
    """The body of an error response."""

    error: ErrorText


_REFUSAL = {"description": "An error", "model": ErrorReply}
REFUSALS: dict[int | str, dict[str, Any]] = {"4XX": _REFUSAL, "5XX": _REFUSAL}
"""Error responses of every path."""


def body(kind: type[BaseModel]) -> dict[str, Any]:
    """OpenAPI request body of a path that parses its body itself."""
    content = {"application/json": {"schema": kind.model_json_schema()}}
    return {"requestBody": {"required": True, "content": content}}
