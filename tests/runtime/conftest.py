"""A real bundle of a toy program, built with g++: see toy_program.cpp for why its tokens give away every mistake."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import llmc
import pytest
from llmc.runtime import Engine
from llmc.runtime.integrity import hash_file
from llmc.runtime.manifest import MANIFEST_NAME, Manifest, ModelFacts, TargetEntry, encode_manifest
from llmc.runtime.program import KvCacheSpec, Phase, Program, Scheme, WeightSpec, encode_program
from llmc.runtime.tokenizer_index import INDEX_NAME, build_index
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

VOCAB_SIZE = 300
TARGET = "cpu-f32"
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message.role }}: {{ message.content | trim }}<turn>"
    "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
TEXT = "the quick brown fox jumps over the lazy dog while the cat sleeps; naïve café, 你好, 🦊. " * 20


@pytest.fixture(scope="session")
def toy_library(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Compile the toy program with macros such as ``TOY_SELF_TEST=3``; each variant once."""
    folder = tmp_path_factory.mktemp("toy")
    source = Path(__file__).with_name("toy_program.cpp")

    def build(**macros: int) -> Path:
        name = "-".join(["lib", *(f"{key}{value}" for key, value in sorted(macros.items()))]) + ".so"
        path = folder / name
        if not path.exists():
            flags = [f"-D{key}={value}" for key, value in macros.items()]
            subprocess.run(["g++", "-O1", "-shared", "-fPIC", *flags, "-o", path, source], check=True)
        return path

    return build


@pytest.fixture(scope="session")
def toy_tokenizer() -> Tokenizer:
    """Byte-level BPE with a beginning-of-sequence token that its post-processor adds."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=["<bos>", "<eos>", "<turn>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 0)])
    return tokenizer


@pytest.fixture(scope="session")
def build_bundle(toy_library: Callable[..., Path], toy_tokenizer: Tokenizer) -> Callable[..., Path]:
    """Write a bundle into a folder; keyword arguments change what is in it."""

    def build(
        root: Path,
        *,
        max_tokens: int = 32,
        context_length: int = 256,
        template: str | None = TEMPLATE,
        libraries: dict[str, dict[str, int]] | None = None,
        program_changes: dict[str, Any] | None = None,
        generation_config: dict[str, Any] | None = None,
        targets: tuple[str, ...] = (TARGET,),
        index: bool = False,
    ) -> Path:
        root.mkdir(parents=True)
        (root / "config.json").write_text(json.dumps({"model_type": "toy", "eos_token_id": 1}))
        (root / "generation_config.json").write_text(json.dumps(generation_config or {"eos_token_id": [1, 2]}))
        (root / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<bos>", "eos_token": "<eos>"}))
        (root / "tokenizer.json").write_text(toy_tokenizer.to_str())
        if index:
            data = build_index(toy_tokenizer.to_str().encode())
            assert data is not None
            (root / INDEX_NAME).write_bytes(data)
        if template is not None:
            (root / "chat_template.jinja").write_text(template)
        levels = {"portable": {}} if libraries is None else libraries
        for target in targets:
            folder = root / "programs" / target
            folder.mkdir(parents=True)
            for level, macros in levels.items():
                (folder / f"lib{level}.so").write_bytes(toy_library(**macros).read_bytes())
            program = Program(
                abi_version=1,
                target=target,
                backend="cpu" if target.startswith("cpu") else "cuda",
                machine="x86_64-linux",
                scheme=Scheme(weights="f32", head="f32", group_size=None, kv="f32"),
                vocab_size=VOCAB_SIZE,
                max_tokens=max_tokens,
                arena_bytes=4 * max_tokens,
                context_length=context_length,
                kv_cache=KvCacheSpec(dtype="f32", num_layers=1, num_kv_heads=1, head_dim=1, block_size=16, bytes_per_block=128),
                weights=[WeightSpec(name="seed", dtype="F32", shape=[16])],
                libraries={level: f"lib{level}.so" for level in levels},
                phases=[Phase(name="prefill", calls=[]), Phase(name="decode", calls=[])],
            )
            description = {**json.loads(encode_program(program)), **(program_changes or {})}
            (folder / "program.json").write_text(json.dumps(description))
            write_weights(root / "weights" / f"{target}.safetensors")
        write_manifest(root, targets)
        return root

    return build


def write_weights(path: Path, header: bytes | None = None) -> None:
    path.parent.mkdir(exist_ok=True)
    if header is None:
        header = json.dumps({"seed": {"dtype": "F32", "shape": [16], "data_offsets": [0, 64]}}).encode()
    header += b" " * (-(8 + len(header)) % 4096)
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"\0\0\xe0\x40" * 16)  # 7.0


def write_manifest(root: Path, targets: tuple[str, ...] = (TARGET,), **changes: Any) -> None:
    files = sorted(path for path in root.rglob("*") if path.is_file() and path.name != MANIFEST_NAME)
    manifest = Manifest(
        schema_version=1,
        min_runtime="0.1.0",
        model=ModelFacts(name="toy", architecture="Toy", num_parameters=16, vocab_size=VOCAB_SIZE, context_length=256),
        toolchain={"llmc": "0.1.0"},
        targets=[
            TargetEntry(name=name, program=f"programs/{name}/program.json", weights=f"weights/{name}.safetensors")
            for name in targets
        ],
        files={path.relative_to(root).as_posix(): hash_file(path) for path in files},
    )
    data = {**json.loads(encode_manifest(manifest)), **changes}
    (root / MANIFEST_NAME).write_text(json.dumps(data))


@pytest.fixture(scope="session")
def rewrite_manifest() -> Callable[..., None]:
    """Make the manifest agree with the folder again, with top-level `changes`."""
    return write_manifest


@pytest.fixture(scope="session")
def rewrite_weights() -> Callable[..., None]:
    """Write the toy's weights with another header."""
    return write_weights


@pytest.fixture(scope="session")
def toy_bundle(build_bundle: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The plain toy bundle; tests must not write into it."""
    return build_bundle(tmp_path_factory.mktemp("bundles") / "toy.llmc")


@pytest.fixture
def engine(toy_bundle: Path) -> Iterator[Engine]:
    """An engine with a roomy pool."""
    with llmc.load(toy_bundle, num_threads=1) as loaded:
        yield loaded
        loaded.pool.check([request.blocks for request in loaded.scheduler.running])
