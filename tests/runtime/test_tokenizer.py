from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_tokenizer import ADDED_TOKENS, SPECIAL_TOKENS, tiny_backend
from tokenizers import decoders, processors
from transformers import PreTrainedTokenizerFast

from qwen4exp_trt.errors import BundleError, RequestError
from qwen4exp_trt.runtime.tokenizer import IncrementalDetokenizer, Tokenizer

TOKENIZER = Tokenizer(tiny_backend())
BACKEND = tiny_backend()
FOUR_TOKENS = "\U00010348"
"""A character whose four bytes are a token each, as no merge of the training text joins them."""

unicode_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)
marked_text = st.lists(st.one_of(unicode_text, st.sampled_from(SPECIAL_TOKENS + ADDED_TOKENS)), max_size=6).map("".join)
any_ids = st.lists(st.integers(0, TOKENIZER.vocab_size + 3), max_size=60)
"""Arbitrary ids: bytes that are not UTF-8, special tokens inside characters, ids that no token has."""


def _id(text: str) -> int:
    token_id = BACKEND.token_to_id(text)
    assert token_id is not None
    return token_id


def _detokenize(token_ids: list[int], skip_special_tokens: bool) -> list[str]:
    """The pieces of each token and of the flush."""
    detokenizer = IncrementalDetokenizer(TOKENIZER, skip_special_tokens)
    return [*(detokenizer.feed(token_id) for token_id in token_ids), detokenizer.flush()]


# Whole texts


@given(marked_text)
def test_text_survives_encode_and_decode(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text), skip_special_tokens=False) == text


def test_special_tokens_in_text_are_parsed_and_skipped_on_request() -> None:
    ids = TOKENIZER.encode("<|im_start|>user\n<think>hi</think><|im_end|>")
    assert ids[0] == _id("<|im_start|>") and ids[-1] == _id("<|im_end|>")
    assert TOKENIZER.decode(ids) == "user\n<think>hi</think>"
    assert TOKENIZER.decode(ids, skip_special_tokens=False) == "<|im_start|>user\n<think>hi</think><|im_end|>"


def test_nothing_is_added_but_by_the_post_processor() -> None:
    assert TOKENIZER.encode("the fox") == BACKEND.encode("the fox", add_special_tokens=False).ids
    backend = tiny_backend()
    backend.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", _id("<|endoftext|>"))]
    )
    tokenizer = Tokenizer(backend)
    assert tokenizer.encode("the fox") == [_id("<|endoftext|>"), *TOKENIZER.encode("the fox")]
    assert tokenizer.encode("the fox", add_special_tokens=False) == TOKENIZER.encode("the fox")


@given(marked_text)
@settings(max_examples=50)
def test_same_as_transformers(text: str) -> None:
    reference = _TRANSFORMERS
    ids = TOKENIZER.encode(text)
    assert ids == reference.encode(text)
    for skip in (True, False):
        assert TOKENIZER.decode(ids, skip) == reference.decode(ids, skip_special_tokens=skip)


_TRANSFORMERS = PreTrainedTokenizerFast(tokenizer_object=tiny_backend(), clean_up_tokenization_spaces=False)


def test_vocab_size_counts_added_tokens_and_holes() -> None:
    assert TOKENIZER.vocab_size == _id(ADDED_TOKENS[-1]) + 1
    data = json.loads(tiny_backend().to_str())
    data["model"]["vocab"]["the"] = 1000
    backend = tiny_backend().from_str(json.dumps(data))
    assert backend.get_vocab_size() < 1000 < Tokenizer(backend).vocab_size


# Token by token


@settings(max_examples=300)
@given(marked_text, st.booleans())
def test_pieces_of_a_text_are_whole_characters(text: str, skip: bool) -> None:
    pieces = _detokenize(TOKENIZER.encode(text), skip)
    assert "".join(pieces) == TOKENIZER.decode(TOKENIZER.encode(text), skip)
    assert pieces[-1] == ""
    assert "\ufffd" in text or not any("\ufffd" in piece for piece in pieces)


