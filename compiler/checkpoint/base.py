"""What the front end needs from a model on disk, whatever its format: config, tensors by HF name, tokenizer."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from ...errors import CheckpointError

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig

    from .quantized import StoredMatrix, StoredQuantization


class Checkpoint(ABC):
    """An opened checkpoint. Nothing but headers is in memory: each `tensor` call reads one tensor.

    `config` is the text causal LM's config, checked with `check_supported`. Tensor names, shapes and values follow
    Hugging Face conventions whatever is stored (rows of q and k in HF order, Gemma norms as w of 1+w, ...).
    Every parameter the architecture has is present with the right shape, except a tied `lm_head.weight`,
    which is listed only where the file stores it.
    """

    path: Path
    name: str  # display name: the folder, the file's `general.name`, or the hub id
    config: PretrainedConfig

    @property
    @abstractmethod
    def generation_config(self) -> dict[str, object]:
        """Contents for generation_config.json; `eos_token_id` is the sorted list of every id that ends a turn."""

    @property
    @abstractmethod
    def has_tokenizer(self) -> bool:
        """Whether `write_tokenizer` has something to write."""

    @abstractmethod
    def tensor_names(self) -> frozenset[str]:
        """HF parameter names of the causal LM, such as `model.layers.0.self_attn.q_proj.weight`."""

    @abstractmethod
    def shape(self, name: str) -> tuple[int, ...]:
        """Shape in HF layout. Raises `CheckpointError` for an unknown name."""

    @abstractmethod
    def dtype(self, name: str) -> str:
        """The stored type in capitals: "BF16", "F32", "Q4_K", ..."""

    @abstractmethod
    def tensor(self, name: str) -> torch.Tensor:
        """One tensor as float32, bfloat16 or float16, dequantised where it is stored in blocks (then float32)."""

    def stored_matrix(self, name: str) -> StoredMatrix | None:
        """One matrix with the codes that are stored, None where it is stored plainly or no grid holds it.

        Its values are those of `tensor`, but for scales that had to be rounded to float16: `quantization` tells where. Raises
        `CheckpointError` for an unknown name and for damaged values.
        """
        if name not in self.tensor_names():
            raise self.unknown_tensor(name)
        return None

    @property
    def quantization(self) -> StoredQuantization | None:
        """What is quantised, what of it is kept and what is converted; None for a checkpoint that is stored plainly."""
        return None

    @abstractmethod
    def write_tokenizer(self, out: Path) -> None:
        """Write tokenizer.json, tokenizer_config.json and, if there is one, chat_template.jinja into `out`.

        Raises `CheckpointError` where `has_tokenizer` is false.
        """

    def unknown_tensor(self, name: str) -> CheckpointError:
        """The error for a name that is not in `tensor_names()`."""
        return CheckpointError(f"{self.path}: no tensor named {name!r} among the {len(self.tensor_names())} it holds")


def read_json_object(path: Path) -> dict[str, object]:
    """Parse a file that must hold one JSON object; every failure is one `CheckpointError` sentence."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror or error})") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not valid JSON ({one_line(error)}); download the file again") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


def printable(name: str) -> str:
    """A name from a file as an error may show it, on one line."""
    return name if name.isprintable() else ascii(name)


def one_line(error: Exception) -> str:
    """A library's error text on one line, cut where it becomes an essay."""
    text = " ".join(str(error).split())
    return text if len(text) <= 300 else f"{text[:300]}..."


def write_json(path: Path, value: object) -> None:
    """Write JSON that is the same bytes for the same value, and ends with a newline."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def generation_defaults(config: PretrainedConfig, *end_of_turn: object) -> dict[str, object]:
    """The special ids of a generation_config.json: those the config names, and every id that ends a turn."""
    values: dict[str, object] = {"eos_token_id": token_ids(getattr(config, "eos_token_id", None), *end_of_turn)}
    for key in ("bos_token_id", "pad_token_id"):
        if (value := getattr(config, key, None)) is not None:
            values[key] = value
    return values


def token_ids(*values: object) -> list[int]:
    """The sorted union of ids given as an int, a list of ints or None; a negative id means none."""
    ids: set[int] = set()
    for value in values:
        items: Iterable[object] = value if isinstance(value, list | tuple) else [value]
        ids.update(item for item in items if isinstance(item, int) and not isinstance(item, bool) and item >= 0)
    return sorted(ids)
