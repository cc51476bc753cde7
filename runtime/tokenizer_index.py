"""An index of a BPE vocabulary that is mapped, not parsed: it finds the tokens and merges a text could need.

It is derived from tokenizer.json when a model is compiled and holds nothing that is not there. As a safetensors file:

    skeleton     U8   tokenizer.json with a vocabulary of only the added tokens, and no merges
    text         U8   all tokens as UTF-8, one after another in byte order
    text_ends    U32  [V+1], where each begins and the last ends
    ids          U32  [V], their ids
    positions    U32  [max id + 1], from an id to the place in that order; 2**32-1 for ids of no token
    merge_keys   U64  [M], left id << 32 | right id, ascending
    merge_ranks  U32  [M]
"""

from __future__ import annotations

import hashlib
import json
import mmap
from bisect import bisect_left
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from .weights import WeightFile

INDEX_NAME = "tokenizer_index.safetensors"
NO_TOKEN = 2**32 - 1
_PAGE = 4096


class TokenizerIndex:
    """Looks tokens and merges up in the mapped file."""

    def __init__(self, data: bytes | mmap.mmap, where: Path) -> None:
        """Raises BundleError if `data` is not a safetensors file with the arrays of this module."""
        file = WeightFile(data, where)
        self.source_sha256 = file.metadata.get("source_sha256", "")
        self.skeleton = file.array("skeleton", "U8").tobytes()
        self.vocab_size = int(file.array("ids", "U32").size)
        # Views, since an element of an array takes several times as long to read.
        self._ids = file.array("ids", "U32").data
        self._text = file.array("text", "U8").data
        self._ends = file.array("text_ends", "U32").data
        self._positions = file.array("positions", "U32").data
        self._merge_keys = file.array("merge_keys", "U64")
        self._merge_ranks = file.array("merge_ranks", "U32")
        self._ranges: dict[bytes, tuple[int, int]] = {b"": (0, self.vocab_size)}

    def __getitem__(self, place: int) -> bytes:
        """The token at a place in byte order; what `bisect` asks for."""
        return bytes(self._text[self._ends[place] : self._ends[place + 1]])

    def token(self, token_id: int) -> str | None:
        """The spelling of a token."""
        if not 0 <= token_id < len(self._positions) or self._positions[token_id] == NO_TOKEN:
            return None
        return self[self._positions[token_id]].decode()

    def token_id(self, token: str) -> int | None:
        """The id of a token given by its exact spelling."""
        key = token.encode()
        low, high = self._range(key, 0, self.vocab_size)
        return self._ids[low] if low < high and self[low] == key else None

    def tokens_within(self, text: str) -> dict[str, int]:
        """Every token that is a part of `text`, with its id."""
        data = text.encode()
        starts = [place for place, byte in enumerate(data) if byte & 0xC0 != 0x80] + [len(data)]  # of characters
        found = {}
        for first, start in enumerate(starts[:-1]):
            low, high = 0, self.vocab_size
            for end in starts[first + 1 :]:
                key = data[start:end]
                low, high = self._range(key, low, high)
                if low >= high:
                    break
                if self[low] == key:
                    found[key.decode()] = self._ids[low]
        return found

    def merges_among(self, tokens: dict[str, int]) -> list[tuple[str, str]]:
        """The merges of which both parts and the product are in `tokens`, in the order of their ranks."""
        pairs = [
            (token[:cut], token[cut:])
            for token in tokens
            for cut in range(1, len(token))
            if token[:cut] in tokens and token[cut:] in tokens
        ]
        if not pairs or not self._merge_keys.size:
            return []
        keys = np.array([tokens[left] << 32 | tokens[right] for left, right in pairs], np.uint64)
        places = np.minimum(np.searchsorted(self._merge_keys, keys), self._merge_keys.size - 1)
        hits = np.flatnonzero(self._merge_keys[places] == keys)
        ranks = self._merge_ranks[places[hits]]
        return [pairs[hit] for hit in hits[np.argsort(ranks, kind="stable")]]

    def _range(self, prefix: bytes, low: int, high: int) -> tuple[int, int]:
        """Places of the tokens that begin with `prefix`, given that they lie in `low .. high-1`."""
        known = self._ranges.get(prefix)
        if known is None:
            low = bisect_left(self, prefix, low, high)
            high = bisect_left(self, prefix + b"\xff", low, high)
            known = self._ranges[prefix] = (low, high)
        return known


def build_index(tokenizer_json: bytes) -> bytes | None:
    """The index of a tokenizer.json, or None for one whose texts cannot be encoded with a part of the vocabulary.

    A part gives the same ids as the whole if tokens arise only from merging adjacent parts of the text: BPE without
    dropout, without marks at the beginning or end of words, and without merges of byte or unknown tokens.
    """
    tokenizer: dict[str, Any] = json.loads(tokenizer_json)
    model = tokenizer.get("model", {})
    if model.get("type") != "BPE" or any(
        model.get(name) for name in ("dropout", "continuing_subword_prefix", "end_of_word_suffix")
    ):
        return None
    vocab: dict[str, int] = model["vocab"]
    merges = [merge.split(" ", 1) if isinstance(merge, str) else merge for merge in model["merges"]]
    inert = {token for token in vocab if model.get("byte_fallback") and len(token) == 6 and token.startswith("<0x")}
    inert.add(model.get("unk_token") or "")
    if not vocab or any(left in inert or right in inert or left + right not in vocab for left, right in merges):
        return None
    try:
        tokens = sorted((token.encode(), token_id) for token, token_id in vocab.items())
    except UnicodeEncodeError:  # half of a surrogate pair, which no text can hold
        return None
    ids = np.array([token_id for _, token_id in tokens], np.uint32)
    positions = np.full(int(ids.max()) + 1, NO_TOKEN, np.uint32)
    positions[ids] = np.arange(len(ids), dtype=np.uint32)
    keys = np.array([vocab[left] << 32 | vocab[right] for left, right in merges], np.uint64)
    # Of merges listed twice the library keeps the last.
    unique, last = np.unique(keys[::-1], return_index=True)
    added = {token["content"]: token["id"] for token in tokenizer.get("added_tokens", [])}
    skeleton = {**tokenizer, "model": {**model, "vocab": added, "merges": []}, "truncation": None, "padding": None}
    arrays: dict[str, npt.NDArray[Any]] = {
        "skeleton": np.frombuffer(json.dumps(skeleton, ensure_ascii=False, separators=(",", ":")).encode(), np.uint8),
        "text": np.frombuffer(b"".join(token for token, _ in tokens), np.uint8),
        "text_ends": np.cumsum([0, *(len(token) for token, _ in tokens)]).astype(np.uint32),
        "ids": ids,
        "positions": positions,
        "merge_keys": unique,
        "merge_ranks": (len(keys) - 1 - last).astype(np.uint32),
    }
    return _encode(arrays.items(), hashlib.sha256(tokenizer_json).hexdigest())


def _encode(arrays: Iterable[tuple[str, npt.NDArray[Any]]], source_sha256: str) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"source_sha256": source_sha256}}
    body = b""
    for name, array in sorted(arrays, key=lambda item: -item[1].itemsize):  # the widest first keeps all aligned
        dtype = {1: "U8", 4: "U32", 8: "U64"}[array.itemsize]
        data = array.tobytes()
        header[name] = {"dtype": dtype, "shape": [array.size], "data_offsets": [len(body), len(body) + len(data)]}
        body += data
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % _PAGE)
    return len(text).to_bytes(8, "little") + text + body
