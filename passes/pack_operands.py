"""Makes the rounding of every linear's input explicit, once for each value, and folds it into the norm that makes the value."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import cast

from torch import fx

from .base import Pass, PassResult
from .dialect import LINEARS, NORMS, llmc
from .graph import calls, clean, insert, is_call
from .graph import phases as phases_of
from .match import operand


class PackOperands(Pass):
    """A norm that feeds linears of one format writes their packed input itself; other producers get an `llmc.pack_rows`, unless
    the back end stores what they produce in just that form."""

    name = "pack-operands"
    summary = "pack the inputs of linears, inside the norm before them where there is one"
    requires = frozenset({"quantized", "phases"})
    ensures = frozenset({"operands-packed"})

    def __init__(self, is_packed: Callable[[fx.Node, str], bool] = lambda value, format: False) -> None:
        """`is_packed(value, format)`: whether the value is stored as a linear of that format takes it."""
        self.is_packed = is_packed

    def run(self, module: fx.GraphModule) -> PassResult:
        folded = separate = 0
        for graph in phases_of(module).values():
            in_norm, packed = self._pack(graph)
            folded, separate = folded + in_norm, separate + packed
            clean(graph)
        return PassResult(changed=folded + separate > 0, matches={"in_norm": folded, "pack_rows": separate})

    def _pack(self, module: fx.GraphModule) -> tuple[int, int]:
        """How many packings were folded into a norm, and how many are operators of their own."""
        folded = separate = 0
        linears = list(calls(module, *LINEARS))
        for source in dict.fromkeys(operand(linear) for linear in linears):
            readers = [n for n in linears if n.args[0] is source and source is not None]
            formats = {cast(str, n.args[-1]) for n in readers}
            for format in sorted(formats):
                if source is None or is_call(source, llmc.pack_rows.default) or _packs(_norm(source)):
                    continue
                if self.is_packed(source, format):
                    continue
                norm = _norm(source)
                if norm is not None and len(formats) == 1 and len(readers) == len(source.users):
                    norm.args = (*norm.args[:-1], format)
                    folded += 1
                else:
                    _insert(module.graph, source, [n for n in readers if n.args[-1] == format], format)
                    separate += 1
        return folded, separate


def _norm(value: fx.Node) -> fx.Node | None:
    """The norm whose normalised output `value` is."""
    if is_call(value, operator.getitem) and value.args[1] == 0:
        value = cast(fx.Node, value.args[0])
    return value if is_call(value, *NORMS) else None


def _packs(norm: fx.Node | None) -> bool:
    return norm is not None and norm.args[-1] != ""


def _insert(graph: fx.Graph, source: fx.Node, readers: list[fx.Node], format: str) -> None:
    with graph.inserting_after(source):
        packed = insert(graph, llmc.pack_rows.default, source, format)
    for reader in readers:
        reader.replace_input_with(source, packed)
