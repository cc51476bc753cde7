"""Text to token ids and back, with the rules that a model's special tokens follow."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from ..errors import RequestError
from .detokenizer import Detokenizer
from .tokenizer_library import TokenizerBackend

_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class Tokenizer:
    """A tokenizer and its special tokens; immutable, so one can serve many requests."""

    def __init__(self, backend: TokenizerBackend, config: Mapping[str, object]) -> None:
        """From a backend and the parsed tokenizer_config.json."""
        self._backend = backend
        self.special_tokens = _special_tokens(config)
        self.bos_id = self.token_id(self.special_tokens.get("bos_token"))
        self.eos_id = self.token_id(self.special_tokens.get("eos_token"))
        first = backend.encode("a", add_special_tokens=True)[:1] if backend.vocab_size else []
        self._adds_bos = self.bos_id is not None and (first == [self.bos_id] or config.get("add_bos_token") is True)

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included; the program's vocabulary may be padded beyond it."""
        return self._backend.vocab_size

    def token_id(self, token: str | None) -> int | None:
        """The id of a token given by its exact spelling, or None."""
        return None if token is None else self._backend.token_id(token)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; raises RequestError for text that is not valid Unicode.

        With `add_special_tokens` a model that wants a beginning-of-sequence token gets it exactly once, also when
        `text` already spells it.
        """
        try:
            ids = self._backend.encode(text, add_special_tokens=add_special_tokens)
        except (UnicodeError, TypeError) as error:
            raise RequestError(f"the prompt is not valid Unicode text: {error}") from None
        if add_special_tokens and self._adds_bos:
            repeats = next((index for index, token_id in enumerate(ids) if token_id != self.bos_id), len(ids))
            ids = [self.bos_id or 0, *ids[repeats:]]
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of `token_ids`; bytes that are no valid UTF-8 become replacement characters."""
        return self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def leaves_out(self, token_id: int) -> bool:
        """Whether `decode` passes over the id: a special token, or no token at all, as in a padded vocabulary."""
        return token_id in self._backend.special_ids or self._backend.token(token_id) is None

    def is_byte_token(self, token_id: int) -> bool:
        """Whether the token is one byte of a run that is only decoded as a whole, such as `<0xE2>`."""
        token = self._backend.token(token_id)
        return token is not None and _BYTE_TOKEN.fullmatch(token) is not None

    def detokenizer(self) -> Detokenizer:
        """A fresh incremental decoder."""
        return Detokenizer(self)


def _special_tokens(config: Mapping[str, object]) -> dict[str, str]:
    tokens = {}
    for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
        value = config.get(name)
        if isinstance(value, Mapping):
            value = value.get("content")
        if isinstance(value, str):
            tokens[name] = value
    return tokens
