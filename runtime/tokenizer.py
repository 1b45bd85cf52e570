"""Text to token ids and back, through the ``tokenizers`` library."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from pathlib import Path

import tokenizers
from tokenizers import decoders

from qwen4exp_trt.errors import BundleError, RequestError

TOKENIZER_FILE = "tokenizer.json"
_OTHER_VOCABULARY_FILES = ("vocab.json", "merges.txt", "tokenizer.model", "vocab.txt")


def _byte_from_char_table() -> dict[str, int]:
    """The byte behind each character of a byte-level vocabulary.

    Printable Latin-1 bytes stand for themselves, all others, in order, for the characters from U+0100 on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    table = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in printable]
    return table | {chr(0x100 + index): byte for index, byte in enumerate(others)}


_BYTE_FROM_CHAR = _byte_from_char_table()


class Tokenizer:
    """A byte-level BPE tokenizer read from ``tokenizer.json``."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        self._special_ids = {
            token_id for token_id, token in backend.get_added_tokens_decoder().items() if token.special
        }
        self._bytes_by_id: dict[int, bytes] = {}
        self.added_token_ids = tuple(sorted(backend.get_added_tokens_decoder()))
        """Of the tokens that are no pieces of text: special ones, tags of chats and tools."""
        self.vocab_size = max(backend.get_vocab().values()) + 1
        """One more than the largest id of any token, added tokens included."""

    @classmethod
    def from_dir(cls, path: str | Path) -> Tokenizer | None:
        """The tokenizer of a checkpoint or bundle folder, or None if the folder has no tokenizer files.

        Raises BundleError for a tokenizer.json that is damaged or not byte-level, or missing beside other files.
        """
        file = Path(path) / TOKENIZER_FILE
        if not file.exists():
            others = [name for name in _OTHER_VOCABULARY_FILES if (file.parent / name).is_file()]
            if others:
                raise BundleError(
                    f"{file.parent} has {', '.join(others)} but no {TOKENIZER_FILE}, the only tokenizer format read "
                    f"here; save the tokenizer with transformers' save_pretrained to get one"
                )
            return None
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises no narrower class
            raise BundleError(f"{file} is not a tokenizer that the tokenizers library can read: {error}") from error
        if not isinstance(backend.decoder, decoders.ByteLevel):
            found = "no decoder" if backend.decoder is None else f"the decoder {type(backend.decoder).__name__}"
            raise BundleError(f"{file} has {found}; the model's tokenizer is byte-level BPE with the decoder ByteLevel")
        # Both may be left over from training; a prompt is neither cut nor padded.
        backend.no_truncation()
        backend.no_padding()
        return cls(backend)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of ``text``. Special tokens spelled out in it are parsed.

        ``add_special_tokens`` lets the tokenizer's own post-processor add its tokens; a rendered chat has them already.
        """
        if not isinstance(text, str):
            raise RequestError(f"a text prompt must be a str, not {type(text).__name__}: {text!r}")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            found = f"the lone surrogate U+{ord(text[error.start]):04X} at position {error.start}"
            raise RequestError(f"the text has {found}; text must be valid Unicode") from error
        return self._backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of all of ``token_ids``; ids without a token have no text, broken UTF-8 becomes U+FFFD."""
        return self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special_ids

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that the token adds to the text, often only a part of a character."""
        if token_id not in self._bytes_by_id:
            self._bytes_by_id[token_id] = _bytes_from_token(self._backend.id_to_token(token_id) or "")
        return self._bytes_by_id[token_id]


def _bytes_from_token(token: str) -> bytes:
    if all(char in _BYTE_FROM_CHAR for char in token):
        return bytes(_BYTE_FROM_CHAR[char] for char in token)
    return token.encode()  # an added token is spelled as it is


class IncrementalDetokenizer:
    """Text of one request's output, token by token: the pieces joined are ``Tokenizer.decode`` of all ids.

    Bytes of a character that is not complete yet are held back, so that no piece has a broken character.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._utf8_decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, token_id: int) -> str:
        """The text that ``token_id`` completes, which may be empty."""
        if self._skip_special_tokens and self._tokenizer.is_special(token_id):
            return ""
        return self._utf8_decoder.decode(self._tokenizer.token_bytes(token_id))

    def flush(self) -> str:
        """End the text: U+FFFD if the last character never became complete, else nothing."""
        return self._utf8_decoder.decode(b"", final=True)
