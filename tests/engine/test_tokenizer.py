"""Tokenizers, and text that grows token by token."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from transformers import LlamaConfig, PreTrainedTokenizerFast

from pagedsim.core.errors import ConfigError
from pagedsim.engine.detokenizer import Detokenizer
from pagedsim.engine.tokenizer import (
    ByteTokenizer,
    HuggingFaceTokenizer,
    Tokenizer,
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
    out.append(detokenizer.finish())
    assert detokenizer.text == "".join(out)
    return out


# Bytes.


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


def test_tokens_that_are_no_bytes_have_no_text() -> None:
    assert BYTES.eos_token_id == 257
    assert BYTES.decode([104, 256, 105, 257, 258, 511]) == "hi"
    assert BYTES.decode([]) == ""
    assert BYTES.decode([0xE6, 0x97]) == "\ufffd"


# Text that grows.


def test_a_character_comes_whole() -> None:
    ids = BYTES.encode("aé日😀b")
    assert pieces(BYTES, ids) == ["a", "", "é", "", "", "日", "", "", "", "😀", "b", ""]


def test_tokens_without_text_do_not_break_a_character() -> None:
    assert pieces(BYTES, [0xC3, 300, 400, 0xA9, 300]) == ["", "", "", "é", "", ""]


def test_half_a_character_at_the_end_is_shown_as_such() -> None:
    assert pieces(BYTES, [97, 0xE6, 0x97]) == ["a", "", "", "\ufffd"]


def test_bytes_that_are_no_character_are_shown_when_that_is_certain() -> None:
    assert pieces(BYTES, [0xFF, 0xFE, 97]) == ["", "", "\ufffd\ufffda", ""]


def test_garbage_without_end_is_not_held_for_ever() -> None:
    out = pieces(BYTES, [0x80] * 1000)
    assert "".join(out) == "\ufffd" * 1000
    assert max(map(len, out)) <= Detokenizer.MAX_PENDING


@pytest.mark.parametrize("silent", [300, 257])
def test_silence_without_end_is_not_kept(silent: int) -> None:
    detokenizer = Detokenizer(BYTES)
    assert {detokenizer.push(silent) for _ in range(1000)} == {""}
    assert len(detokenizer._pending) < Detokenizer.MAX_PENDING
    assert detokenizer.push(97) == "a"


@given(st.lists(st.integers(0, 511), max_size=200))
def test_any_bytes_grow_to_what_they_decode_to(ids: list[int]) -> None:
    assert "".join(pieces(BYTES, ids)) == BYTES.decode(ids)


def test_spaces_belong_to_the_word_after_them() -> None:
    ids = spelled("▁Hello", "▁world", ",", "▁a", "▁", "▁world")
    assert SPELLING.decode(ids) == "Hello world, a  world"
    assert pieces(SPELLING, ids) == ["Hello", " world", ",", " a", " ", " world", ""]


def test_a_space_at_the_beginning() -> None:
    ids = spelled("▁", "▁world")
    assert "".join(pieces(SPELLING, ids)) == SPELLING.decode(ids) == " world"


def test_behind_a_prompt_a_first_word_keeps_its_space() -> None:
    prompt = spelled("<s>", "▁Hello")
    assert pieces(SPELLING, spelled("▁world", ","), prompt) == [" world", ",", ""]
    assert pieces(SPELLING, spelled("wor", "ld"), prompt) == ["wor", "ld", ""]


def test_special_tokens_between_words() -> None:
    ids = spelled("▁Hello", "</s>", "</s>", "▁world")
    assert pieces(SPELLING, ids) == ["Hello", "", "", " world", ""]


def test_a_prompt_that_ends_within_a_character() -> None:
    cut = BYTES.encode("né")[:-1]
    assert pieces(BYTES, [0xA9, 97], cut) == ["é", "a", ""]


def test_characters_spelled_in_bytes() -> None:
    """This decoder has a whole run of bytes wrong until it is a text: seven times \ufffd here."""
    run = [f"<0x{byte:02X}>" for byte in "日本é😀".encode()]
    ids = spelled("▁a", *run, "▁world")
    out = pieces(SPELLING, ids)
    assert [piece for piece in out if piece] == ["a", "日", "本", "é", "😀", " world"]
    assert "".join(out) == SPELLING.decode(ids)


def test_a_token_across_two_characters() -> None:
    """日 and æ's successor share a token: the first is out when the second is only begun."""
    ids = [*BYTE_LEVEL.encode("日")[:-1], 256, *BYTE_LEVEL.encode("本")[1:]]
    assert BYTE_LEVEL.decode(ids) == "日本"
    assert [piece for piece in pieces(BYTE_LEVEL, ids) if piece] == ["日", "本"]


@given(st.text(st.characters(codec="utf-8"), max_size=40))
def test_byte_level_text_grows_to_itself(text: str) -> None:
    out = pieces(BYTE_LEVEL, BYTE_LEVEL.encode(text))
    assert "".join(out) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in out)


def test_a_copy_goes_its_own_way() -> None:
    first = Detokenizer(BYTES)
    for token in (97, 0xC3):
        first.push(token)
    second = first.copy()
    assert (first.push(0xA9), second.push(0xA8)) == ("é", "è")
    assert (first.text, second.text) == ("aé", "aè")


# Where tokenizers come from.


def test_the_tiny_model_speaks_bytes() -> None:
    assert isinstance(load_tokenizer("tiny"), ByteTokenizer)


def test_an_object_or_a_bare_folder_has_none(tmp_path: Path) -> None:
    config = LlamaConfig()
    assert load_tokenizer(config) is None
    assert load_tokenizer(tmp_path) is None
    config.save_pretrained(tmp_path)
    assert load_tokenizer(tmp_path) is None


def test_a_folder_with_one(tmp_path: Path) -> None:
    spelling().save_pretrained(tmp_path)
    tokenizer = load_tokenizer(str(tmp_path))
    assert tokenizer is not None
    assert tokenizer.eos_token_id == 2
    ids = spelled("▁Hello", "▁world", "</s>")
    assert tokenizer.decode(ids) == "Hello world"
    assert tokenizer.encode("a") == spelled("▁", "a")


def test_a_broken_one(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError) as caught:
        load_tokenizer(tmp_path)
    (line,) = str(caught.value).splitlines()
    assert line.startswith(f"model={tmp_path}: its tokenizer cannot be loaded: ")


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_tokenizer(tmp_path / "gone")
    assert str(caught.value) == f"model={tmp_path / 'gone'}: no such folder"
