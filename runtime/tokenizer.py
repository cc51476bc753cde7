"""Text to token ids and back, with the `tokenizers` library and the bundle's tokenizer.json."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ..errors import BundleError, RequestError
from .detokenizer import Detokenizer

if TYPE_CHECKING:
    import tokenizers

_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class Tokenizer:
    """A tokenizer and its special tokens; immutable, so one can serve many requests."""

    def __init__(self, data: bytes, config: Mapping[str, object], where: str) -> None:
        """From the bytes of tokenizer.json and the parsed tokenizer_config.json; raises BundleError."""
        self._tokenizer = _parse(data, where)
        self.special_tokens = _special_tokens(config)
        self.bos_id = self.token_id(self.special_tokens.get("bos_token"))
        self.eos_id = self.token_id(self.special_tokens.get("eos_token"))
        first = self._tokenizer.encode("a").ids[:1]
        self._adds_bos = self.bos_id is not None and (first == [self.bos_id] or config.get("add_bos_token") is True)

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included; the program's vocabulary may be padded beyond it."""
        return int(self._tokenizer.get_vocab_size())

    def token_id(self, token: str | None) -> int | None:
        """The id of a token given by its exact spelling, or None."""
        return None if token is None else self._tokenizer.token_to_id(token)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; raises RequestError for text that is not valid Unicode.

        With `add_special_tokens` a model that wants a beginning-of-sequence token gets it exactly once, also when
        `text` already spells it.
        """
        try:
            ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        except (UnicodeError, TypeError) as error:
            raise RequestError(f"the prompt is not valid Unicode text: {error}") from None
        if add_special_tokens and self._adds_bos:
            repeats = next((index for index, token_id in enumerate(ids) if token_id != self.bos_id), len(ids))
            ids = [self.bos_id or 0, *ids[repeats:]]
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of `token_ids`; bytes that are no valid UTF-8 become replacement characters."""
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens))

    def is_byte_token(self, token_id: int) -> bool:
        """Whether the token is one byte of a run that is only decoded as a whole, such as `<0xE2>`."""
        token = self._tokenizer.id_to_token(token_id)
        return token is not None and _BYTE_TOKEN.fullmatch(token) is not None

    def detokenizer(self) -> Detokenizer:
        """A fresh incremental decoder."""
        return Detokenizer(self)


def _parse(data: bytes, where: str) -> tokenizers.Tokenizer:
    from tokenizers import Tokenizer as Library

    try:
        tokenizer = Library.from_buffer(data)
    except BaseException as error:
        # The library reports some malformed files by a panic, which is not an Exception.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise BundleError(f"{where}: not a tokenizer that this version of tokenizers reads: {error}") from None
    # A file may carry the truncation and padding of its training; a prompt must never be cut or padded.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _special_tokens(config: Mapping[str, object]) -> dict[str, str]:
    tokens = {}
    for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
        value = config.get(name)
        if isinstance(value, Mapping):
            value = value.get("content")
        if isinstance(value, str):
            tokens[name] = value
    return tokens
