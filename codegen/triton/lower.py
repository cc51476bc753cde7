"""Lowers a planned phase graph to launches of Triton kernels, one operator at a time."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias, cast

from torch import fx

from ...errors import UnsupportedModelError
from ...passes.dialect import llmc
from ...passes.graph import Operator, WeightTable, is_call, module_path, operator_name, shape, source_line
from ...passes.insert_kv_cache import KvCacheShape
from ...passes.plan_memory import MemoryPlan, RowLayout
from ...runtime.program import KV_ITEM_BYTES, KV_SCALE_BYTES, Argument
from . import attention, linear, rows, tiles
from .attention import AttentionProblem, RopeSettings
from .calls import GpuCall, Value, WeightList, Work, Workspace
from .formats import GpuFormat, row_stride
from .kernel import Kernel
from .linear import LinearProblem
from .tiles import DeviceFacts
from .weight_layout import GpuWeight

_GEMM_ROWS = 64  # a decode phase of more rows than this is bound by operations: its products are those of prefill
REFERENCE_CONTEXT = 1024  # tokens before each sequence of a decode step, for what a call moves


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseShape:
    """A phase: up to `max_tokens` tokens, one of each sequence if `single_token`; `owner` names the memory it may use."""

    name: str
    max_tokens: int
    single_token: bool

    @property
    def owner(self) -> str:
        """Phases of one owner never run at the same time."""
        return "decode" if self.single_token else "prefill"


@dataclass(slots=True, kw_only=True)
class Lowering:
    """What lowering one graph needs."""

    module: fx.GraphModule
    phase: PhaseShape
    plan: MemoryPlan
    plan_offset: int
    device: DeviceFacts
    fp8_type: Literal["fp8e4nv", "fp8e4b8"]
    kv_format: Literal["bf16", "fp8", "int8"]
    weights: WeightList
    workspace: Workspace

    @property
    def tokens(self) -> int:
        """Tokens of the reference batch."""
        return self.phase.max_tokens

    def arena(self, value: object) -> Argument:
        """The buffer of a value, or the caller's logits."""
        buffer = self.plan.buffers.get(cast(fx.Node, value).name)
        return Argument("logits", 0) if buffer is None else Argument("arena", self.plan_offset + buffer.offset)

    def scales(self, value: object) -> Argument:
        """The row scales behind the values of a packed linear input."""
        node = cast(fx.Node, value)
        buffer = self.plan.buffers[node.name]
        width = shape(node if not is_call(node, llmc.add_rms_norm.default) else cast(fx.Node, node.args[0]))[-1]
        return Argument("arena", self.plan_offset + buffer.offset + row_stride(width) * self.phase.max_tokens)

    def rows(self, value: fx.Node) -> Literal["T", "R"]:
        """Whether a value has a row for each token or for each row of logits."""
        buffer = self.plan.buffers.get(value.name)
        return cast(Literal["T", "R"], buffer.rows) if buffer else "R"

    def matrix(self, node: object, format: GpuFormat) -> tuple[dict[str, Value], int]:
        """Arguments `weight` and `weight_scale` of a matrix, and its bytes."""
        target = str(cast(fx.Node, node).target)
        stored = GpuWeight(name=target, shape=WeightTable.of(self.module)[target].shape, format=format.stored)
        first = self.weights.index(stored)
        arguments: dict[str, Value] = {"weight": Argument("weight", first)}
        if len(stored.specs()) > 1:
            arguments["weight_scale"] = Argument("weight", first + 1)
        return arguments, stored.num_bytes()

    def vector(self, node: object, offset: float = 0.0) -> Argument:
        """A vector, with `offset` added when it is stored."""
        source = cast(fx.Node, node)
        return Argument("weight", self.weights.index(GpuWeight(name=str(source.target), shape=shape(source), offset=offset)))


@dataclass(frozen=True, slots=True)
class _Launch:
    kernel: Kernel
    arguments: Mapping[str, Value]
    work: Work


_Lowers: TypeAlias = "Callable[[Lowering, fx.Node], list[_Launch]]"
REGISTRY: dict[Operator, _Lowers] = {}
_SYMBOLS: dict[str, Value] = {
    "num_tokens": Argument("symbol", "T"),
    "num_seqs": Argument("symbol", "B"),
    "max_blocks": Argument("symbol", "max_blocks"),
    **{
        name: Argument("input", name)
        for name in ("token_ids", "positions", "query_start", "context_len", "block_table", "logit_rows")
    },
    "kv_pool": Argument("kv_pool", 0),
    "kv_scales": Argument("kv_pool", 0),
}


