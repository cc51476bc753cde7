"""Turns whatever a caller may pass as a prompt into token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias, cast

import numpy as np

from ..errors import RequestError
from .chat import MAX_CHARACTERS, ChatTemplate, Message
from .tokenizer import Tokenizer

Prompt: TypeAlias = str | Sequence[int] | Sequence[Message]


def is_batch(prompt: Prompt | Sequence[Prompt]) -> bool:
    """Whether `prompt` is a list of prompts; a list of ids or of messages is one prompt."""
    if isinstance(prompt, str | bytes) or not isinstance(prompt, Sequence):
        return False
    return len(prompt) > 0 and not isinstance(prompt[0], int | np.integer | Mapping)


class PromptEncoder:
    """Encodes the prompts of one model."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None, vocab_size: int) -> None:
        self.tokenizer = tokenizer
        self.template = template
        self.vocab_size = vocab_size

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of `prompt`: a text as it stands, ids checked, or messages rendered by the chat template.

        Raises RequestError.
        """
        if isinstance(prompt, str):
            if len(prompt) > MAX_CHARACTERS:
                raise RequestError(f"the prompt has {len(prompt)} characters; at most {MAX_CHARACTERS} are tokenized")
            ids = self.tokenizer.encode(prompt)
        elif not isinstance(prompt, Sequence) or isinstance(prompt, bytes):
            raise RequestError(f"prompt is {prompt!r:.80}; expected text, a list of token ids or a list of messages")
        elif len(prompt) > 0 and isinstance(prompt[0], Mapping):
            ids = self.encode_chat(cast("Sequence[Message]", prompt))
        else:
            ids = list(cast("Sequence[int]", prompt))
        if not ids:
            raise RequestError("the prompt is empty; expected at least one token")
        ids = [int(i) if isinstance(i, np.integer) else i for i in ids]
        for index, token_id in enumerate(ids):
            if not isinstance(token_id, int) or isinstance(token_id, bool) or not 0 <= token_id < self.vocab_size:
                raise RequestError(
                    f"prompt token {index} is {token_id!r:.80}; expected a token id from 0 to {self.vocab_size - 1}"
                )
        return ids

    def encode_chat(self, messages: Sequence[Message], **options: object) -> list[int]:
        """Token ids of a conversation; the template, not the tokenizer, places the special tokens."""
        if self.template is None:
            raise RequestError("the model has no chat template; pass the prompt as text or token ids")
        return self.tokenizer.encode(self.template.render(messages, **options), add_special_tokens=False)
