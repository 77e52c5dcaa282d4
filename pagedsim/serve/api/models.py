"""What the server says of its model and of its tokens."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from pagedsim.serve.api.fields import DetokenizeRequest, TokenizeRequest
from pagedsim.serve.api.front import Front
from pagedsim.serve.api.problem import Bad
from pagedsim.serve.api.schema import body

PIECE = 65536
"""Values that are written as JSON at once; nothing else of Python runs meanwhile."""


def add_models(router: APIRouter, front: Front) -> None:
    """Add the paths that compute nothing."""

    def model() -> dict[str, Any]:
        return {
            "id": front.model,
            "object": "model",
            "created": front.created,
            "owned_by": "pagedsim",
            "root": front.model,
            "parent": None,
            "max_model_len": front.max_model_len,
        }

    @router.get("/v1/models")
    async def models() -> dict[str, Any]:
        """The model that is served."""
        return {"object": "list", "data": [model()]}

    @router.get("/v1/models/{name:path}")
    async def one_model(name: str) -> dict[str, Any]:
        """The same, by its name."""
        front.check_model(name)
        return model()

    @router.get("/result/{name}")
    async def result(name: str) -> dict[str, Any]:
        """What there is of a request that was sent to /generate."""
        return front.results.find(name).plain

    @router.post("/tokenize", openapi_extra=body(TokenizeRequest), response_class=JSONResponse)
    async def tokenize(request: Request) -> Response:
        """The tokens of a prompt, or of a conversation as the model reads it."""
        fields = await front.read(request, TokenizeRequest)
        if (fields.prompt is None) is (fields.messages is None):
            raise Bad("prompt: must be given, or messages in its place")
        if fields.prompt is not None:
            (ids,) = await front.words.tokens([fields.prompt])
        else:
            ids = await front.words.chat(fields.messages or [], fields.add_generation_prompt)
        with_texts = fields.return_token_strs
        text = await front.words.apart(len(ids), lambda: _tokens(front, ids, with_texts))
        return Response(text, media_type="application/json")

    @router.post("/detokenize", openapi_extra=body(DetokenizeRequest))
    async def detokenize(request: Request) -> dict[str, Any]:
        """The text of tokens."""
        fields = await front.read(request, DetokenizeRequest)
        return {"prompt": await front.words.long_text(fields.tokens)}


def _tokens(front: Front, ids: Sequence[int], with_texts: bool) -> str:
    """What /tokenize answers, with the text of each token where that is asked."""
    texts = _listed([front.words.token(one) for one in ids]) if with_texts else "null"
    about = f'"count":{len(ids)},"max_model_len":{front.max_model_len}'
    return f'{{{about},"tokens":{_listed(ids)},"token_strs":{texts}}}'


def _listed(values: Sequence[int | str]) -> str:
    """Values as JSON, piece by piece."""
    pieces = [
        json.dumps(values[at : at + PIECE], separators=(",", ":"))[1:-1]
        for at in range(0, len(values), PIECE)
    ]
    return f"[{','.join(pieces)}]"
