"""The schema of program.json: what one target's program takes, its memory, and the libraries or kernels that hold it."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

import msgspec

from ..errors import BundleError

ABI_VERSION = 2
BLOCK_SIZE = 16  # tokens in a KV block; fixed by the layout of a block
MAX_THREADS = 256  # the arena has workspace for so many
CPU_LEVELS = ("portable", "avx2", "avx512", "amx")  # index = what llmc_cpu_level returns
MAX_PROGRAM_BYTES = 64 << 20

KV_ITEM_BYTES = {"f32": 4, "bf16": 2, "fp8": 1, "int8": 1}
KV_SCALE_BYTES = {"f32": 0, "bf16": 0, "fp8": 4, "int8": 4}  # of each token and head, for K and for V
KV_INT4_GROUP = 32  # channels that share a scale of 2 bytes; the last group is filled up
KV_DTYPES = (*KV_ITEM_BYTES, "int4")
KV_SLOT_BLOCKS = 4  # of a sequence's slot in a CPU program: block 0, and a ring of the three newest
BACKENDS = ("cpu", "cuda", "rocm")

Count = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
Bytes = Annotated[int, msgspec.Meta(ge=0, le=2**46)]
Dimension = Annotated[int, msgspec.Meta(ge=0, le=2**46)]


class Scheme(msgspec.Struct, frozen=True, kw_only=True):
    """The number formats of a target."""

    weights: str
    head: str
    group_size: int | None
    kv: str


def kv_head_bytes(dtype: str, head_dim: int) -> int:
    """Bytes of one token's key, or value, for one kv head; `dtype` is one of `KV_DTYPES`."""
    if dtype == "int4":
        return -(-head_dim // KV_INT4_GROUP) * (KV_INT4_GROUP // 2 + 2)
    return head_dim * KV_ITEM_BYTES[dtype] + KV_SCALE_BYTES[dtype]


class KvCacheSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The KV pool a program works on; to the runtime a block is `bytes_per_block` opaque bytes for 16 tokens.

    `layer_dtypes` has one of `KV_DTYPES` for each layer. A sequence that runs has a slot of `bytes_per_slot` beside the pool,
    for what it reads in 16 bit of keys and values that the pool has in fewer; 0 where there is no such thing.
    """

    layer_dtypes: list[str]
    num_layers: Count
    num_kv_heads: Count
    head_dim: Count
    block_size: int
    bytes_per_block: Annotated[int, msgspec.Meta(ge=1, le=2**40)]
    bytes_per_slot: Annotated[int, msgspec.Meta(ge=0, le=2**40)] = 0

    @property
    def dtype(self) -> str:
        """The type of all layers, or `mixed`."""
        return self.layer_dtypes[0] if len(set(self.layer_dtypes)) == 1 else "mixed"

    @property
    def bytes_per_token(self) -> int:
        """Bytes of the pool that a token takes."""
        return self.bytes_per_block // self.block_size


class WeightSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One weight tensor the program takes; `dtype` is a safetensors name such as `BF16`."""

    name: str
    dtype: str
    shape: list[Dimension]


Symbol: TypeAlias = Literal["", "T", "R", "B"]


class Extent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One axis of a launch grid: `factor * (ceil(symbol / divisor) + (B if add_sequences else 0))`.

    `symbol` is T (tokens of the step), R (rows of logits), B (sequences), or empty for the constant 1.
    """

    symbol: Symbol = ""
    divisor: Count = 1
    factor: Count = 1
    add_sequences: bool = False


class Argument(msgspec.Struct, frozen=True, array_like=True):
    """One launch argument, for a pointer: `["arena", byte offset]`, `["weight", index]`, `["input", name]`, or the start of
    `["kv_pool", 0]`, `["logits", 0]`, `["sampling", 0]` (records of llmc_sampling), `["sampled", 0]` (int32 ids); for a number:
    `["symbol", name]`, `["constant", value]`.

    Inputs are the int32 arrays of the step contract, symbols are T, R, B and `max_blocks`. The sampler takes `sampling` and
    `sampled`, the symbol R alone, and no inputs; the phases take neither of the two.
    """

    kind: Literal["arena", "weight", "input", "symbol", "constant", "kv_pool", "logits", "sampling", "sampled"]
    value: int | float | str


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """One kernel call. For people and tools, except that a GPU runtime launches `kernel` over `grid` with `arguments`."""

    kernel: str
    node: str
    inputs: list[Any] = []
    outputs: list[Any] = []
    weights: list[Any] = []
    attributes: dict[str, Any] = {}
    grid: list[Extent] = []
    arguments: list[Argument] = []


class Phase(msgspec.Struct, frozen=True, kw_only=True):
    """A specialisation of the step for up to `max_tokens` tokens; `single_token`: of one token of each sequence."""

    name: str
    max_tokens: Count
    single_token: bool
    calls: list[Call]

    def runs(self, num_tokens: int, single_token: bool) -> bool:
        """Whether the phase takes a batch of that many tokens, all from different sequences if `single_token`."""
        return num_tokens <= self.max_tokens and (single_token or not self.single_token)


class Program(msgspec.Struct, frozen=True, kw_only=True):
    """What every program.json holds; the fields are those of docs/bundle.md. Phases are listed most special first."""

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
    phases: Annotated[list[Phase], msgspec.Meta(min_length=1)]

    def phase_for(self, num_tokens: int, single_token: bool) -> int:
        """The index of the first phase that takes such a batch; the last, `prefill`, takes all."""
        fits = (index for index, phase in enumerate(self.phases) if phase.runs(num_tokens, single_token))
        return next(fits, len(self.phases) - 1)


class CpuProgram(Program, frozen=True, kw_only=True):
    """A program in shared libraries, one for each instruction-set level."""

    libraries: dict[str, str]


class ParameterEntry(msgspec.Struct, frozen=True, array_like=True):
    """A kernel's parameter: `["weight", "*bf16"]`; types are Triton's."""

    name: str
    type: str


class KernelEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A compiled kernel: files beside program.json, what a launch needs, and what was read from the binary."""

    source: str
    binary: str
    parameters: list[ParameterEntry]
    num_warps: Count
    shared_bytes: Bytes
    registers: Bytes
    spill_bytes: Bytes
    matrix_instructions: dict[str, int]


class GpuProgram(Program, frozen=True, kw_only=True):
    """A program of kernel launches; `sampler` is the call that turns logits into token ids."""

    warp_size: Count
    kernels: dict[str, KernelEntry]
    sampler: Call


class _Head(msgspec.Struct):
    abi_version: int
    backend: str


def encode_program(program: Program) -> bytes:
    """The bytes of program.json: fields in the order of the schema, two spaces, a final newline; deterministic."""
    return msgspec.json.format(msgspec.json.encode(program, order="deterministic"), indent=2) + b"\n"


def decode_program(data: bytes, where: str) -> CpuProgram | GpuProgram:
    """Parse program.json and check that its figures agree with each other; raises BundleError."""
    from .program_checks import check_program  # it needs the classes above

    try:
        head = msgspec.json.decode(data, type=_Head)
        check_abi(head.abi_version, where)
        if head.backend not in BACKENDS:
            raise BundleError(f"{where}: backend is {head.backend[:40]!r}, expected one of {', '.join(BACKENDS)}; upgrade llmc")
        program = msgspec.json.decode(data, type=CpuProgram if head.backend == "cpu" else GpuProgram)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BundleError(f"{where}: not a program description: {error}; compile the bundle again") from None
    check_program(program, where)
    return program


def check_abi(found: int, where: str) -> None:
    """Refuse a program of another C interface; raises BundleError."""
    if found != ABI_VERSION:
        fix = "upgrade llmc" if found > ABI_VERSION else "compile the bundle again with this llmc"
        raise BundleError(f"{where}: abi_version is {found}, this runtime calls {ABI_VERSION}; {fix}")
