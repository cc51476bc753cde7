"""Finds what can absorb a scale of each linear's input channels: the norm before it, `up` before a GLU's product, `v` before attention."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias, cast

from torch import Tensor, fx

from ..passes.dialect import LINEARS, llmc
from ..passes.graph import WeightTable, calls, is_call, operator_name, shape
from ..passes.match import aten, head_transpose, last_axis_slice, operand

Kind: TypeAlias = Literal["norm-linear", "up-down", "v-o"]
KINDS: Final[tuple[Kind, ...]] = ("norm-linear", "up-down", "v-o")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Rows `start` to `stop` of the graph's weight or bias `name`."""

    name: str
    start: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AbsorbPair:
    """A producer whose rows may be divided by a scale that the consumers' columns are multiplied with: the float model stays the same.

    `producer` names the rows of a norm's weight, or of a linear's weight and bias; a norm multiplies by `weight + offset`. `consumers`
    are the weights of every linear that reads the value, each with `width` columns. In attention the `head_dim` channels of a
    value head feed `groups` query heads; elsewhere `groups` is 1 and `head_dim` the width.
    """

    kind: Kind
    producer: tuple[Rows, ...]
    offset: float
    consumers: tuple[str, ...]
    width: int
    groups: int
    head_dim: int

    def __str__(self) -> str:
        return f"{self.producer[0].name} -> {', '.join(self.consumers)}"

    def to_producer(self, scale: Tensor) -> Tensor:
        """The scale `[width / groups]` of the producer's rows: the geometric mean over the columns `[width]` that a row feeds."""
        if self.groups == 1:
            return scale
        heads = scale.reshape(-1, self.groups, self.head_dim)  # [Hkv, groups, D]
        # relative to the first head, so that columns which agree keep their scale to the bit
        return (heads[:, 0] * (heads / heads[:, :1]).log().mean(1).exp()).flatten()

    def to_consumers(self, scale: Tensor) -> Tensor:
        """The scale `[width]` of the columns for one of the producer's rows `[width / groups]`."""
        return scale.reshape(-1, 1, self.head_dim).expand(-1, self.groups, -1).flatten() if self.groups > 1 else scale

    def tie(self, scale: Tensor) -> Tensor:
        """The nearest scale `[width]` that the producer can absorb: columns fed by one row share theirs."""
        return self.to_consumers(self.to_producer(scale))


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """Linears, by weight, whose input's scale nothing absorbs, and why."""

    consumers: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PairSearch:
    """Every linear of a graph: in a pair, or left out for a reason."""

    pairs: tuple[AbsorbPair, ...]
    left_out: tuple[LeftOut, ...]


class _NotPairedError(Exception):
    """Carries the reason for a `LeftOut`."""


def find_pairs(module: fx.GraphModule) -> PairSearch:
    """The pairs of a graph whose norms, rotary embeddings, GLUs and projections are fused and that has no KV pool yet.

    Only what follows from the graph is taken: a value between producer and consumers has no other reader, every operator on the way
    commutes with a scale per channel, and no weight that would change is read anywhere else.
    """
    by_input: dict[fx.Node, list[fx.Node]] = {}
    for node in calls(module, *LINEARS):
        by_input.setdefault(cast(fx.Node, node.args[0]), []).append(node)
    search = _Search(module)
    pairs: list[AbsorbPair] = []
    left_out: list[LeftOut] = []
    for value, linears in by_input.items():
        try:
            pairs.append(search.pair(value, linears))
        except _NotPairedError as reason:
            names = tuple(str(cast(fx.Node, node.args[1]).target) for node in linears)
            left_out.append(LeftOut(consumers=names, reason=str(reason)))
    return PairSearch(pairs=tuple(pairs), left_out=tuple(left_out))


