"""The container: what is read equals what was written, and hostile bytes cost one error, quickly."""

from __future__ import annotations

import random
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from llmc.compiler.checkpoint import open_checkpoint
from llmc.compiler.checkpoint.gguf_reader import GgufReader
from llmc.errors import CheckpointError, LlmcError, UnsupportedModelError

U32, U64, F32, STRING, ARRAY = 4, 10, 6, 8, 9


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def pair(key: bytes, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def entry(name: bytes, dims: list[int], kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def build(
    pairs: list[bytes],
    entries: list[bytes],
    data: bytes = b"",
    *,
    version: int = 3,
    counts: tuple[int, int] | None = None,
) -> bytes:
    tensor_count, pair_count = counts or (len(entries), len(pairs))
    head = b"GGUF" + struct.pack("<IQQ", version, tensor_count, pair_count) + b"".join(pairs) + b"".join(entries)
    return head + b"\0" * (-len(head) % 32) + data


def read(tmp_path: Path, content: bytes) -> GgufReader:
    (tmp_path / "x.gguf").write_bytes(content)
    return GgufReader(tmp_path / "x.gguf")


@pytest.fixture(scope="module")
def whole(tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    tiny.write_gguf(path, tiny.make_model("llama", num_hidden_layers=1), types=lambda name: "Q8_0")
    return path


def test_agrees_with_the_reader_of_the_gguf_package(whole: Path) -> None:
    ours, theirs = GgufReader(whole), gguf.GGUFReader(whole)
    fields = {key: field.contents() for key, field in theirs.fields.items() if not key.startswith("GGUF.")}
    assert set(ours.metadata) == set(fields)
    for key, value in fields.items():
        found = ours.metadata[key]
        assert (found.tolist() if isinstance(found, np.ndarray) else found) == value, key
    assert list(ours.tensors) == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        mine = ours.tensors[tensor.name]
        assert mine.shape == tuple(reversed(tensor.shape.tolist()))
        assert mine.type_name == tensor.tensor_type.name
        assert ours.data(mine).tobytes() == tensor.data.tobytes()


def test_all_scalar_types(tmp_path: Path) -> None:
    values = {
        0: 200,
        1: -5,
        2: 60000,
        3: -300,
        4: 1 << 31,
        5: -7,
        6: 0.5,
        7: True,
        10: 1 << 63,
        11: -(1 << 62),
        12: 0.1,
    }
    forms = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
    pairs = [pair(b"k%d" % kind, kind, struct.pack("<" + forms[kind], value)) for kind, value in values.items()]
    metadata = read(tmp_path, build(pairs, [])).metadata
    assert metadata == {f"k{kind}": value for kind, value in values.items()}
    assert metadata["k7"] is True


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "cannot be read"),
        (b"GGUF", "not a GGUF file"),
        (b"PK\3\4" + b"\0" * 40, "not a GGUF file"),
        (build([], [], counts=(1 << 60, 0)), "announces 1152921504606846976 tensors"),
        (build([], [], counts=(0, 1 << 60)), "announces 1152921504606846976 metadata pairs"),
        (build([struct.pack("<Q", 1 << 62) + b"abc" * 9], []), "it needs 4611686018427387904 bytes"),
        (build([pair(b"k", ARRAY, struct.pack("<IQ", STRING, 1 << 50))], []), "strings in 'k'"),
        (build([pair(b"k", ARRAY, struct.pack("<IQ", F32, 1 << 61))], []), "it needs"),
        (build([pair(b"k", ARRAY, struct.pack("<IQ", ARRAY, 1))], [], b"\0" * 64), "array of type 9"),
        (build([pair(b"k", 77, b"\0" * 8)], []), "unknown type 77"),
        (build([pair(b"k", U32, b"\1\0\0\0")] * 2, []), "'k' appears twice"),
        (build([pair(b"\xff\xfe", U32, b"\1\0\0\0")], []), "not UTF-8"),
        (build([], [entry(b"t", [1] * 5)]), "has 5 dimensions"),
        (build([], [entry(b"t", [1 << 40, 1 << 40])]), "has shape"),
        (build([], [entry(b"t", [0, 4])]), "has shape [4, 0]"),
        (build([], [entry(b"t", [64])]), "should lie at bytes"),
        (build([], [entry(b"t", [8], offset=(1 << 64) - 32)], b"\0" * 32), "should lie at bytes"),
        (build([], [entry(b"t", [4], offset=7)], b"\0" * 64), "aligned to 32"),
        (build([], [entry(b"t", [8])] * 2, b"\0" * 32), "tensor 't' appears twice"),
        (build([], [entry(b"t", [33], kind=8)], b"\0" * 64), "rows of 33"),
        (build([pair(b"general.alignment", U32, b"\3\0\0\0")], []), "expected a power of two"),
        (build([pair(b"general.alignment", F32, b"\0\0\0\0")], []), "expected a power of two"),
    ],
)
def test_hostile_content_is_one_sentence(content: bytes, words: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        read(tmp_path, content)
    message = str(caught.value)
    assert words in message
    assert "x.gguf" in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (build([], [], version=1), "GGUF version 1 is not supported"),
        (build([], [], version=0x03000000), "big-endian"),
        (build([], [entry(b"t", [256], kind=16)], b"\0" * 66), "stored as IQ2_XXS; supported: F32, F16, BF16, Q4_0"),
        (build([], [entry(b"t", [256], kind=9999)], b"\0" * 66), "'t' is stored as type 9999"),
    ],
)
def test_unsupported_content_names_what_is_supported(content: bytes, words: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        read(tmp_path, content)
    assert words in str(caught.value)


def test_every_truncation_is_refused(whole: Path, tmp_path: Path) -> None:
    data = whole.read_bytes()
    start = min(tensor.offset for tensor in GgufReader(whole).tensors.values())
    end = max(tensor.offset + tensor.nbytes for tensor in GgufReader(whole).tensors.values())
    file = tmp_path / "cut.gguf"
    for keep in [*range(0, start, 7), *range(start, end, 5003), end - 1]:
        file.write_bytes(data[:keep])
        with pytest.raises(CheckpointError):
            open_checkpoint(str(file))


def test_damaged_headers_never_escape_as_another_error(whole: Path, tmp_path: Path) -> None:
    data = whole.read_bytes()
    start = min(tensor.offset for tensor in GgufReader(whole).tensors.values())
    rng = random.Random(0)
    file = tmp_path / "bad.gguf"
    for _ in range(250):
        damaged = bytearray(data)
        for _ in range(rng.randint(1, 4)):
            damaged[rng.randrange(4, start)] = rng.choice((0, 1, 127, 128, 255, rng.randrange(256)))
        file.write_bytes(damaged)
        try:
            checkpoint = open_checkpoint(str(file))
            if checkpoint.has_tokenizer:
                checkpoint.write_tokenizer(tmp_path / "tokenizer")
            assert isinstance(checkpoint.generation_config["eos_token_id"], list)
        except LlmcError as error:
            assert "\n" not in str(error)  # noqa: PT017 - surviving is allowed, too
