"""The schema of program.json: what one target's program takes, its memory, and the libraries that hold it."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from ..errors import BundleError

ABI_VERSION = 1
BLOCK_SIZE = 16  # tokens in a KV block; fixed by the layout of a block
MAX_THREADS = 256  # the arena has workspace for so many
CPU_LEVELS = ("portable", "avx2", "avx512", "amx")  # index = what llmc_cpu_level returns
MAX_PROGRAM_BYTES = 64 << 20

KV_ITEM_BYTES = {"f32": 4, "bf16": 2}

Count = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
Bytes = Annotated[int, msgspec.Meta(ge=0, le=2**46)]
Dimension = Annotated[int, msgspec.Meta(ge=0, le=2**46)]


class Scheme(msgspec.Struct, frozen=True, kw_only=True):
    """The number formats of a target."""

    weights: str
    head: str
    group_size: int | None
    kv: str


class KvCacheSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The KV pool a program works on; to the runtime a block is `bytes_per_block` opaque bytes for 16 tokens."""

    dtype: str
    num_layers: Count
    num_kv_heads: Count
    head_dim: Count
    block_size: int
    bytes_per_block: Annotated[int, msgspec.Meta(ge=1, le=2**40)]


class WeightSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One weight tensor the program takes; `dtype` is a safetensors name such as `BF16`."""

    name: str
    dtype: str
    shape: list[Dimension]


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """One kernel call, for people and tools; the runtime never interprets it."""

    kernel: str
    node: str
    inputs: list[Any] = []
    outputs: list[Any] = []
    weights: list[Any] = []
    attributes: dict[str, Any] = {}


class Phase(msgspec.Struct, frozen=True, kw_only=True):
    """A specialisation of the step: `prefill` takes any batch, `decode` one token of each sequence."""

    name: str
    calls: list[Call]


class Program(msgspec.Struct, frozen=True, kw_only=True):
    """program.json; the fields are those of docs/bundle.md."""

    abi_version: int
    target: str
    backend: str
    machine: str
    scheme: Scheme
    vocab_size: Count
    max_tokens: Count
    arena_bytes: Bytes
    context_length: Count
    kv_cache: KvCacheSpec
    weights: list[WeightSpec]
    libraries: dict[str, str]
    phases: Annotated[list[Phase], msgspec.Meta(min_length=1)]

    def phase_index(self, name: str) -> int | None:
        """The position of the phase called `name`, or None."""
        return next((index for index, phase in enumerate(self.phases) if phase.name == name), None)


class _Abi(msgspec.Struct):
    abi_version: int


def encode_program(program: Program) -> bytes:
    """The bytes of program.json: fields in the order of the schema, two spaces, a final newline; deterministic."""
    return msgspec.json.format(msgspec.json.encode(program, order="deterministic"), indent=2) + b"\n"


def decode_program(data: bytes, where: str) -> Program:
    """Parse program.json and check that its figures agree with each other; raises BundleError."""
    try:
        abi_version = msgspec.json.decode(data, type=_Abi).abi_version
        check_abi(abi_version, where)
        program = msgspec.json.decode(data, type=Program)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BundleError(f"{where}: not a program description: {error}; compile the bundle again") from None
    kv = program.kv_cache
    if kv.block_size != BLOCK_SIZE:
        raise BundleError(f"{where}: kv_cache.block_size is {kv.block_size}, expected {BLOCK_SIZE}")
    item = KV_ITEM_BYTES.get(kv.dtype)
    if item is None:
        raise BundleError(f"{where}: kv_cache.dtype is {kv.dtype!r}, expected one of {', '.join(KV_ITEM_BYTES)}")
    least = 2 * kv.num_layers * kv.num_kv_heads * kv.head_dim * BLOCK_SIZE * item
    if kv.bytes_per_block < least:
        raise BundleError(
            f"{where}: kv_cache.bytes_per_block is {kv.bytes_per_block}, but 2 * {kv.num_layers} layers * "
            f"{kv.num_kv_heads} heads * {kv.head_dim} * {BLOCK_SIZE} tokens * {item} bytes = {least}"
        )
    if kv.bytes_per_block % 64:
        raise BundleError(f"{where}: kv_cache.bytes_per_block is {kv.bytes_per_block}, expected a multiple of 64")
    if program.phase_index("prefill") is None:
        names = [phase.name for phase in program.phases]
        raise BundleError(f"{where}: no phase is called 'prefill'; found {names}")
    weight_names = [weight.name for weight in program.weights]
    if len(set(weight_names)) != len(weight_names):
        twice = next(name for name in weight_names if weight_names.count(name) > 1)
        raise BundleError(f"{where}: weight {twice!r} is listed more than once")
    if program.backend == "cpu":
        unknown = sorted(set(program.libraries) - set(CPU_LEVELS))
        if unknown:
            raise BundleError(f"{where}: unknown library levels {unknown}; expected {', '.join(CPU_LEVELS)}")
        if "portable" not in program.libraries:
            raise BundleError(f"{where}: no 'portable' library; found {sorted(program.libraries)}")
    return program


def check_abi(found: int, where: str) -> None:
    """Refuse a program of another C interface; raises BundleError."""
    if found != ABI_VERSION:
        fix = "upgrade llmc" if found > ABI_VERSION else "compile the bundle again with this llmc"
        raise BundleError(f"{where}: abi_version is {found}, this runtime calls {ABI_VERSION}; {fix}")
