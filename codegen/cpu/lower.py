"""Lowers a planned phase graph to kernel calls, one operator at a time, and collects the weights they take."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias, cast

import torch
from torch import fx

from ...errors import UnsupportedModelError
from ...passes.dialect import llmc
from ...passes.graph import Operator, WeightTable, module_path, operator_name, shape, source_line
from ...passes.plan_memory import MemoryPlan
from ...runtime.program import Call
from .formats import MatrixFormat
from .kv_layout import KvLayout
from .weight_layout import StoredWeight


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelCall:
    """One line of the generated program: a C++ function and its arguments, with what a reader wants to know about it."""

    function: str
    arguments: tuple[str, ...]
    node: str
    inputs: tuple[str, ...]
    output: str
    weights: tuple[str, ...]
    attributes: Mapping[str, object]

    def describe(self) -> Call:
        """The call as program.json lists it."""
        return Call(
            kernel=self.function,
            node=self.node,
            inputs=list(self.inputs),
            outputs=[self.output],
            weights=list(self.weights),
            attributes=dict(self.attributes),
        )


@dataclass(slots=True)
class WeightList:
    """The weights of a program in the order of their pointers, shared by its phases."""

    stored: list[StoredWeight] = field(default_factory=list)
    _position: dict[str, int] = field(default_factory=dict)
    _pointers: int = 0

    def pointer(self, weight: StoredWeight) -> int:
        """The index of the first tensor of `weight`, which is added on first use."""
        if weight.name not in self._position:
            self._position[weight.name] = self._pointers
            self._pointers += len(weight.specs())
            self.stored.append(weight)
        return self._position[weight.name]


@dataclass(slots=True, kw_only=True)
class _Phase:
    """What lowering one graph needs: the plan, the weights so far, and constants of the model."""

    module: fx.GraphModule
    plan: MemoryPlan
    weights: WeightList
    kv: KvLayout
    workspace_offset: int

    def at(self, value: object) -> str:
        """Pointer to a value in the arena, or to the caller's logits."""
        name = cast(fx.Node, value).name
        buffer = self.plan.buffers.get(name)
        if buffer is None:
            return "c.step->logits"
        return f"f({buffer.offset})" if buffer.format == "f32-rows" else f"p({buffer.offset})"

    def rows(self, value: fx.Node) -> str:
        """`c.T` or `c.R`."""
        buffer = self.plan.buffers.get(value.name)
        return f"c.{buffer.rows}" if buffer else "c.R"

    def matrix(self, node: object, format: MatrixFormat, glu: bool = False) -> str:
        """`data, scale, group` arguments of a matrix."""
        target = str(cast(fx.Node, node).target)
        stored = StoredWeight(name=target, shape=WeightTable.of(self.module)[target].shape, format=format, glu=glu)
        data = self.weights.pointer(stored)
        return f"w[{data}], {f'w[{data + 1}]' if len(stored.specs()) > 1 else 'nullptr'}, {format.group or 0}"

    def vector(self, node: object, offset: float = 0.0, glu: bool = False) -> str:
        """Pointer to a vector, or nullptr for an absent one."""
        if node is None:
            return "nullptr"
        target = str(cast(fx.Node, node).target)
        return f"v({self.weights.pointer(StoredWeight(name=target, shape=shape(cast(fx.Node, node)), offset=offset, glu=glu))})"


@dataclass(frozen=True, slots=True)
class _Kernel:
    function: str
    arguments: tuple[str, ...]


_Lowering: TypeAlias = "Callable[[_Phase, fx.Node], tuple[_Kernel, ...]]"
REGISTRY: dict[Operator, _Lowering] = {}


def lowers(target: Operator) -> Callable[[_Lowering], _Lowering]:
    """Register the lowering of a dialect operator: node -> C++ functions and their arguments after the context."""

    def add(function: _Lowering) -> _Lowering:
        REGISTRY[target] = function
        return function

    return add


