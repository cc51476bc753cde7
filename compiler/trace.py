"""Traces a Hugging Face causal language model on the meta device into an fx graph with one node per attention."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, fx, nn

from ..errors import UnsupportedModelError
from ..passes import dialect
from ..passes.graph import EXAMPLE_TOKENS, Weight, WeightTable, assign_weight, propagate_shapes

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_ATTENTION = "llmc"


class _LogitsOnly(nn.Module):
    """The traced signature: `token_ids` and `positions`, both `[1, T]`, to logits `[1, T, V]`."""

    def __init__(self, causal_lm: nn.Module) -> None:
        super().__init__()
        self.model = causal_lm.get_submodule("model")
        self.lm_head = causal_lm.get_submodule("lm_head")

    def forward(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        hidden = self.model(input_ids=token_ids, position_ids=positions, use_cache=False).last_hidden_state
        return cast(Tensor, self.lm_head(hidden))


def _attention(
    module: nn.Module,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    scale = scaling if scaling is not None else q.shape[-1] ** -0.5
    layer = cast(int, module.layer_idx)
    return dialect.attention(q, k, v, scale, sliding_window or 0, softcap or 0.0, layer), None


def trace(config: PretrainedConfig) -> fx.GraphModule:
    """The model of `config` as a graph; no weight is allocated.

    Returns a GraphModule with placeholders `token_ids` and `positions`, `meta["weights"]` (a `WeightTable` whose sources are the
    checkpoint's tensor names), and a meta tensor on every node. Raises `UnsupportedModelError` where export fails.
    """
    from transformers import AutoModelForCausalLM
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(_ATTENTION, _attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(_ATTENTION, lambda *args, **kwargs: None)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model.set_attn_implementation(_ATTENTION)
    wrapper = _LogitsOnly(model)
    example = torch.zeros(1, 8, dtype=torch.long, device="meta")
    tokens = torch.export.Dim("tokens", min=2, max=1 << 30)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            program = torch.export.export(
                wrapper, (example, example.clone()), dynamic_shapes=({1: tokens}, {1: tokens}), strict=False
            )
    except Exception as error:
        reason = str(error).strip().splitlines()[0]
        raise UnsupportedModelError(
            f"trace: torch.export could not trace {type(model).__name__}: {reason}; the model's forward must not branch on values"
        ) from error
    return _rooted(program.module(check_guards=False).graph, wrapper, _constants(model))


def _rooted(graph: fx.Graph, wrapper: nn.Module, constants: dict[str, Tensor]) -> fx.GraphModule:
    """A module that holds the graph and nothing but meta tensors under the checkpoint's names."""
    table = WeightTable()
    root = nn.Module()
    values = dict(wrapper.named_parameters(remove_duplicate=False)) | dict(wrapper.named_buffers(remove_duplicate=False))
    first_name: dict[int, str] = {}
    for name, value in values.items():
        first_name.setdefault(id(value), name)
    for node in graph.nodes:
        if node.op == "get_attr":
            node.target = name = first_name[id(values[str(node.target)])]  # a tied head is the embedding under its own name
            assign_weight(root, name, values[name].detach())
            if name in constants:
                table.constants[name] = constants[name]
            else:
                table[name] = Weight(sources=(name,), shape=tuple(values[name].shape))
        _forget_device(node)
    module = fx.GraphModule(root, graph)
    module.meta["weights"] = table
    for node in graph.nodes:
        if node.op == "placeholder":
            node.meta["val"] = torch.empty(1, EXAMPLE_TOKENS, dtype=torch.long, device="meta")
    propagate_shapes(module)
    return module


def _forget_device(node: fx.Node) -> None:
    """Export wrote the meta device into casts and asserts; without it the graph runs wherever its inputs are."""
    node.kwargs = {name: value for name, value in node.kwargs.items() if name != "device"}
    if node.target is torch.ops.aten.to.device:
        node.target = torch.ops.aten.to.dtype
        node.args = (node.args[0], node.args[2])


def _constants(model: nn.Module) -> dict[str, Tensor]:
    """Values of the buffers that no checkpoint stores: each module that has some is made again on the CPU from its config."""
    constants: dict[str, Tensor] = {}
    for path, module in model.named_modules():
        names = sorted(module._non_persistent_buffers_set)
        if not names:
            continue
        if hasattr(module, "scalar_embed_scale"):
            constants[f"{path}.embed_scale"] = torch.tensor(module.scalar_embed_scale, dtype=torch.float32)
        elif hasattr(module, "config"):
            made = type(module)(module.config)
            constants |= {f"{path}.{name}": made.get_buffer(name).to(torch.float32) for name in names}
        else:
            raise UnsupportedModelError(
                f"trace: {path} ({type(module).__name__}) holds the computed buffers {', '.join(names)}; "
                "llmc knows how to compute those of rotary embeddings and scaled token embeddings"
            )
    return constants
