"""Reading and editing the graph: weights by name, shapes on every node, insertion that keeps both true."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias, cast

import torch
from torch import Tensor, fx

from ..errors import PassError

EXAMPLE_TOKENS = 104729  # a prime no model uses as a width: stands for the dynamic token count T in shapes
EXAMPLE_ROWS = 104723  # the same for R, the rows whose logits are wanted

Operator: TypeAlias = Callable[..., object]
Argument: TypeAlias = "fx.Node | float | int | str | bool | list[int] | None"


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """Where a graph weight comes from: checkpoint tensors stacked along their first axis, stored in `format`."""

    sources: tuple[str, ...]
    shape: tuple[int, ...]
    format: str = "f32"

    @property
    def num_elements(self) -> int:
        """Elements of all sources together."""
        return int(torch.Size(self.shape).numel())


class WeightTable(dict[str, Weight]):
    """Weights of a graph by `get_attr` target; constants (rotary frequencies) are kept by value in `constants`."""

    def __init__(self) -> None:
        super().__init__()
        self.constants: dict[str, Tensor] = {}

    @staticmethod
    def of(module: fx.GraphModule) -> WeightTable:
        """The table of a traced module."""
        return cast(WeightTable, module.meta["weights"])

    def set_format(self, name: str, format: str) -> None:
        """Store weight `name` in `format` from now on."""
        self[name] = replace(self[name], format=format)


def copy_module(module: fx.GraphModule) -> fx.GraphModule:
    """A traced module of its own, for a pipeline of its own; nodes keep their names."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    copy = fx.GraphModule(module, graph)
    copy.meta = dict(module.meta)
    table = WeightTable()
    table.update(WeightTable.of(module))
    table.constants = dict(WeightTable.of(module).constants)
    copy.meta["weights"] = table
    return copy


def phases(module: fx.GraphModule) -> dict[str, fx.GraphModule]:
    """The phase graphs by name after split-phases; before it, the one graph under the name `""`."""
    return dict(module.meta.get("phases") or {"": module})


def shape(node: fx.Node) -> tuple[int, ...]:
    """The node's shape, with T as `EXAMPLE_TOKENS`."""
    return tuple(cast(Tensor, node.meta["val"]).shape)


def calls(module: fx.GraphModule, *targets: Operator) -> Iterator[fx.Node]:
    """The nodes that call one of `targets`, in order; safe against rewriting while iterating."""
    return iter([n for n in module.graph.nodes if n.op == "call_function" and n.target in targets])


def is_call(node: object, *targets: Operator) -> bool:
    """Whether `node` calls one of `targets`."""
    return isinstance(node, fx.Node) and node.op == "call_function" and node.target in targets


def insert(graph: fx.Graph, target: Operator, *arguments: Argument) -> fx.Node:
    """Add a call at the graph's insertion point, with its shape computed by the operator's own fake."""
    node = graph.create_node("call_function", target, tuple(arguments), {}, name=_name(target, arguments))
    node.meta["val"] = target(*(a.meta["val"] if isinstance(a, fx.Node) else a for a in arguments))
    return node


def _name(target: Operator, arguments: Sequence[Argument]) -> str:
    """What a reader of a dump would call the result: the path of the first stored matrix or vector, else the operator."""
    short = getattr(target, "__name__", str(target)).split(".")[0]
    stored = [str(a.target) for a in arguments if isinstance(a, fx.Node) and a.op == "get_attr"]
    paths = [path for path in stored if path.endswith(".weight")]
    if not paths or short in ("rope_paged_attention", "embedding"):
        return short
    return paths[0].removeprefix("model.").removesuffix(".weight").replace(".", "_")


def insert_weight(module: fx.GraphModule, name: str, weight: Weight) -> fx.Node:
    """Add weight `name` to the table and a `get_attr` for it at the graph's insertion point."""
    WeightTable.of(module)[name] = weight
    value = torch.empty(weight.shape, device="meta")
    assign_weight(module, name, value)
    node = module.graph.get_attr(name)
    node.meta["val"] = value
    return node


def assign_weight(module: torch.nn.Module, name: str, value: Tensor) -> None:
    """Set the meta tensor that stands for weight `name`, making the modules on the way."""
    *path, leaf = name.split(".")
    for part in path:
        if not hasattr(module, part):
            module.add_module(part, torch.nn.Module())
        module = getattr(module, part)
    module.register_buffer(leaf, value, persistent=False)


def replace_node(old: fx.Node, new: fx.Node) -> None:
    """Use `new` wherever `old` was used; what only fed `old` goes with the next `clean`."""
    new.meta.setdefault("nn_module_stack", old.meta.get("nn_module_stack"))
    new.meta.setdefault("stack_trace", old.meta.get("stack_trace"))
    old.replace_all_uses_with(new)


def clean(module: fx.GraphModule) -> None:
    """Drop dead nodes, check the graph and regenerate its code; unused weights leave the table."""
    for node in reversed(module.graph.nodes):
        dead = not node.users and node.op in ("call_function", "get_attr")
        if dead and not _writes(node):
            module.graph.erase_node(node)
    module.graph.lint()
    module.recompile()
    used = {node.target for graph in phases(module).values() for node in graph.graph.nodes if node.op == "get_attr"}
    table = WeightTable.of(module)
    for name in [n for n in table if n not in used]:
        del table[name]
    for name in [n for n in table.constants if n not in used]:
        del table.constants[name]


def _writes(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return bool(schema is not None and schema.is_mutable)


def operator_counts(module: fx.GraphModule) -> Counter[str]:
    """How often each operator is called, over all phases; keys such as `llmc.linear` and `aten.mul.Tensor`."""
    nodes = (node for graph in phases(module).values() for node in graph.graph.nodes)
    return Counter(operator_name(node) for node in nodes if node.op == "call_function")


def operator_name(node: fx.Node) -> str:
    """A short, stable name of what a node calls."""
    return str(node.target).removesuffix(".default") if "." in str(node.target) else getattr(node.target, "__name__", "?")


def module_path(node: fx.Node) -> str:
    """The path of the model's module that made this node, such as `model.layers.0.mlp`."""
    stack = node.meta.get("nn_module_stack") or {}
    return str(next(reversed(list(stack.values())), ("the model",))[0]) or "the model"


def source_line(node: fx.Node) -> str:
    """`file.py:line` of the model code that made this node."""
    lines = [line.strip() for line in (node.meta.get("stack_trace") or "").splitlines() if line.strip().startswith("File ")]
    if not lines:
        return "source unknown"
    file, line = lines[-1].split(", ")[:2]
    return f"{file.removeprefix('File ').strip(chr(34)).rsplit('/', 1)[-1]}:{line.removeprefix('line ')}"


def weight_argument(node: fx.Node, position: int) -> fx.Node:
    """The `get_attr` at an argument position; anything else is an error that names the node."""
    argument = node.args[position]
    if not isinstance(argument, fx.Node) or argument.op != "get_attr":
        raise PassError(
            f"{module_path(node)}: argument {position} of {operator_name(node)} is computed, expected a stored weight"
        )
    return argument


def propagate_shapes(module: fx.GraphModule) -> None:
    """Recompute `meta["val"]` of every node on meta tensors."""

    class Shapes(fx.Interpreter):
        def run_node(self, n: fx.Node) -> object:
            n.meta["val"] = super().run_node(n)
            return n.meta["val"]

    Shapes(module).run(*(node.meta["val"] for node in module.graph.nodes if node.op == "placeholder"))