@settings(max_examples=400)
@given(any_ids, st.booleans())
def test_pieces_of_arbitrary_ids_are_the_whole_decode(token_ids: list[int], skip: bool) -> None:
    assert "".join(_detokenize(token_ids, skip)) == TOKENIZER.decode(token_ids, skip)


def test_incomplete_character_is_held_back_then_emitted_or_broken() -> None:
    first, *rest = TOKENIZER.encode(FOUR_TOKENS)
    assert _detokenize([first, *rest], True) == ["", "", "", FOUR_TOKENS, ""]
    assert _detokenize([first, rest[0]], True) == ["", "", "\ufffd"]
    assert _detokenize([first, _id("a")], True) == ["", "\ufffda", ""]


def test_skipped_special_token_does_not_break_a_character() -> None:
    first, *rest = TOKENIZER.encode(FOUR_TOKENS)
    ids = [first, _id("<|im_end|>"), *rest]
    assert "".join(_detokenize(ids, True)) == FOUR_TOKENS
    assert _detokenize(ids, False)[1] == "\ufffd<|im_end|>"


def test_work_per_token_is_constant(monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken bytes are emitted at once, not gathered, and nothing is ever decoded again."""

    def refuse(*_: Any) -> str:
        raise AssertionError("decoded a whole text")

    monkeypatch.setattr(Tokenizer, "decode", refuse)
    continuation_byte = TOKENIZER.encode(FOUR_TOKENS)[1]
    pieces = _detokenize([continuation_byte] * 2000, True)
    assert pieces[:-1] == ["\ufffd"] * 2000


# Folders


def test_folder_without_tokenizer_files_has_none(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text("{}")
    assert Tokenizer.from_dir(tmp_path) is None
    assert Tokenizer.from_dir(str(tmp_path)) is None


def test_folder_round_trip_drops_truncation_and_padding(tmp_path: Path) -> None:
    backend = tiny_backend()
    backend.enable_truncation(3)
    backend.enable_padding(length=50)
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.from_dir(tmp_path)
    text = "the quick brown fox jumps over the lazy dog"
    assert tokenizer is not None and tokenizer.encode(text) == TOKENIZER.encode(text)


def test_a_folder_in_place_of_the_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").mkdir()
    with pytest.raises(BundleError, match=r"tokenizer\.json is not a tokenizer .*Is a directory"):
        Tokenizer.from_dir(tmp_path)


def test_other_vocabulary_files_alone_are_refused(tmp_path: Path) -> None:
    (tmp_path / "vocab.json").write_text("{}")
    (tmp_path / "merges.txt").write_text("")
    with pytest.raises(BundleError, match=r"has vocab.json, merges.txt but no tokenizer.json.*save_pretrained"):
        Tokenizer.from_dir(tmp_path)


@pytest.mark.parametrize("content", ["", "{", "{}", '{"model": {"type": "none"}}'])
def test_damaged_file_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(BundleError, match=r"tokenizer.json is not a tokenizer"):
        Tokenizer.from_dir(tmp_path)


@pytest.mark.parametrize(("decoder", "found"), [(decoders.Metaspace(), "the decoder Metaspace"), (None, "no decoder")])
def test_tokenizer_that_is_not_byte_level_is_refused(tmp_path: Path, decoder: Any, found: str) -> None:
    data = json.loads(tiny_backend().to_str())
    data["decoder"] = None if decoder is None else {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always"}
    (tmp_path / "tokenizer.json").write_text(json.dumps(data))
    with pytest.raises(BundleError, match=rf"has {found}; .* byte-level"):
        Tokenizer.from_dir(tmp_path)


# Bad text


@pytest.mark.parametrize("text", [None, 5, b"the", ["the"]])
def test_prompt_that_is_not_text_is_refused(text: Any) -> None:
    with pytest.raises(RequestError, match=f"must be a str, not {type(text).__name__}"):
        TOKENIZER.encode(text)


def test_lone_surrogate_is_refused_by_position() -> None:
    with pytest.raises(RequestError, match=r"lone surrogate U\+D83D at position 4"):
        TOKENIZER.encode("fox \ud83d")
