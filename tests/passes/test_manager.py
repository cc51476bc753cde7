"""The pass manager: order is checked when built, required fusions must fire, and stop-after stops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from llmc.errors import PassError, UsageError
from llmc.passes.canonicalise import Canonicalise
from llmc.passes.fuse_glu import FuseGlu
from llmc.passes.fuse_rms_norm import FuseRmsNorm
from llmc.passes.manager import PassManager


def test_order_is_checked_when_built() -> None:
    with pytest.raises(PassError, match=r"fuse-rms-norm requires canonical.*move it later"):
        PassManager([FuseRmsNorm(), Canonicalise()])


def test_a_required_fusion_must_match(before: Callable[..., Any]) -> None:
    module = before("canonicalise", "llama").module
    for node in module.graph.nodes:
        if node.target is torch.ops.aten.silu.default:
            node.target = torch.ops.aten.neg.default
    with pytest.raises(PassError, match="fuse-glu: found nothing to fuse"):
        PassManager([Canonicalise(), FuseGlu()]).run(module)


def test_stop_after(before: Callable[..., Any]) -> None:
    module = before("canonicalise", "llama").module
    records = PassManager([Canonicalise(), FuseRmsNorm()]).run(module, stop_after="canonicalise")
    assert [r.name for r in records] == ["canonicalise"]
    with pytest.raises(UsageError, match="choose one of canonicalise, fuse-rms-norm"):
        PassManager([Canonicalise(), FuseRmsNorm()]).run(module, stop_after="fuse-norm")
