"""Real bundles of toy programs: for a CPU, built with g++, and for GPUs, to be interpreted.

See toy_program.cpp and toy_kernels.py for why their tokens give away every mistake.
"""

from __future__ import annotations

import json
import shutil
import struct
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import llmc
import numpy as np
import pytest
from llmc.runtime import Engine
from llmc.runtime.integrity import hash_file
from llmc.runtime.manifest import MANIFEST_NAME, Manifest, ModelFacts, TargetEntry, encode_manifest
from llmc.runtime.program import (
    Argument,
    Call,
    CpuProgram,
    Extent,
    GpuProgram,
    KernelEntry,
    KvCacheSpec,
    ParameterEntry,
    Phase,
    Scheme,
    WeightSpec,
    encode_program,
)
from llmc.runtime.program_checks import INPUTS
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
        write_model_files(root, toy_tokenizer, template, generation_config, index)
        levels = {"portable": {}} if libraries is None else libraries
        for target in targets:
            folder = root / "programs" / target
            folder.mkdir(parents=True)
            for level, macros in levels.items():
                (folder / f"lib{level}.so").write_bytes(toy_library(**macros).read_bytes())
            program = CpuProgram(
                abi_version=2,
                target=target,
                backend="cpu",
                machine="x86_64-linux",
                scheme=Scheme(weights="f32", head="f32", group_size=None, kv="f32"),
                vocab_size=VOCAB_SIZE,
                max_tokens=max_tokens,
                arena_bytes=4 * max_tokens,
                context_length=context_length,
                kv_cache=KvCacheSpec(
                    layer_dtypes=["f32"], num_layers=1, num_kv_heads=1, head_dim=1, block_size=16, bytes_per_block=128
                ),
                weights=[WeightSpec(name="seed", dtype="F32", shape=[16])],
                libraries={level: f"lib{level}.so" for level in levels},
                phases=[
                    Phase(name="decode", max_tokens=max_tokens, single_token=True, calls=[]),
                    Phase(name="prefill", max_tokens=max_tokens, single_token=False, calls=[]),
                ],
            )
            description = {**json.loads(encode_program(program)), **(program_changes or {})}
            (folder / "program.json").write_text(json.dumps(description))
            write_weights(root / "weights" / f"{target}.safetensors")
        write_manifest(root, targets)
        return root

    return build