def lower_phase(
    module: fx.GraphModule, plan: MemoryPlan, weights: WeightList, *, kv: KvLayout, workspace_offset: int
) -> list[KernelCall]:
    """The kernel calls of one phase. Raises `UnsupportedModelError` for an operator that has no CPU kernel."""
    phase = _Phase(
        module=module,
        plan=plan,
        weights=weights,
        kv=kv,
        workspace_offset=workspace_offset,
    )
    calls: list[KernelCall] = []
    for node in module.graph.nodes:
        if node.op != "call_function" or node.target is operator.getitem:
            continue
        if node.target not in REGISTRY:
            raise UnsupportedModelError(
                f"lower: {module_path(node)} needs {operator_name(node)} ({source_line(node)}), for which there is no CPU kernel; "
                f"supported: {', '.join(sorted(str(op).removesuffix('.default') for op in REGISTRY))}"
            )
        calls += [_call(node, kernel) for kernel in REGISTRY[node.target](phase, node)]
    return calls


def _call(node: fx.Node, kernel: _Kernel) -> KernelCall:
    names = [argument.name for argument in cast(torch._ops.OpOverload, node.target)._schema.arguments]
    constants = {n: v for n, v in zip(names, node.args, strict=False) if not isinstance(v, fx.Node) and v is not None}
    nodes = [a for a in node.args if isinstance(a, fx.Node)]
    return KernelCall(
        function=kernel.function,
        arguments=("c", *kernel.arguments),
        node=node.name,
        inputs=tuple(n.name for n in nodes if n.op != "get_attr"),
        output=node.name,
        weights=tuple(str(n.target) for n in nodes if n.op == "get_attr"),
        attributes=constants,
    )


def _format(text: object) -> MatrixFormat:
    return MatrixFormat.parse(cast(str, text))


def _tag(format: MatrixFormat) -> str:
    return f"Format::{format.kind}"


@lowers(llmc.embedding.default)
def _embedding(phase: _Phase, node: fx.Node) -> tuple[_Kernel, ...]:
    weight, _, scale, format = node.args
    vocab, width = shape(cast(fx.Node, weight))
    matrix = phase.matrix(weight, _format(format))
    arguments = (matrix, str(vocab), str(width), _float(scale), phase.at(node))
    return (_Kernel(f"embedding<{_tag(_format(format))}>", arguments),)


@lowers(llmc.rms_norm.default)
def _rms_norm(phase: _Phase, node: fx.Node) -> tuple[_Kernel, ...]:
    x, weight, eps, offset, pack = node.args
    source = cast(fx.Node, x)
    common = (phase.rows(source), str(shape(source)[-1]), phase.at(x), "nullptr", "0.0f", "nullptr")
    arguments = (*common, phase.vector(weight, cast(float, offset)), _float(eps), _output(phase, node, cast(str, pack)))
    return (_Kernel("residual_norm<false, false>", arguments),)


@lowers(llmc.add_rms_norm.default)
def _add_rms_norm(phase: _Phase, node: fx.Node) -> tuple[_Kernel, ...]:
    x, residual, weight, eps, offset, post_weight, post_eps, pack = node.args
    source, shift = cast(fx.Node, x), cast(float, offset)
    arguments = (
        phase.rows(source),
        str(shape(source)[-1]),
        phase.at(x),
        phase.vector(post_weight, shift),
        _float(post_eps),
        phase.at(residual),
        phase.vector(weight, shift),
        _float(eps),
        _output(phase, node, cast(str, pack)),
    )
    return (_Kernel(f"residual_norm<{'true' if post_weight is not None else 'false'}, true>", arguments),)


def _output(phase: _Phase, node: fx.Node, pack: str) -> str:
    if not pack:
        return f"OutF32{{{phase.at(node)}}}"
    format = _format(pack)
    return f"OutOperand<{_tag(format)}>{{{phase.at(node)}, {format.group or 0}}}"


