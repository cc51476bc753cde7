"""Turns records into token ids as the model will meet them when it serves: chat template applied, one token that begins the text."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from ...errors import CheckpointError, RequestError
from ...runtime.chat import ChatTemplate
from ...runtime.prompt import PromptEncoder
from ...runtime.tokenizer import Tokenizer
from ...runtime.tokenizer_library import WholeTokenizer
from .calibration import CalibrationError
from .sources import Record


class SampleEncoder:
    """Encodes the records of one source and counts what was doubtful about them."""

    def __init__(self, tokenizer_folder: Path | None, vocab_size: int) -> None:
        """`tokenizer_folder` holds what `Checkpoint.write_tokenizer` writes; with None only token ids are accepted.

        Raises CheckpointError or BundleError for files that are not a tokenizer's.
        """
        self.vocab_size = vocab_size
        self.prompts = None if tokenizer_folder is None else _read_prompt_encoder(tokenizer_folder, vocab_size)
        # What the model expects before any text: [bos] or nothing.
        self.prefix: list[int] = []
        if self.prompts is not None:
            tokenizer = self.prompts.tokenizer
            if tokenizer.bos_id is not None and tokenizer.encode("a")[:1] == [tokenizer.bos_id]:
                self.prefix = [tokenizer.bos_id]
        self.num_double_bos = 0
        self.num_no_bos = 0

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer."""
        return None if self.prompts is None else self.prompts.tokenizer

    def encode(self, record: Record) -> list[int]:
        """Token ids of any length; raises CalibrationError, with the record's line, for what the model cannot read."""
        if record.token_ids is not None:
            return self._checked(record.token_ids, record.where)
        if self.prompts is None:
            kind = "a text" if record.text is not None else "a chat"
            raise CalibrationError(
                f'{record.where}: {kind}, but the model has no tokenizer; give {{"token_ids": [...]}} instead'
            )
        try:
            if record.messages is not None:
                return self.single_bos(self._encode_chat(self.prompts, record))
            return self._encode_text(self.prompts.tokenizer, record.text or "")
        except RequestError as error:
            raise CalibrationError(f"{record.where}: {error}") from None

    def encode_paragraph(self, text: str, where: str) -> list[int]:
        """Token ids of a part of a longer text, with the blank line that follows it and without special tokens."""
        if self.prompts is None:
            raise CalibrationError(f'{where}: a text, but the model has no tokenizer; give {{"token_ids": [...]}} instead')
        return self.prompts.tokenizer.encode(f"{text}\n\n", add_special_tokens=False)

    def single_bos(self, ids: list[int]) -> list[int]:
        """The ids with the token that begins a text once where they begin with several, which is counted."""
        bos_id = None if self.tokenizer is None else self.tokenizer.bos_id
        if bos_id is None or ids[:2] != [bos_id, bos_id]:
            return ids
        self.num_double_bos += 1
        repeats = next((index for index, token_id in enumerate(ids) if token_id != bos_id), len(ids))
        return [bos_id, *ids[repeats:]]

    def _checked(self, token_ids: list[int], where: str) -> list[int]:
        for index, token_id in enumerate(token_ids):
            if not 0 <= token_id < self.vocab_size:
                raise CalibrationError(
                    f"{where}: token_ids[{index}] is {token_id}; the model's ids are from 0 to {self.vocab_size - 1}"
                )
        self.num_no_bos += bool(self.prefix) and token_ids[:1] != self.prefix
        return self.single_bos(token_ids)

    def _encode_text(self, tokenizer: Tokenizer, text: str) -> list[int]:
        spelled = tokenizer.special_tokens.get("bos_token")
        # The tokenizer's wrapper merges the one that is spelled with the one that is added.
        self.num_double_bos += bool(self.prefix) and bool(spelled) and text.startswith(spelled or "")
        return tokenizer.encode(text)

    def _encode_chat(self, prompts: PromptEncoder, record: Record) -> list[int]:
        assert record.messages is not None
        if prompts.template is None:
            raise RequestError('a chat, but the model has no chat template; give {"text": ...} with the text as it is served')
        # A conversation that ends with the model's answer is complete; after any other turn the answer would begin.
        return prompts.encode_chat(record.messages, add_generation_prompt=record.messages[-1]["role"] != "assistant")


def pack(paragraphs: Iterable[Sequence[int]], prefix: list[int], max_length: int) -> list[list[int]]:
    """Paragraphs one after the other in samples of up to `max_length` ids, each after `prefix`.

    A paragraph that does not fit begins the next sample if the present one is at least half full; otherwise, and where it is longer
    than a whole sample, it goes on there.
    """
    room = max_length - len(prefix)
    samples: list[list[int]] = []
    current: list[int] = []
    for paragraph in paragraphs:
        if len(current) + len(paragraph) > room and 2 * len(current) >= room:
            samples.append(prefix + current)
            current = []
        used = 0
        while len(current) + len(paragraph) - used >= room:
            end = used + room - len(current)
            samples.append([*prefix, *current, *paragraph[used:end]])
            current, used = [], end
        current += paragraph[used:]
    return [*samples, prefix + current] if current else samples


def _read_prompt_encoder(folder: Path, vocab_size: int) -> PromptEncoder:
    config_file, template_file = folder / "tokenizer_config.json", folder / "chat_template.jinja"
    tokenizer_file = folder / "tokenizer.json"
    try:
        data = tokenizer_file.read_bytes()
        config = json.loads(config_file.read_text(encoding="utf-8")) if config_file.is_file() else {}
        source = template_file.read_text(encoding="utf-8") if template_file.is_file() else None
    except OSError as error:
        raise CheckpointError(f"{error.filename}: cannot be read ({error.strerror}); expected the model's tokenizer") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{folder}: a tokenizer file is damaged ({error}); download the model again") from None
    tokenizer = Tokenizer(WholeTokenizer(data, str(tokenizer_file)), config if isinstance(config, dict) else {})
    template = None if source is None else ChatTemplate(source, tokenizer.special_tokens, str(template_file))
    return PromptEncoder(tokenizer, template, vocab_size)
