"""What stands in a prompt on the wire: token ids or words, the same for the same seed."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pagedsim.core import Request
from pagedsim.core.symbolic_prompt import SymbolicPrompt

FIRST_ID, LAST_ID = 3, 255
"""Ids that every vocabulary has, and that mean no beginning and no end."""
_SHORT = (
    "the of and to in is that for it as was with be by on not he his but at are this have from or "
    "had an they which one you were all her she there would their we him been has when who will "
    "no more if out so up said what its about than into them can only other time new some could "
    "these two may first then do any like my now over such our man me even most made after also "
    "did many off before must well back through years much where your way down should because "
    "long each just state those people too mr how little good world make very year still see work "
    "life men here get day "
)
WORDS = _SHORT.split()
"""Short words, of which most tokenizers make a token each."""

_ODD = 0x9E3779B97F4A7C15
_MIX = np.uint64(0xBF58476D1CE4E5B9)
_ALL = 1 << 64


class Contents:
    """What the prompts of one run hold.

    Two prompts begin alike just where the workload says so; other seeds have other prompts, which
    a prefix cache has not seen.
    """

    def __init__(self, seed: int) -> None:
        self._seed = np.uint64((seed + 1) * _ODD % _ALL)

    def ids(self, request: Request) -> list[int]:
        """Token ids, as many as the prompt has."""
        named = self._mixed(_named(request))
        return (FIRST_ID + named % np.uint64(LAST_ID - FIRST_ID + 1)).tolist()

    def text(self, request: Request) -> str:
        """Words, as many as the prompt has tokens: about as many tokens, then."""
        places = self._mixed(_named(request)) % np.uint64(len(WORDS))
        return " ".join([WORDS[place] for place in places.tolist()])

    def _mixed(self, named: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Numbers without a pattern, equal where those given are."""
        mixed = (named ^ self._seed) * np.uint64(_ODD)
        mixed ^= mixed >> np.uint64(29)
        mixed *= _MIX
        return mixed >> np.uint64(33)


def _named(request: Request) -> NDArray[np.uint64]:
    """A number for each token, the same where tokens are."""
    prompt = request.prompt
    if prompt is None:
        return _stream(int(request.id), request.prompt_len)
    if isinstance(prompt, SymbolicPrompt):
        return np.concatenate([_stream(stream, length) for stream, length in prompt.runs])
    return np.asarray(prompt, dtype=np.uint64)


def _stream(stream: int, length: int) -> NDArray[np.uint64]:
    begin = stream * _ODD % _ALL  # far from that of any other
    return np.arange(length, dtype=np.uint64) + np.uint64(begin)