@lowers(llmc.pack_rows.default)
def _pack_rows(phase: _Phase, node: fx.Node) -> tuple[_Kernel, ...]:
    x, text = cast(fx.Node, node.args[0]), node.args[1]
    format = _format(text)
    arguments = (phase.at(x), phase.rows(x), str(shape(x)[-1]), str(format.group or 0), phase.at(node))
    return (_Kernel(f"pack_rows<{_tag(format)}>", arguments),)


@lowers(llmc.linear.default)
def _linear(phase: _Phase, node: fx.Node) -> tuple[_Kernel, ...]:
    x, weight, bias, text = node.args
    return _product(phase, node, cast(fx.Node, x), cast(fx.Node, weight), bias, _format(text), None)


@lowers(llmc.linear_glu.default)
def _linear_glu(phase: _Phase, node: fx.Node) -> tuple[_Kernel, ...]:
    x, weight, bias, activation, text = node.args
    return _product(phase, node, cast(fx.Node, x), cast(fx.Node, weight), bias, _format(text), cast(str, activation))


def _product(
    phase: _Phase, node: fx.Node, x: fx.Node, weight: fx.Node, bias: object, format: MatrixFormat, activation: str | None
) -> tuple[_Kernel, ...]:
    glu = activation is not None
    epilogue = f"glu_{activation}" if glu else "none"
    width = str(shape(node)[-1])
    arguments = (
        phase.at(x),
        phase.matrix(weight, format, glu),
        phase.vector(bias, glu=glu),
        phase.rows(node),
        width,
        str(shape(x)[-1]),
        phase.at(node),
        width,
    )
    return (_Kernel(f"linear<{_tag(format)}, Epilogue::{epilogue}>", arguments),)


@lowers(llmc.gather_rows.default)
def _gather_rows(phase: _Phase, node: fx.Node) -> tuple[_Kernel, ...]:
    x = cast(fx.Node, node.args[0])
    return (_Kernel("gather_rows", (phase.at(x), str(shape(x)[-1]), phase.at(node))),)


@lowers(llmc.rope_paged_attention.default)
def _attention(phase: _Phase, node: fx.Node) -> tuple[_Kernel, ...]:
    qkv, q_norm, k_norm, norm_eps, norm_offset, inv_freq, rope_scaling = node.args[:7]
    num_heads, num_kv_heads, scale, window, softcap, layer, _, rotate_keys, split_kv = node.args[12:]
    place, kv = phase.kv.place(cast(int, layer)), phase.kv.kernel_type(cast(int, layer))
    dim = phase.kv.shape.head_dim
    rotary = str(2 * shape(cast(fx.Node, inv_freq))[0])
    heads = (str(num_heads), str(num_kv_heads))
    width = str(shape(node)[-1])
    offset = cast(float, norm_offset)
    append = (
        phase.at(qkv),
        *heads,
        phase.vector(q_norm, offset),
        phase.vector(k_norm, offset),
        _float(norm_eps),
        phase.vector(inv_freq),
        rotary,
        _float(rope_scaling),
        place,
    )
    attend = (
        phase.at(qkv),
        str(shape(cast(fx.Node, qkv))[-1]),
        *heads,
        place,
        _float(scale),
        str(window),
        _float(softcap),
        phase.at(node),
        width,
        f"p({phase.workspace_offset})",
    )
    kind = "decode" if split_kv else "prefill"
    kernels = (
        _Kernel(f"rope_append<{dim}, {kv}, true>" if rotate_keys else f"rope_append<{dim}, {kv}>", append),
        _Kernel(f"attention_{kind}<{dim}, {kv}>", attend),
    )
    if not phase.kv.is_packed(cast(int, layer)):
        return kernels
    return (*kernels, _Kernel(f"keep_newest<{dim}>", (phase.at(qkv), *heads, place)))


def _float(value: object) -> str:
    text = repr(float(cast(float, value)))
    return f"{text}f"