def write_model_files(
    root: Path,
    tokenizer: Tokenizer,
    template: str | None = TEMPLATE,
    generation_config: dict[str, Any] | None = None,
    index: bool = False,
) -> None:
    root.mkdir(parents=True)
    (root / "config.json").write_text(json.dumps({"model_type": "toy", "eos_token_id": 1}))
    (root / "generation_config.json").write_text(json.dumps(generation_config or {"eos_token_id": [1, 2]}))
    (root / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<bos>", "eos_token": "<eos>"}))
    (root / "tokenizer.json").write_text(tokenizer.to_str())
    if index:
        data = build_index(tokenizer.to_str().encode())
        assert data is not None
        (root / INDEX_NAME).write_bytes(data)
    if template is not None:
        (root / "chat_template.jinja").write_text(template)


@pytest.fixture(scope="session")
def build_gpu_bundle(toy_tokenizer: Tokenizer) -> Callable[..., Path]:
    """Write a bundle of GPU targets, `{name: (backend, arch)}`, whose kernels are toy_kernels.py; `edit` changes a program.json."""
    kernels = Path(__file__).with_name("toy_kernels.py").read_text()

    def build(
        root: Path,
        *,
        targets: dict[str, tuple[str, str]] | None = None,
        max_tokens: int = 32,
        decode_tokens: tuple[int, ...] = (2, 8),
        context_length: int = 256,
        source: str = kernels,
        edit: Callable[[dict[str, Any]], object] = lambda program: None,
        cpu_bundle: Path | None = None,
    ) -> Path:
        if cpu_bundle is None:
            write_model_files(root, toy_tokenizer)
        else:
            shutil.copytree(cpu_bundle, root)
        wanted = {"h100-fp8": ("cuda", "sm_90")} if targets is None else targets
        table = np.array([(7 * token + 3) % VOCAB_SIZE for token in range(VOCAB_SIZE)], np.float32)
        (root / "weights").mkdir(exist_ok=True)
        save_aligned(root / "weights" / "toy-table.safetensors", "table", table)
        save_aligned(root / "weights" / "toy-bias.safetensors", "bias", np.full(16, 7, np.float32))
        for target, (backend, arch) in wanted.items():
            folder = root / "programs" / target
            (folder / "kernels" / arch).mkdir(parents=True)
            (folder / "kernels" / "toy_kernels.py").write_text(source)
            program = json.loads(encode_program(gpu_program(target, backend, arch, max_tokens, decode_tokens, context_length)))
            for name in program["kernels"]:
                (folder / "kernels" / arch / f"{name}.bin").write_bytes(fake_binary(name, arch))
            edit(program)
            (folder / "program.json").write_text(json.dumps(program))
        weights = ["weights/toy-bias.safetensors", "weights/toy-table.safetensors"]
        entries = [TargetEntry(name=name, program=f"programs/{name}/program.json", weights=weights) for name in wanted]
        write_manifest(root, (TARGET,) if cpu_bundle is not None else (), entries)
        return root

    return build


def save_aligned(path: Path, name: str, values: np.ndarray) -> None:
    entry = {"dtype": "F32", "shape": list(values.shape), "data_offsets": [0, values.nbytes]}
    header = json.dumps({name: entry}).encode()
    header += b" " * (-(8 + len(header)) % 4096)
    path.write_bytes(len(header).to_bytes(8, "little") + header + values.tobytes())


def fake_binary(name: str, arch: str) -> bytes:
    """The header of a cubin or hsaco, which is all that can be looked at without a GPU, and a symbol."""
    if arch.startswith("sm_"):
        abi_version, machine, flags = 8, 190, int(arch[3:]) << 8
    else:
        abi_version, machine, flags = 0, 224, {"gfx942": 0x54C}[arch]
    head = struct.pack("<4sBBBBB7xHHIQQQI", b"\x7fELF", 2, 1, 1, 0, abi_version, 2, machine, 1, 0, 0, 0, flags)
    return head.ljust(64, b"\0") + b"\0" + name.encode() + b"\0"


def gpu_program(
    target: str, backend: str, arch: str, max_tokens: int, decode_tokens: tuple[int, ...], context_length: int
) -> GpuProgram:
    """Arena: 64 bytes that nothing writes, then x of the prefill phase, then x of the decode phases."""
    words = 128 // 4
    prefill_x, decode_x = 64, 64 + 4 * max_tokens + -4 * max_tokens % 64

    def pointers(**types: str) -> list[ParameterEntry]:
        return [ParameterEntry(name, type) for name, type in types.items()]

    hashed = {
        "positions": "*i32",
        "context_len": "*i32",
        "block_table": "*i32",
        "kv_pool": "*i32",
        "bias": "*fp32",
        "logits": "*fp32",
    }
    parameters = {
        "toy_embed": pointers(token_ids="*i32", table="*fp32", untouched="*fp32", x="*fp32", num_tokens="i32"),
        "toy_append": pointers(
            **dict.fromkeys(("x",), "*fp32"),
            **dict.fromkeys(("positions", "query_start", "block_table", "kv_pool"), "*i32"),
            **dict.fromkeys(("num_tokens", "num_seqs", "max_blocks", "words"), "i32"),
        ),
        "toy_logits": pointers(
            logit_rows="*i32", positions="*i32", query_start="*i32", context_len="*i32", block_table="*i32", kv_pool="*i32",
            bias="*fp32", logits="*fp32", num_seqs="i32", max_blocks="i32", words="i32", vocab_size="i64",
        ),
        "toy_decode_logits": pointers(logit_rows="*i32", **hashed, max_blocks="i32", words="i32", vocab_size="i64"),
        "toy_sample": pointers(
            logits="*fp32", settings_f32="*fp32", settings_i64="*i64", sampled="*i32", num_rows="i32", vocab_size="i32"
        ),
    }  # fmt: skip
    values = {
        **{name: Argument("input", name) for name in INPUTS},
        "table": Argument("weight", 0),
        "bias": Argument("weight", 1),
        "untouched": Argument("arena", 0),
        "kv_pool": Argument("kv_pool", 0),
        "logits": Argument("logits", 0),
        "settings_f32": Argument("sampling", 0),
        "settings_i64": Argument("sampling", 0),
        "sampled": Argument("sampled", 0),
        "num_tokens": Argument("symbol", "T"),
        "num_seqs": Argument("symbol", "B"),
        "num_rows": Argument("symbol", "R"),
        "max_blocks": Argument("symbol", "max_blocks"),
        "words": Argument("constant", words),
        "vocab_size": Argument("constant", VOCAB_SIZE),
    }

    def call(kernel: str, axis: Extent, x: int = 0) -> Call:
        each = values | {"x": Argument("arena", x)}
        arguments = [each[parameter.name] for parameter in parameters[kernel]]
        return Call(kernel=kernel, node=kernel, grid=[axis, Extent(), Extent()], arguments=arguments)

    def calls(logits: str, x: int) -> list[Call]:
        append = call("toy_append", Extent(symbol="T", divisor=4, add_sequences=True), x)  # too many programs: masked
        return [call("toy_embed", Extent(symbol="T", divisor=4), x), append, call(logits, Extent(symbol="R"))]

    decode = [
        Phase(name=f"decode-{size}", max_tokens=size, single_token=True, calls=calls("toy_decode_logits", decode_x))
        for size in decode_tokens
    ]
    prefill = Phase(name="prefill", max_tokens=max_tokens, single_token=False, calls=calls("toy_logits", prefill_x))
    return GpuProgram(
        abi_version=2,
        target=target,
        backend=backend,
        machine=arch,
        scheme=Scheme(weights="fp8", head="bf16", group_size=None, kv="f32"),
        vocab_size=VOCAB_SIZE,
        max_tokens=max_tokens,
        arena_bytes=decode_x + 4 * max([0, *decode_tokens]),
        context_length=context_length,
        kv_cache=KvCacheSpec(
            layer_dtypes=["f32"], num_layers=1, num_kv_heads=1, head_dim=1, block_size=16, bytes_per_block=128
        ),
        weights=[WeightSpec(name="table", dtype="F32", shape=[VOCAB_SIZE]), WeightSpec(name="bias", dtype="F32", shape=[16])],
        warp_size=32 if backend == "cuda" else 64,
        kernels={
            name: KernelEntry(
                source="kernels/toy_kernels.py",
                binary=f"kernels/{arch}/{name}.bin",
                parameters=entries,
                num_warps=4,
                shared_bytes=1024 * index,
                registers=32 + index,
                spill_bytes=0,
                matrix_instructions={},
            )
            for index, (name, entries) in enumerate(parameters.items())
        },
        sampler=call("toy_sample", Extent(symbol="R")),
        phases=[*decode, prefill],
    )


@pytest.fixture(scope="session")
def gpu_logits() -> Callable[[Sequence[int]], np.ndarray]:
    """What the toy kernels must compute for a sequence, `[T, V]`, in plain numpy."""

    def compute(ids: Sequence[int]) -> np.ndarray:
        at = np.arange(len(ids), dtype=np.int64)
        stored = (7 * np.asarray(ids, np.int64) + 3) % VOCAB_SIZE
        states = np.cumsum((stored + 1) * (2 * at + 1) * (at + 7)) + 7  # [T]
        mixed = (states[:, None] * 2654435761 + np.arange(VOCAB_SIZE) * 40503) * 2246822519
        return ((mixed >> 15) & 0xFFFF).astype(np.float32)

    return compute


@pytest.fixture(scope="session")
def gpu_bundle(build_gpu_bundle: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The plain GPU toy bundle; tests must not write into it."""
    return build_gpu_bundle(tmp_path_factory.mktemp("gpu-bundles") / "toy.llmc")


def write_weights(path: Path, header: bytes | None = None) -> None:
    path.parent.mkdir(exist_ok=True)
    if header is None:
        header = json.dumps({"seed": {"dtype": "F32", "shape": [16], "data_offsets": [0, 64]}}).encode()
    header += b" " * (-(8 + len(header)) % 4096)
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"\0\0\xe0\x40" * 16)  # 7.0


def write_manifest(
    root: Path,
    targets: Sequence[str] = (TARGET,),
    entries: Sequence[TargetEntry] = (),
    *,
    keep_targets: bool = False,
    **changes: Any,
) -> None:
    """Write a manifest over the files there for CPU `targets` and other `entries`, or the targets that it had before."""
    files = sorted(path for path in root.rglob("*") if path.is_file() and path.name != MANIFEST_NAME)
    of_cpu = [
        TargetEntry(name=name, program=f"programs/{name}/program.json", weights=[f"weights/{name}.safetensors"])
        for name in targets
    ]
    if keep_targets:
        changes = {"targets": json.loads((root / MANIFEST_NAME).read_text())["targets"], **changes}
    manifest = Manifest(
        schema_version=2,
        min_runtime="0.1.0",
        model=ModelFacts(name="toy", architecture="Toy", num_parameters=16, vocab_size=VOCAB_SIZE, context_length=256),
        toolchain={"llmc": "0.1.0"},
        targets=[*of_cpu, *entries],
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
