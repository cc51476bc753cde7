"""Turns a growing list of token ids into text, piece by piece, without ever taking a piece back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Decoder(Protocol):
    """What a detokenizer asks of a tokenizer."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of `token_ids` without special tokens."""
        ...

    def leaves_out(self, token_id: int) -> bool:
        """Whether `decode` passes over the id: a special token, or no token at all."""
        ...

    def is_byte_token(self, token_id: int) -> bool:
        """Whether the token is one byte of a run that is only decoded as a whole, such as `<0xE2>`."""
        ...


class Detokenizer:
    """Incremental decoding: the pieces, joined, are exactly `decode` of all ids.

    Only a window of recent ids is decoded at each step. It begins where an earlier piece began, so that a decoder
    which treats the first token apart (by stripping its space) does so alike with and without the new ids. A piece is
    withheld while the text ends in an incomplete UTF-8 sequence, and during a run of byte tokens: one bad byte
    turns the whole run into replacement characters.
    """

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._ids: list[int] = []
        self._window = 0  # where decoding begins
        self._shown = 0  # ids before it have been returned as text
        self._window_text = ""  # decode(ids[window:shown])
        self._length = 0  # characters returned so far

    def push(self, token_id: int) -> str:
        """Add one id; returns the text that it completes, often more or less than one token's."""
        if self._decoder.leaves_out(token_id):
            return ""  # a run of bytes may go on after it
        self._ids.append(token_id)
        if self._decoder.is_byte_token(token_id):
            return ""
        text = self._decoder.decode(self._ids[self._window :])
        if text.endswith(REPLACEMENT) or not text.startswith(self._window_text):
            return ""
        piece = text[len(self._window_text) :]
        recent = self._decoder.decode(self._ids[self._shown :])
        if recent:
            self._window, text = self._shown, recent
        self._shown, self._window_text = len(self._ids), text
        self._length += len(piece)
        return piece

    def finish(self) -> str:
        """The withheld rest, with replacement characters for bytes that never became a character."""
        if self._shown == len(self._ids):
            return ""
        self._shown = len(self._ids)
        return self._decoder.decode(self._ids)[self._length :]