def lowers(*targets: Operator) -> Callable[[_Lowers], _Lowers]:
    """Register the lowering of dialect operators: node -> kernels and their arguments."""

    def add(function: _Lowers) -> _Lowers:
        REGISTRY.update(dict.fromkeys(targets, function))
        return function

    return add


def lower_phase(lowering: Lowering) -> list[GpuCall]:
    """The launches of one phase. Raises `UnsupportedModelError` for an operator that has no GPU kernel."""
    calls: list[GpuCall] = []
    for node in lowering.module.graph.nodes:
        if node.op != "call_function" or node.target is operator.getitem:
            continue
        if node.target not in REGISTRY:
            raise UnsupportedModelError(
                f"lower: {module_path(node)} needs {operator_name(node)} ({source_line(node)}), for which there is no GPU kernel; "
                f"supported: {', '.join(sorted(str(op).removesuffix('.default') for op in REGISTRY))}"
            )
        calls += [_call(node, launch) for launch in REGISTRY[node.target](lowering, node)]
    return calls


def row_layout(value: fx.Node, width: int, pack: str) -> RowLayout:
    """Linear inputs in their packed form; what attention and gated linears make, and what attention reads, in bf16; the rest in float32."""
    if pack:
        operand = GpuFormat.parse(pack).operand
        return RowLayout(format=operand, row_bytes=row_stride(width) * 2 if operand == "bf16" else row_stride(width) + 4)
    if is_half(value):
        return RowLayout(format="bf16", row_bytes=row_stride(width) * 2)
    return RowLayout(format="f32", row_bytes=width * 4)


def is_half(value: fx.Node) -> bool:
    """Whether a value that is no packed linear input is stored in bf16."""
    if is_call(value, llmc.linear_glu.default, llmc.rope_paged_attention.default):
        return True
    readers = [user for user in value.users if not is_call(user, operator.getitem)]
    return is_call(value, llmc.linear.default) and bool(readers) and all(is_call(u, llmc.rope_paged_attention.default) for u in readers)


def is_packed(value: fx.Node, format: str) -> bool:
    """Whether a value is stored as a linear of that format takes it."""
    return is_half(value) and GpuFormat.parse(format).operand == "bf16"


def _call(node: fx.Node, launch: _Launch) -> GpuCall:
    nodes = [argument for argument in node.args if isinstance(argument, fx.Node)]
    return GpuCall(
        kernel=launch.kernel,
        node=node.name,
        inputs=tuple(n.name for n in nodes if n.op != "get_attr"),
        weights=tuple(str(n.target) for n in nodes if n.op == "get_attr"),
        arguments=_SYMBOLS | dict(launch.arguments),
        work=launch.work,
    )


def _count(rows_of: str) -> Argument:
    return Argument("symbol", rows_of)


def _scale_arguments(lowering: Lowering, node: fx.Node, format: GpuFormat) -> dict[str, Argument]:
    """What a kernel that packs rows takes beside them: where their scales go, and the scale of all of them if that is known."""
    if format.operand == "bf16":
        return {}
    scales = {"out_scale": lowering.scales(node)}
    return scales if format.step is None else scales | {"step": Argument("constant", format.step)}


def _operand_bytes(width: int, format: str) -> int:
    return 2 * width if format == "bf16" else width + 4


@lowers(llmc.embedding.default)
def _embedding(lowering: Lowering, node: fx.Node) -> list[_Launch]:
    weight, _, scale, text = node.args
    vocab, width = shape(cast(fx.Node, weight))
    matrix, _ = lowering.matrix(weight, GpuFormat.parse(cast(str, text)))
    kernel = rows.embedding_kernel(vocab, width, cast(float, scale))
    return [_Launch(kernel, matrix | {"out": lowering.arena(node)}, Work(bytes=lowering.tokens * width * 6))]


@lowers(llmc.rms_norm.default)
def _rms_norm(lowering: Lowering, node: fx.Node) -> list[_Launch]:
    x, weight, eps, offset, pack = node.args
    return _norm(lowering, node, x, None, weight, cast(float, eps), cast(float, offset), None, 0.0, cast(str, pack))


@lowers(llmc.add_rms_norm.default)
def _add_rms_norm(lowering: Lowering, node: fx.Node) -> list[_Launch]:
    x, residual, weight, eps, offset, post_weight, post_eps, pack = node.args
    shift, post = cast(float, offset), cast(float, post_eps)
    return _norm(lowering, node, x, residual, weight, cast(float, eps), shift, post_weight, post, cast(str, pack))


