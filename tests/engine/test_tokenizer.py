"""Tokenizers, and text that grows token by token."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from transformers import LlamaConfig, PreTrainedTokenizerFast

from pagedsim.core.errors import ConfigError
from pagedsim.engine.output import Tokenizer
from pagedsim.engine.tokenizer import (
    ByteTokenizer,
    Detokenizer,
    HuggingFaceTokenizer,
    load_tokenizer,
)

BYTES = ByteTokenizer()


def spelling() -> PreTrainedTokenizerFast:
    """Words with a mark for the space before them, and bytes for what is no word of it."""
    words = ["▁Hello", "▁world", "▁", "wor", "ld", ",", "é", "a", "▁a"]
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2}
    vocabulary |= {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    vocabulary |= {word: 259 + i for i, word in enumerate(words)}
    backend = Backend(models.BPE(vocabulary, [], byte_fallback=True, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def byte_level() -> PreTrainedTokenizerFast:
    """As GPT-2's: each byte a character of its own, and a token across two characters' bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: i for i, letter in enumerate(alphabet)}
    across = "¥æ"  # the last byte of one character and the first of the next
    vocabulary |= {across: 256, "<|end|>": 257}
    backend = Backend(models.BPE(vocabulary, [("¥", "æ")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>")


SPELLING, BYTE_LEVEL = HuggingFaceTokenizer(spelling()), HuggingFaceTokenizer(byte_level())


def spelled(*tokens: str) -> list[int]:
    ids = SPELLING.backend.convert_tokens_to_ids(list(tokens))
    assert 0 not in ids
    return list(ids)


def pieces(tokenizer: Tokenizer, ids: Sequence[int], prompt: Sequence[int] = ()) -> list[str]:
    """What each token adds, and last what is left at the end."""
    detokenizer = Detokenizer(tokenizer, prompt)
    out = [detokenizer.push(token) for token in ids]
    return [*out, detokenizer.finish()]


@given(st.text())
def test_bytes_there_and_back(text: str) -> None:
    ids = BYTES.encode(text)
    assert all(0 <= token < 256 for token in ids)
    try:
        text.encode()
    except UnicodeEncodeError:
        return  # half a surrogate pair is no text
    assert BYTES.decode(ids) == text
    assert "".join(pieces(BYTES, ids)) == text


@pytest.mark.parametrize(
    ("prompt", "ids", "wanted"),
    [
        ([], BYTES.encode("aé日😀b"), ["a", "", "é", "", "", "日", "", "", "", "😀", "b", ""]),
        ([], [0xC3, 300, 400, 0xA9, 300], ["", "", "", "é", "", ""]),  # tokens without text
        ([], [97, 0xE6, 0x97], ["a", "", "", "\ufffd"]),  # half a character at the end
        ([], [0xFF, 0xFE, 97], ["", "", "\ufffd\ufffda", ""]),  # bytes that are no character
        (BYTES.encode("né")[:-1], [0xA9, 97], ["é", "a", ""]),  # a prompt that ends within one
    ],
)
def test_a_character_comes_whole(prompt: list[int], ids: list[int], wanted: list[str]) -> None:
    assert pieces(BYTES, ids, prompt) == wanted


def test_garbage_and_silence_without_end_are_not_held_for_ever() -> None:
    out = pieces(BYTES, [0x80] * 1000)
    assert "".join(out) == "\ufffd" * 1000
    assert max(map(len, out)) <= Detokenizer.MAX_PENDING
    for silent in (300, 257):
        detokenizer = Detokenizer(BYTES)
        assert {detokenizer.push(silent) for _ in range(1000)} == {""}
        assert len(detokenizer._pending) < Detokenizer.MAX_PENDING
        assert detokenizer.push(97) == "a"


@given(st.lists(st.integers(0, 511), max_size=200))
def test_any_bytes_grow_to_what_they_decode_to(ids: list[int]) -> None:
    assert "".join(pieces(BYTES, ids)) == BYTES.decode(ids)


@pytest.mark.parametrize(
    ("prompt", "words", "wanted"),
    [
        (
            [],
            ["▁Hello", "▁world", ",", "▁a", "▁", "▁world"],
            ["Hello", " world", ",", " a", " ", " world"],
        ),
        ([], ["▁", "▁world"], ["", " world"]),
        (["<s>", "▁Hello"], ["▁world", ","], [" world", ","]),
        (["<s>", "▁Hello"], ["wor", "ld"], ["wor", "ld"]),
        ([], ["▁Hello", "</s>", "</s>", "▁world"], ["Hello", "", "", " world"]),
    ],
)
def test_spaces_belong_to_the_word_after_them(
    prompt: list[str], words: list[str], wanted: list[str]
) -> None:
    ids = spelled(*words)
    assert pieces(SPELLING, ids, spelled(*prompt)) == [*wanted, ""]
    if not prompt:
        assert SPELLING.decode(ids) == "".join(wanted)


@given(st.text(st.characters(codec="utf-8"), max_size=40))
def test_byte_level_text_grows_to_itself(text: str) -> None:
    out = pieces(BYTE_LEVEL, BYTE_LEVEL.encode(text))
    assert "".join(out) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in out)


class Slowly:
    """Decodes as transformers does, without short cuts for single tokens."""

    def __init__(self, tokenizer: Any) -> None:
        self.encode = tokenizer.encode
        self._decode = getattr(tokenizer, "backend", tokenizer).decode
        self._settings = (
            {}
            if tokenizer is BYTES
            else {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
        )

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._decode(list(ids), **self._settings))


@pytest.mark.parametrize("tokenizer", [BYTES, SPELLING, BYTE_LEVEL], ids=["bytes", "words", "BPE"])
@given(st.data())
def test_texts_of_single_tokens_change_no_piece(tokenizer: Any, data: st.DataObject) -> None:
    """Also beside halves of characters, bytes that are none, and tokens without a text."""
    known = st.integers(0, 511 if tokenizer is BYTES else len(tokenizer.backend) - 1)
    letters = st.sampled_from(tokenizer.encode("aé日 ,"))
    ids = data.draw(st.lists(known | letters, max_size=90))
    prompt = data.draw(st.lists(known | letters, max_size=8))
    assert pieces(tokenizer, ids, prompt) == pieces(Slowly(tokenizer), ids, prompt)


def test_a_tokenizer_whose_class_decodes_in_its_own_way_is_not_passed_over() -> None:
    class Loud(PreTrainedTokenizerFast):
        def _decode(self, *ids: Any, **settings: Any) -> str:
            return str(super()._decode(*ids, **settings)).upper()

    loud = HuggingFaceTokenizer(Loud(tokenizer_object=byte_level().backend_tokenizer))
    assert "".join(pieces(loud, BYTE_LEVEL.encode("aé"))) == "AÉ"


def test_where_a_tokenizer_comes_from(tmp_path: Path) -> None:
    assert isinstance(load_tokenizer("tiny"), ByteTokenizer)
    assert load_tokenizer(LlamaConfig()) is load_tokenizer(tmp_path) is None
    LlamaConfig().save_pretrained(tmp_path)
    assert load_tokenizer(tmp_path) is None
    spelling().save_pretrained(tmp_path)
    tokenizer = load_tokenizer(str(tmp_path))
    assert tokenizer is not None
    ids = spelled("▁Hello", "▁world", "</s>")
    assert tokenizer.decode(ids) == "Hello world"
    assert tokenizer.encode("a") == spelled("▁", "a")
    (tmp_path / "tokenizer.json").write_text("{")
    for place, line in (
        (tmp_path, "its tokenizer cannot be loaded: "),
        (tmp_path / "gone", "no such folder"),
    ):
        with pytest.raises(ConfigError) as caught:
            load_tokenizer(place)
        assert str(caught.value).startswith(f"model={place}: {line}")
        assert "\n" not in str(caught.value)