class _Search:
    def __init__(self, module: fx.GraphModule) -> None:
        self.table = WeightTable.of(module)
        self.readers: Counter[str] = Counter()
        for node in module.graph.nodes:
            if node.op == "get_attr":
                self.readers[str(node.target)] += len(node.users)
        self.source_uses = Counter(source for weight in self.table.values() for source in weight.sources)

    def pair(self, value: fx.Node, linears: Sequence[fx.Node]) -> AbsorbPair:
        consumers = tuple(self._own_weight(node, 1) for node in linears)
        for user in value.users:
            if user not in linears or any(argument is value for argument in user.args[1:]):
                raise _NotPairedError(f"{_origin(user)} reads the same value")
        width = shape(value)[-1]
        if any(self.table[name].shape[1:] != (width,) for name in consumers):
            raise _NotPairedError(f"the linears do not all read {width} channels")
        groups, head_dim, offset = 1, width, 0.0
        if is_call(value, llmc.rms_norm.default) or is_call(value, operator.getitem):
            kind: Kind = "norm-linear"
            producer, offset = self._norm(value)
        elif is_call(value, llmc.linear_glu.default, llmc.glu.default):
            kind = "up-down"
            producer = self._up(value)
        elif is_call(value, aten.view.default) and is_call(operand(value), llmc.attention.default):
            kind = "v-o"
            producer, groups, head_dim = self._v(value)
        else:
            raise _NotPairedError(f"its input comes from {_origin(value)}, which absorbs no scale")
        if any(rows.stop - rows.start != width // groups for rows in producer):
            raise _NotPairedError(f"{producer[0].name} does not make {width} channels")
        return AbsorbPair(
            kind=kind, producer=producer, offset=offset, consumers=consumers, width=width, groups=groups, head_dim=head_dim
        )

    def _norm(self, value: fx.Node) -> tuple[tuple[Rows, ...], float]:
        norm, position = value, 1
        if is_call(value, operator.getitem):
            norm, position = cast(fx.Node, value.args[0]), 2
            if not is_call(norm, llmc.add_rms_norm.default) or value.args[1] != 0:
                raise _NotPairedError(f"its input comes from {_origin(norm)}, which absorbs no scale")
            for user in norm.users:
                if user is not value and not (is_call(user, operator.getitem) and user.args[1] == 1):
                    raise _NotPairedError(f"{_origin(user)} reads the same value")
        if norm.args[-1] != "":
            raise _NotPairedError("the norm rounds its output")
        name = self._own_weight(norm, position)
        return (Rows(name=name, start=0, stop=self.table[name].shape[0]),), float(cast(float, norm.args[position + 2]))

    def _up(self, product: fx.Node) -> tuple[Rows, ...]:
        if is_call(product, llmc.linear_glu.default):
            rows = self.table[self._own_weight(product, 1)].shape[0]
            return self._rows(product, rows // 2, rows)
        up = operand(product, 1)
        if up is None or up is product.args[0]:
            raise _NotPairedError("one value is both gate and up")
        return self._linear_rows(up)

    def _v(self, value: fx.Node) -> tuple[tuple[Rows, ...], int, int]:
        attention = cast(fx.Node, value.args[0])
        heads, head_dim = shape(attention)[2:]
        if len(shape(value)) != 3 or shape(value)[-1] != heads * head_dim:
            raise _NotPairedError("the heads of attention are not side by side in its input")
        v = cast(fx.Node, attention.args[2])
        split = head_transpose(v)
        if split is None or not is_call(split, aten.view.default):
            raise _NotPairedError(f"{_origin(split or v)} makes the values, not a linear")
        projected = cast(fx.Node, split.args[0])
        kv_heads = shape(v)[1]
        if shape(split)[2:] != (kv_heads, head_dim) or len(shape(projected)) != 3 or heads % kv_heads:
            raise _NotPairedError("the heads of the values are not those of the queries")
        if v in attention.args[:2]:
            raise _NotPairedError("one value is both key and value")
        for node in (attention, v, split):
            _check_single_reader(node)
        return self._linear_rows(projected), heads // kv_heads, head_dim

    def _linear_rows(self, output: fx.Node) -> tuple[Rows, ...]:
        """The rows of the linear that makes `output`, directly or as a slice of a wider one."""
        _check_single_reader(output)
        linear, start, stop = last_axis_slice(output) or (output, 0, shape(output)[-1])
        if not is_call(linear, llmc.linear.default):
            raise _NotPairedError(f"its channels come from {_origin(linear)}, not a linear")
        if not 0 <= start < stop or shape(output)[-1] != stop - start:
            raise _NotPairedError("a slice with a stride takes its channels")
        for other in linear.users if linear is not output else ():
            part = last_axis_slice(other)
            if other is not output and (part is None or not (stop <= part[1] or 0 <= part[2] <= start)):
                raise _NotPairedError(f"{_origin(other)} reads the same value")
        return self._rows(linear, start, stop)

    def _rows(self, linear: fx.Node, start: int, stop: int) -> tuple[Rows, ...]:
        """These rows of the linear's weight and, if it has one, bias."""
        positions = (1,) if linear.args[2] is None else (1, 2)
        return tuple(Rows(name=self._own_weight(linear, position), start=start, stop=stop) for position in positions)

    def _own_weight(self, node: fx.Node, position: int) -> str:
        """The name of a stored argument that nothing else reads."""
        argument = operand(node, position)
        if argument is None or argument.op != "get_attr" or str(argument.target) not in self.table:
            raise _NotPairedError(f"argument {position} of {operator_name(node)} is computed, not stored")
        name = str(argument.target)
        if self.readers[name] > 1 or any(self.source_uses[source] > 1 for source in self.table[name].sources):
            raise _NotPairedError(f"{name} is used more than once")
        return name


def _check_single_reader(node: fx.Node) -> None:
    if len(node.users) != 1:
        raise _NotPairedError(f"{_origin(node)} has {len(node.users)} readers")


def _origin(node: fx.Node) -> str:
    return operator_name(node) if node.op == "call_function" else node.op
