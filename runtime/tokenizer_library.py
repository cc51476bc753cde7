"""The `tokenizers` library with the whole of a tokenizer.json."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from ..errors import BundleError, RequestError
from .memory import trim_heap

if TYPE_CHECKING:
    import tokenizers


class TokenizerBackend(Protocol):
    """What `Tokenizer` is built on."""

    special_ids: frozenset[int]

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included."""
        ...

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of `text`, as the library's post-processor completes them."""
        ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """The text of `token_ids`; ids of no token are left out."""
        ...

    def token_id(self, token: str) -> int | None:
        """The id of a token given by its exact spelling."""
        ...

    def token(self, token_id: int) -> str | None:
        """The spelling of a token."""
        ...


class WholeTokenizer:
    """A `TokenizerBackend` that holds the whole vocabulary: about a second and 100 MB for 262,144 tokens."""

    def __init__(self, data: bytes, where: str) -> None:
        """From the bytes of tokenizer.json; raises BundleError."""
        self._library = parse(data, where)
        # Parsing leaves twice the tokenizer's own size behind.
        trim_heap()
        self.special_ids = special_ids(self._library)

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included."""
        return int(self._library.get_vocab_size())

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of `text`, as the library's post-processor completes them."""
        ids: list[int] = self._library.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """The text of `token_ids`; ids of no token are left out."""
        return str(self._library.decode(token_ids, skip_special_tokens=skip_special_tokens))

    def token_id(self, token: str) -> int | None:
        """The id of a token given by its exact spelling."""
        found: int | None = self._library.token_to_id(token)
        return found

    def token(self, token_id: int) -> str | None:
        """The spelling of a token."""
        found: str | None = self._library.id_to_token(token_id)
        return found


def parse(data: bytes, where: str) -> tokenizers.Tokenizer:
    """The library's tokenizer, without the truncation and padding of its training; raises BundleError."""
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_buffer(data)
    except BaseException as error:
        # The library reports some malformed files by a panic, which is not an Exception.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        text = " ".join(str(error).split())
        raise BundleError(f"{where}: not a tokenizer that this version of tokenizers reads: {text}") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def special_ids(tokenizer: tokenizers.Tokenizer) -> frozenset[int]:
    """The ids that `decode` leaves out."""
    added = tokenizer.get_added_tokens_decoder()
    return frozenset(token_id for token_id, token in added.items() if token.special)


class AbsentTokenizer:
    """Stands in where a bundle has no tokenizer: prompts must be token ids, and generated ids have no text."""

    vocab_size = 0
    special_ids: frozenset[int] = frozenset()

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Always raises RequestError."""
        raise RequestError("the bundle has no tokenizer; pass the prompt as token ids")

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """No text."""
        return ""

    def token_id(self, token: str) -> int | None:
        """No token is known."""
        return None

    def token(self, token_id: int) -> str | None:
        """No token is known."""
        return None
