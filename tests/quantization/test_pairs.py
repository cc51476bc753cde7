"""Pairs of the architectures that differ, and near misses on graphs made for the purpose."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from llmc.compiler.trace import trace
from llmc.passes.canonicalise import Canonicalise
from llmc.passes.dialect import llmc
from llmc.passes.fuse_glu import FuseGlu
from llmc.passes.fuse_rms_norm import FuseRmsNorm
from llmc.passes.fuse_rope import FuseRope
from llmc.passes.graph import EXAMPLE_TOKENS, Weight, WeightTable, insert, insert_weight
from llmc.passes.pipelines import calibration_graph
from llmc.quantization.pairs import AbsorbPair, PairSearch, Rows, find_pairs
from torch import fx

_LAYER = "model.layers.0"


def _graph(config: Any, *, fused: bool = True) -> fx.GraphModule:
    if fused:
        return calibration_graph(trace(config))
    module = trace(config)
    for step in (Canonicalise(), FuseRmsNorm(), FuseRope(), FuseGlu()):
        step.run(module)
    return module


def _by_kind(search: PairSearch) -> dict[str, list[AbsorbPair]]:
    return {kind: [p for p in search.pairs if p.kind == kind] for kind in ("norm-linear", "up-down", "v-o")}


@pytest.mark.parametrize("name", ["qwen2", "gemma3", "phi3"])
def test_every_linear_is_in_a_pair(name: str, tiny_config: Callable[..., Any]) -> None:
    config = tiny_config(name, num_hidden_layers=1, layer_types=None)
    search = find_pairs(_graph(config))
    pairs = _by_kind(search)
    gemma = name == "gemma3"
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    groups = config.num_attention_heads // config.num_key_value_heads
    q_rows, kv_rows = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim

    norms = pairs["norm-linear"]
    before_mlp = "pre_feedforward_layernorm" if gemma else "post_attention_layernorm"
    expected = {
        f"{_LAYER}.input_layernorm.weight": f"{_LAYER}.self_attn.qkv_proj.weight",
        f"{_LAYER}.{before_mlp}.weight": f"{_LAYER}.mlp.gate_up_proj.weight",
    } | ({} if gemma else {"model.norm.weight": "lm_head.weight"})
    assert {p.producer[0].name: p.consumers for p in norms} == {norm: (linear,) for norm, linear in expected.items()}
    assert {p.offset for p in norms} == {1.0 if gemma else 0.0}
    assert {p.width for p in norms} == {config.hidden_size}

    (up_down,) = pairs["up-down"]
    assert up_down.producer == (Rows(name=f"{_LAYER}.mlp.gate_up_proj.weight", start=96, stop=192),)
    assert up_down.consumers == (f"{_LAYER}.mlp.down_proj.weight",)

    (v_o,) = pairs["v-o"]
    parts = ["weight", "bias"] if name == "qwen2" else ["weight"]
    rows = (q_rows + kv_rows, q_rows + 2 * kv_rows)
    assert v_o.producer == tuple(
        Rows(name=f"{_LAYER}.self_attn.qkv_proj.{part}", start=rows[0], stop=rows[1]) for part in parts
    )
    assert (v_o.width, v_o.groups, v_o.head_dim) == (q_rows, groups, head_dim)
    assert v_o.consumers == (f"{_LAYER}.self_attn.o_proj.weight",)

    left_out = [(item.consumers, item.reason) for item in search.left_out]
    assert left_out == ([(("model.embed_tokens.weight",), "model.embed_tokens.weight is used more than once")] if gemma else [])


def test_projections_that_are_not_fused_are_found_too(tiny_config: Callable[..., Any]) -> None:
    pairs = _by_kind(find_pairs(_graph(tiny_config("qwen2", num_hidden_layers=1), fused=False)))
    attention = f"{_LAYER}.self_attn"
    assert pairs["norm-linear"][0].consumers == tuple(f"{attention}.{name}_proj.weight" for name in "qkv")
    assert pairs["up-down"][0].producer == (Rows(name=f"{_LAYER}.mlp.up_proj.weight", start=0, stop=96),)
    assert [rows.name for rows in pairs["v-o"][0].producer] == [f"{attention}.v_proj.weight", f"{attention}.v_proj.bias"]


def test_query_heads_of_one_value_head_share_their_scale() -> None:
    pair = AbsorbPair(
        kind="v-o",
        producer=(Rows(name="v", start=8, stop=14),),
        offset=0.0,
        consumers=("o",),
        width=12,
        groups=2,
        head_dim=3,
    )
    scale = torch.tensor([1.0, 2.0, 3.0, 4.0, 8.0, 27.0, 5.0, 5.0, 5.0, 5.0, 5.0, 20.0])
    tied = torch.tensor([2.0, 4.0, 9.0, 5.0, 5.0, 10.0])
    torch.testing.assert_close(pair.to_producer(scale), tied)
    torch.testing.assert_close(pair.tie(scale), tied.view(2, 3).repeat(1, 2).flatten())
    assert torch.equal(pair.tie(pair.tie(scale)), pair.tie(scale))


class _Builder:
    """A small graph by hand: `norm -> linear` and what a test adds to it."""

    def __init__(self) -> None:
        self.module = fx.GraphModule(torch.nn.Module(), fx.Graph())
        self.module.meta["weights"] = WeightTable()
        self.x = self.input("x", 8)

    def input(self, name: str, width: int) -> fx.Node:
        node = self.module.graph.placeholder(name)
        node.meta["val"] = torch.empty(1, EXAMPLE_TOKENS, width, device="meta")
        return node

    def weight(self, name: str, *shape: int, source: str | None = None) -> fx.Node:
        return insert_weight(self.module, name, Weight(sources=(source or name,), shape=shape))

    def call(self, target: Any, *arguments: Any) -> fx.Node:
        return insert(self.module.graph, target, *arguments)

    def norm(self) -> fx.Node:
        return self.call(llmc.rms_norm.default, self.x, self.weight("norm", 8), 1e-6, 0.0, "")

    def linear(self, x: fx.Node, name: str, rows: int = 8, source: str | None = None) -> fx.Node:
        weight = self.weight(name, rows, x.meta["val"].shape[-1], source=source)
        return self.call(llmc.linear.default, x, weight, None, "f32")

    def find(self, *outputs: fx.Node) -> PairSearch:
        self.module.graph.output(outputs)
        self.module.graph.lint()
        return find_pairs(self.module)


def _norm_read_by_the_output(b: _Builder) -> list[fx.Node]:
    norm = b.norm()
    return [b.linear(norm, "a"), norm]


def _norm_read_by_a_product(b: _Builder) -> list[fx.Node]:
    norm = b.norm()
    return [b.linear(norm, "a"), b.call(torch.ops.aten.mul.Tensor, norm, norm)]


def _tied_source(b: _Builder) -> list[fx.Node]:
    return [b.linear(b.norm(), "a", source="w"), b.linear(b.x, "b", source="w")]


def _activation_between(b: _Builder) -> list[fx.Node]:
    return [b.linear(b.call(torch.ops.aten.silu.default, b.norm()), "a")]


def _gate_is_up(b: _Builder) -> list[fx.Node]:
    up = b.linear(b.x, "up")
    return [b.linear(b.call(llmc.glu.default, up, up, "silu"), "a")]


def _up_read_twice(b: _Builder) -> list[fx.Node]:
    up = b.linear(b.x, "up")
    return [b.linear(b.call(llmc.glu.default, b.x, up, "silu"), "a"), up]


def _overlapping_slices(b: _Builder) -> list[fx.Node]:
    wide = b.linear(b.x, "wide", rows=16)
    gate, up = (b.call(torch.ops.aten.slice.Tensor, wide, 2, start, start + 8) for start in (4, 8))
    return [b.linear(b.call(llmc.glu.default, gate, up, "silu"), "a")]


def _normalised_values(b: _Builder) -> list[fx.Node]:
    heads = b.call(torch.ops.aten.view.default, b.linear(b.x, "v"), [1, -1, 2, 4])
    normalised = b.call(llmc.rms_norm.default, heads, b.weight("v_norm", 4), 1e-6, 0.0, "")
    v = b.call(torch.ops.aten.transpose.int, normalised, 1, 2)
    q = b.call(torch.ops.aten.transpose.int, b.call(torch.ops.aten.view.default, b.x, [1, -1, 2, 4]), 1, 2)
    attention = b.call(llmc.attention.default, q, q, v, 1.0, 0, 0.0, 0)
    return [b.linear(b.call(torch.ops.aten.view.default, attention, [1, -1, 8]), "a")]


def _second_reader_of_the_sum(b: _Builder) -> list[fx.Node]:
    both = b.call(llmc.add_rms_norm.default, b.x, b.x, b.weight("norm", 8), 1e-6, 0.0, None, 0.0, "")
    return [b.linear(b.call(operator.getitem, both, 1), "a")]


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (_norm_read_by_the_output, "output reads the same value"),
        (_norm_read_by_a_product, "aten.mul.Tensor reads the same value"),
        (_tied_source, "a is used more than once"),
        (_activation_between, "its input comes from aten.silu, which absorbs no scale"),
        (_gate_is_up, "one value is both gate and up"),
        (_up_read_twice, "llmc.linear has 2 readers"),
        (_overlapping_slices, "aten.slice.Tensor reads the same value"),
        (_normalised_values, "llmc.rms_norm makes the values, not a linear"),
        (_second_reader_of_the_sum, "its input comes from llmc.add_rms_norm, which absorbs no scale"),
    ],
)
def test_what_is_not_certain_is_left_out_with_its_reason(build: Callable[[_Builder], list[fx.Node]], reason: str) -> None:
    builder = _Builder()
    search = builder.find(*build(builder))
    assert {item.consumers: item.reason for item in search.left_out}[("a",)] == reason
    assert all("a" not in pair.consumers for pair in search.pairs)


def test_the_graph_that_the_near_misses_vary_has_a_pair() -> None:
    builder = _Builder()
    norm = builder.norm()
    search = builder.find(builder.linear(norm, "a"), builder.linear(norm, "b"))
    assert [(pair.producer[0].name, pair.consumers) for pair in search.pairs] == [("norm", ("a", "b"))]
    assert search.left_out == ()