def _norm(
    lowering: Lowering,
    node: fx.Node,
    x: object,
    residual: object,
    weight: object,
    eps: float,
    offset: float,
    post_weight: object,
    post_eps: float,
    pack: str,
) -> list[_Launch]:
    source = cast(fx.Node, x)
    width, of = shape(source)[-1], lowering.rows(source)
    format = GpuFormat.parse(pack) if pack else None
    output = format.operand if format is not None else "f32"
    settings = rows.NormSettings(
        width=width,
        eps=eps,
        residual=residual is not None,
        post_norm=post_weight is not None,
        post_eps=post_eps,
        output=output,
        fp8_type=lowering.fp8_type,
        static=format is not None and format.step is not None,
    )
    arguments: dict[str, Value] = {
        "x": lowering.arena(x),
        "weight": lowering.vector(weight, offset),
        "out": lowering.arena(node),
        "num_rows": _count(of),
    }
    if residual is not None:
        arguments["residual"] = lowering.arena(residual)
    if post_weight is not None:
        arguments["post_weight"] = lowering.vector(post_weight, offset)
    if format is not None:
        arguments |= _scale_arguments(lowering, node, format)
    moved = width * (4 + (8 if residual is not None else 0)) + (_operand_bytes(width, output) if pack else 4 * width)
    return [_Launch(rows.norm_kernel(settings, of), arguments, Work(bytes=lowering.tokens * moved))]


@lowers(llmc.pack_rows.default)
def _pack_rows(lowering: Lowering, node: fx.Node) -> list[_Launch]:
    x, text = cast(fx.Node, node.args[0]), node.args[1]
    width, of = shape(x)[-1], lowering.rows(x)
    half = is_half(x)
    format = GpuFormat.parse(cast(str, text))
    output = format.operand
    kernel = rows.pack_rows_kernel(
        width,
        input="bf16" if half else "f32",
        output=output,
        input_stride=row_stride(width) if half else width,
        fp8_type=lowering.fp8_type,
        static=format.step is not None,
        rows=of,
    )
    arguments = {"x": lowering.arena(x), "out": lowering.arena(node), "num_rows": _count(of)}
    arguments |= _scale_arguments(lowering, node, format)
    moved = (2 if half else 4) * width + _operand_bytes(width, output)
    return [_Launch(kernel, arguments, Work(bytes=lowering.tokens * moved))]


@lowers(llmc.gather_rows.default)
def _gather_rows(lowering: Lowering, node: fx.Node) -> list[_Launch]:
    x = cast(fx.Node, node.args[0])
    width = shape(x)[-1]
    arguments = {"x": lowering.arena(x), "out": lowering.arena(node), "num_rows": _count("R")}
    return [_Launch(rows.gather_rows_kernel(width), arguments, Work(bytes=_logit_rows(lowering) * width * 8))]


def _logit_rows(lowering: Lowering) -> int:
    """Rows of logits of the reference batch: of every sequence; prefill is one sequence."""
    return lowering.tokens if lowering.phase.single_token else 1


@lowers(llmc.linear.default, llmc.linear_glu.default, llmc.linear_residual.default)
def _linear(lowering: Lowering, node: fx.Node) -> list[_Launch]:
    x, weight, bias = node.args[:3]
    glu, residual = is_call(node, llmc.linear_glu.default), is_call(node, llmc.linear_residual.default)
    format, k = GpuFormat.parse(cast(str, node.args[-1])), shape(cast(fx.Node, x))[-1]
    problem = LinearProblem(
        n=shape(node)[-1],
        k=k,
        format={"fp8-fnuz": "fp8", "w8a8": "int8", "w4a16": "int4"}.get(format.kind, format.kind),  # type: ignore[arg-type]
        group=format.group,
        bias=bias is not None,
        activation=cast(Literal["silu"], node.args[3]) if glu else None,
        residual=residual,
        output="bf16" if is_half(node) else "f32",
        fp8_type=lowering.fp8_type,
        rows=lowering.rows(node),
        backend="rocm" if lowering.device.arch.startswith("gfx") else "cuda",
    )
    matrix, weight_bytes = lowering.matrix(weight, format)
    arguments = matrix | {"x": lowering.arena(x), "out": lowering.arena(node), "num_rows": _count(problem.rows)}
    if format.operand != "bf16":
        arguments["x_scale"] = lowering.scales(x)
    if bias is not None:
        arguments["bias"] = lowering.vector(bias)
    few = lowering.phase.single_token and lowering.phase.max_tokens <= _GEMM_ROWS
    tile = tiles.choose_tile(problem, "decode" if few else "prefill", lowering.phase.max_tokens, lowering.device)
    if few:
        kernel = linear.decode_kernel(problem, tile)
        partials, counters = linear.workspace_bytes(problem, tile, lowering.phase.max_tokens)
        if partials:
            arguments["partials"] = lowering.workspace.region(lowering.phase.owner, "partial sums", partials)
            arguments["counters"] = lowering.workspace.region(lowering.phase.owner, "counters", counters)
    else:
        kernel = linear.prefill_kernel(problem, tile)
    num_rows = lowering.tokens if problem.rows == "T" else _logit_rows(lowering)
    out_bytes = (2 if problem.output == "bf16" else 4) * problem.n * (2 if residual else 1)
    work = Work(
        bytes=weight_bytes + num_rows * (_operand_bytes(k, format.operand) + out_bytes),
        operations=2 * num_rows * k * problem.weight_rows,
        dtype=format.operand,
    )
    return [_Launch(kernel, arguments, work)]


