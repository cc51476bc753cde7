"""The `tokenizers` library with only the part of a BPE vocabulary that the texts so far could need.

A text only ever becomes tokens that are parts of it. So the library, given just those tokens and the merges among
them, encodes it exactly as it would with the whole vocabulary, and nothing large has to be parsed for a first answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import groupby

from .tokenizer_index import TokenizerIndex
from .tokenizer_library import TokenizerBackend, parse, special_ids

MAX_CHARACTERS = 65_536  # of all texts; after them loading the whole vocabulary costs less than going on without

_BYTE_TOKENS = {f"<0x{byte:02X}>": byte for byte in range(256)}


class PartialTokenizer:
    """A `TokenizerBackend` that loads the whole vocabulary only once it has seen much text."""

    def __init__(self, index: TokenizerIndex, load_whole: Callable[[], TokenizerBackend], where: str) -> None:
        """`load_whole` is called at most once. Raises BundleError if the index's skeleton cannot be read."""
        from tokenizers.models import BPE

        self._index = index
        self._load_whole = load_whole
        self._whole: TokenizerBackend | None = None
        self._characters_left = MAX_CHARACTERS
        self._library = parse(index.skeleton, where)
        self._options = _model_options(index.skeleton)
        self.special_ids = special_ids(self._library)
        self._added = {token_id: token.content for token_id, token in self._library.get_added_tokens_decoder().items()}
        # With a vocabulary of bytes alone the library spells out what it would give to its model.
        self._speller = BPE(_BYTE_TOKENS, [], byte_fallback=True)
        always = [*_BYTE_TOKENS, str(self._options["unk_token"])]
        self._tokens = {token: found for token in always if (found := index.token_id(token)) is not None}
        self._model = BPE(self._tokens, [], **self._options)

    @cached_property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included."""
        return self._index.vocab_size + sum(self._index.token_id(token) is None for token in self._added.values())

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of `text`, as the library's post-processor completes them."""
        if self._whole is None and not self._cover(text):
            self._whole = self._load_whole()
        if self._whole is not None:
            return self._whole.encode(text, add_special_tokens=add_special_tokens)
        self._library.model = self._model
        ids: list[int] = self._library.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """The text of `token_ids`; ids of no token are left out."""
        kept = (item for item in token_ids if not (skip_special_tokens and item in self.special_ids))
        tokens = [token for token in map(self.token, kept) if token is not None]
        decoder = self._library.decoder
        return " ".join(tokens) if decoder is None else str(decoder.decode(tokens))

    def token_id(self, token: str) -> int | None:
        """The id of a token given by its exact spelling."""
        found = next((token_id for token_id, content in self._added.items() if content == token), None)
        return self._index.token_id(token) if found is None else found

    def token(self, token_id: int) -> str | None:
        """The spelling of a token."""
        if token_id in self._added:  # the library may spell it otherwise than the file, with a space put before it
            spelled: str | None = self._library.id_to_token(token_id)
            return spelled
        return self._index.token(token_id)

    def _cover(self, text: str) -> bool:
        """Extend the part to what `text` could need; False once that is not worth while any more."""
        self._characters_left -= len(text)
        if self._characters_left < 0:
            return False
        from tokenizers.models import BPE

        found: dict[str, int] = {}
        for piece in self._pieces(text):
            found.update(self._index.tokens_within(piece))
        if found.keys() <= self._tokens.keys():
            return True
        self._tokens.update(found)
        self._model = BPE(self._tokens, self._index.merges_among(self._tokens), **self._options)
        return True

    def _pieces(self, text: str) -> set[str]:
        """What the library would give to its model for `text`: normalised, cut into words, without added tokens."""
        self._library.model = self._speller
        encoding = self._library.encode(text, add_special_tokens=False)
        pieces = set()
        for _, group in groupby(zip(encoding.word_ids, encoding.tokens, strict=True), key=lambda item: item[0]):
            spelled = bytes(_BYTE_TOKENS[token] for _, token in group if token in _BYTE_TOKENS)
            pieces.add(spelled.decode(errors="ignore"))
        return pieces


def _model_options(skeleton: bytes) -> dict[str, str | bool]:
    import msgspec

    model = msgspec.json.decode(skeleton)["model"]
    names = ("fuse_unk", "byte_fallback", "ignore_merges")
    return {"unk_token": model.get("unk_token"), **{name: bool(model.get(name)) for name in names}}