@lowers(llmc.rope_paged_attention.default)
def _attention(lowering: Lowering, node: fx.Node) -> list[_Launch]:
    qkv, q_norm, k_norm, norm_eps, norm_offset, inv_freq, rope_scaling = node.args[:7]
    num_heads, num_kv_heads, scale, window, softcap, layer = cast("tuple[int, int, float, int, float, int]", node.args[12:18])
    cache = cast(KvCacheShape, lowering.module.meta["kv_cache"])
    layer_bytes = attention.layer_bytes(num_kv_heads, cache.head_dim, lowering.kv_format)
    problem = AttentionProblem(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=cache.head_dim,
        scale=scale,
        window=window,
        softcap=softcap,
        kv_format=lowering.kv_format,
        fp8_type=lowering.fp8_type,
        bytes_per_block=cache.num_layers * layer_bytes,
    )
    rope = RopeSettings(
        rotary=2 * shape(cast(fx.Node, inv_freq))[0],
        q_norm=q_norm is not None,
        k_norm=k_norm is not None,
        norm_eps=cast(float, norm_eps),
        scaling=cast(float, rope_scaling),
    )
    owner, max_tokens = lowering.phase.owner, lowering.phase.max_tokens
    q_out = lowering.workspace.region(owner, "queries", max_tokens * num_heads * cache.head_dim * 2)
    place: dict[str, Value] = {"layer_offset": Argument("constant", layer * layer_bytes)}
    append = place | {"qkv": lowering.arena(qkv), "inv_freq": lowering.vector(inv_freq), "q_out": q_out}
    for name, weight in (("q_norm", q_norm), ("k_norm", k_norm)):
        if weight is not None:
            append[name] = lowering.vector(weight, cast(float, norm_offset))
    attend = place | {"q": q_out, "out": lowering.arena(node)}
    if lowering.phase.single_token:
        decode_tile = attention.choose_decode_tile(
            problem, lowering.device.arch, num_processors=lowering.device.num_processors, max_seqs=max_tokens
        )
        kernel = attention.decode_kernel(problem, decode_tile)
        partials, counters = attention.workspace_bytes(problem, decode_tile, max_tokens)
        if partials:
            attend["partials"] = lowering.workspace.region(owner, "partial sums", partials)
            attend["counters"] = lowering.workspace.region(owner, "counters", counters)
    else:
        kernel = attention.prefill_kernel(problem, attention.choose_prefill_tile(problem, lowering.device.arch))
    return [
        _Launch(attention.append_kernel(problem, rope), append, _append_work(problem, lowering.tokens)),
        _Launch(kernel, attend, _attention_work(problem, lowering)),
    ]


def _token_bytes(problem: AttentionProblem) -> int:
    """Bytes of the keys and values of one token in one layer."""
    item, scale = KV_ITEM_BYTES[problem.kv_format], KV_SCALE_BYTES[problem.kv_format]
    return 2 * problem.num_kv_heads * (problem.head_dim * item + scale)


def _append_work(problem: AttentionProblem, tokens: int) -> Work:
    heads = 2 * problem.num_heads + 2 * problem.num_kv_heads
    return Work(bytes=tokens * (heads * problem.head_dim * 2 + _token_bytes(problem)))


def _attention_work(problem: AttentionProblem, lowering: Lowering) -> Work:
    """Decode reads `REFERENCE_CONTEXT` tokens for each sequence; prefill is one sequence that sees itself."""
    tokens, width = lowering.tokens, problem.num_heads * problem.head_dim
    if lowering.phase.single_token:
        seen = min(REFERENCE_CONTEXT, problem.window or REFERENCE_CONTEXT)
        keys, pairs = tokens * seen, tokens * seen
    else:
        window = min(tokens, problem.window or tokens)
        keys, pairs = tokens, window * tokens - window * (window - 1) // 2
    return Work(bytes=keys * _token_bytes(problem) + tokens * width * 4, operations=4 * pairs * width)

