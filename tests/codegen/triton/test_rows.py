"""Row kernels: embedding, norms and what is fused with them, packing of linear inputs, gathering of rows."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from llmc.codegen.triton.kernel import Kernel
from llmc.codegen.triton.rows import NormSettings, embedding_kernel, gather_rows_kernel, norm_kernel, pack_rows_kernel
from llmc.errors import TargetError
from numpy.typing import NDArray

Launch = Callable[..., None]
STORED: dict[str, Any] = {"f32": np.float32, "bf16": np.uint16, "int8": np.int8, "fp8": np.uint8}
BOUND = {"f32": 2e-6, "bf16": 2.0**-8 * 1.01, "int8": 0.5 / 127 * 1.01, "fp8": 16 / 448 * 1.01}  # of the largest value of a row
UNTOUCHED = 0x55  # the byte that outputs hold before


def from_bf16(bits: NDArray[np.uint16]) -> NDArray[np.float64]:
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def to_bf16(x: NDArray[Any]) -> NDArray[np.uint16]:
    """Truncated: the tests' inputs need no rounding."""
    return (x.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def from_fp8(bits: NDArray[np.uint8], type: str) -> NDArray[np.float64]:
    bias = {"fp8e4nv": 7, "fp8e4b8": 8}[type]
    nan = (bits & 0x7F) == 0x7F if type == "fp8e4nv" else bits == 0x80
    exponent, mantissa = (bits >> 3 & 15).astype(np.int32), (bits & 7).astype(np.float64)
    magnitude = np.ldexp(mantissa + np.where(exponent > 0, 8, 0), np.maximum(exponent, 1) - bias - 3)
    return np.where(nan, np.nan, np.where(bits & 0x80, -magnitude, magnitude))


def untouched(shape: tuple[int, ...], type: Any) -> NDArray[Any]:
    return np.full((*shape, np.dtype(type).itemsize), UNTOUCHED, np.uint8).view(type)[..., 0]


def is_untouched(array: NDArray[Any]) -> bool:
    return bool((np.ascontiguousarray(array).view(np.uint8) == UNTOUCHED).all())


def round_up(width: int) -> int:
    return -(-width // 16) * 16


def values(out: NDArray[Any], scale: NDArray[np.float32], output: str, fp8_type: str) -> NDArray[np.float64]:
    """Rows of a linear's input by what they stand for."""
    if output == "f32":
        return out.astype(np.float64)
    if output == "bf16":
        return from_bf16(out)
    plain = out.astype(np.float64) if output == "int8" else from_fp8(out, fp8_type)
    assert np.abs(plain).max() <= {"int8": 127, "fp8e4nv": 448, "fp8e4b8": 240}["int8" if output == "int8" else fp8_type]
    return plain * scale[:, None].astype(np.float64)


def check(out: NDArray[Any], scale: NDArray[np.float32], output: str, fp8_type: str, want: NDArray[np.float64]) -> None:
    """`out` and `scale` have one row more than `want`, which must be as it was, like the columns past the width."""
    rows, width = want.shape
    got = values(out[:rows, :width], scale[:rows], output, fp8_type)
    assert np.isfinite(got).all()
    largest = np.abs(want).max(axis=1, keepdims=True)
    assert (np.abs(got - want) <= BOUND[output] * largest + 1e-30).all()
    assert is_untouched(out[rows:])
    assert is_untouched(out[:, width:])
    if output in ("int8", "fp8"):
        largest_code = {"int8": 127.0, "fp8e4nv": 448.0, "fp8e4b8": 240.0}["int8" if output == "int8" else fp8_type]
        np.testing.assert_allclose(scale[:rows], np.maximum(largest[:, 0], 1e-30) / largest_code, rtol=3e-6)
        assert is_untouched(scale[rows:])
    else:
        assert is_untouched(scale)


@pytest.mark.parametrize(("width", "scale"), [(1, 1.0), (40, 1.0), (40, 6.25), (1500, 2.5)])
def test_embedding(launch: Launch, width: int, scale: float) -> None:
    rng = np.random.default_rng(width)
    weight = to_bf16(rng.standard_normal((11, round_up(width))))
    token_ids = np.array([3, 10, 0, 0, 7, 2], np.int32)
    out = untouched((6, width), np.float32)
    kernel = embedding_kernel(11, width, scale)
    launch(kernel, {"weight": weight, "token_ids": token_ids, "out": out, "num_tokens": 5}, T=6)
    np.testing.assert_array_equal(out[:5], from_bf16(weight)[token_ids[:5], :width] * scale)
    assert is_untouched(out[5:])


@pytest.mark.parametrize("width", [1, 40, 1500])
def test_gather_rows(launch: Launch, width: int) -> None:
    x = np.random.default_rng(0).standard_normal((9, width)).astype(np.float32)
    rows = np.array([8, 0, 8, 4], np.int32)
    out = untouched((4, width), np.float32)
    launch(gather_rows_kernel(width), {"x": x, "logit_rows": rows, "out": out, "num_rows": 3}, R=4)
    np.testing.assert_array_equal(out[:3], x[rows[:3]])
    assert is_untouched(out[3:])


def norms() -> Iterator[NormSettings]:
    """Every combination of what is fused, and every output, at some odd width."""
    widths = itertools.cycle([1, 16, 40, 100, 129, 300])
    for residual, post_norm, output in itertools.product((False, True), (False, True), ("f32", "bf16", "int8", "fp8")):
        options: dict[str, Any] = {"residual": residual, "post_norm": post_norm, "post_eps": 0.03, "output": output}
        yield NormSettings(width=next(widths), eps=0.01, **options)
    for residual, bias, output in itertools.product((False, True), (False, True), ("f32", "int8")):
        yield NormSettings(width=next(widths), eps=0.01, kind="layer", residual=residual, bias=bias, output=output)
    yield NormSettings(width=64, eps=0.01, residual=True, output="fp8", fp8_type="fp8e4b8")


@pytest.mark.parametrize("settings", list(norms()), ids=lambda settings: norm_kernel(settings).name)
def test_norm(launch: Launch, settings: NormSettings) -> None:
    rng = np.random.default_rng(settings.width)
    rows, width = 3, settings.width
    x = (rng.standard_normal((rows + 1, width)) * [[0.1], [4], [1], [1]]).astype(np.float32)
    before = rng.standard_normal((rows + 1, width)).astype(np.float32)
    x[2] = before[2] = 0  # a row of nothing
    residual = before.copy()
    arguments: dict[str, Any] = {"x": x.copy()}
    for name in ("post_weight", "weight", "bias"):
        arguments[name] = (1 + 0.3 * rng.standard_normal(width)).astype(np.float32)
    out = untouched((rows + 1, round_up(width)), STORED[settings.output])
    scale = untouched((rows + 1,), np.float32)
    arguments |= {"residual": residual, "out": out, "out_scale": scale, "num_rows": rows}
    kernel = norm_kernel(settings, "R")
    launch(kernel, {p.name: arguments[p.name] for p in kernel.parameters}, R=rows + 1)

    stream = x[:rows].astype(np.float64)
    if settings.post_norm:
        stream *= arguments["post_weight"] / np.sqrt(np.square(stream).mean(1, keepdims=True) + settings.post_eps)
    if settings.residual:
        stream += before[:rows]
        np.testing.assert_allclose(residual[:rows], stream, rtol=2e-6, atol=2e-6)
    np.testing.assert_array_equal(
        residual[rows:] if settings.residual else residual, before[rows:] if settings.residual else before
    )
    if settings.kind == "layer":
        stream -= stream.mean(1, keepdims=True)
    want = stream / np.sqrt(np.square(stream).mean(1, keepdims=True) + settings.eps) * arguments["weight"]
    if settings.bias:
        want += arguments["bias"]
    check(out, scale, settings.output, settings.fp8_type, want)
    np.testing.assert_array_equal(arguments["x"], x)


@pytest.mark.parametrize("input", ["bf16", "f32"])
@pytest.mark.parametrize(
    ("output", "fp8_type"), [("bf16", "fp8e4nv"), ("int8", "fp8e4nv"), ("fp8", "fp8e4nv"), ("fp8", "fp8e4b8")]
)
@pytest.mark.parametrize(("width", "stride"), [(1, None), (40, 48), (700, None)])
def test_pack_rows(launch: Launch, input: Any, output: Any, fp8_type: Any, width: int, stride: int | None) -> None:
    rows = 4
    x = np.full((rows + 1, stride or width), np.nan, np.float32)
    factors = np.array([1, 1e-4, 300, 0, 1])[:, None]  # from far below an fp8's range to beyond it
    x[:, :width] = np.random.default_rng(width).standard_normal((rows + 1, width)) * factors
    stored = to_bf16(x) if input == "bf16" else x
    exact = from_bf16(stored) if input == "bf16" else x.astype(np.float64)
    out = untouched((rows + 1, round_up(width)), STORED[output])
    scale = untouched((rows + 1,), np.float32)
    kernel = pack_rows_kernel(width, input=input, output=output, input_stride=stride, fp8_type=fp8_type)
    arguments: dict[str, Any] = {"x": stored, "out": out, "out_scale": scale, "num_rows": rows}
    launch(kernel, {p.name: arguments[p.name] for p in kernel.parameters}, T=rows + 1)
    check(out, scale, output, fp8_type, exact[:rows, :width])


def test_packing_rounds_each_value_to_the_nearest(launch: Launch) -> None:
    """The largest value of the row sets the scale to 1, so that codes are those of the values themselves."""
    rng = np.random.default_rng(2)
    for output, fp8_type, largest in (("int8", "fp8e4nv", 127), ("fp8", "fp8e4nv", 448), ("fp8", "fp8e4b8", 240)):
        x = rng.uniform(-1, 1, 512).astype(np.float32) * np.float32(largest) * 2.0 ** -rng.integers(0, 12, 512)
        x[:8] = (largest, -largest, 0.0, 7.9, -15.9, 31.0, 0.26, 1.97)
        x = x.astype(np.float32)
        out, scale = np.zeros((1, 512), STORED[output]), np.zeros(1, np.float32)
        kernel = pack_rows_kernel(512, input="f32", output=output, fp8_type=fp8_type)
        launch(kernel, {"x": x, "out": out, "out_scale": scale, "num_rows": 1}, T=1)
        assert scale[0] == 1
        codes = np.arange(256).astype(np.uint8)
        known = codes.view(np.int8).astype(np.float64) if output == "int8" else from_fp8(codes, fp8_type)
        known = known[np.isfinite(known) & (np.abs(known) <= largest)]
        nearest = np.abs(x.astype(np.float64)[:, None] - known).min(1)
        got = values(out, scale, output, fp8_type)[0]
        np.testing.assert_array_equal(np.abs(got - x), nearest)


@pytest.mark.parametrize(("output", "fp8_type"), [("int8", "fp8e4nv"), ("fp8", "fp8e4nv"), ("fp8", "fp8e4b8")])
def test_static_inputs_share_one_step(launch: Launch, output: Any, fp8_type: Any) -> None:
    """Each value goes to the nearest multiple that the type has of a step given at launch; what is beyond the type's range is cut."""
    rows, width, step = 3, 100, 0.37
    x = (np.random.default_rng(4).standard_normal((rows + 1, width)) * [[1.0], [40.0], [1e-3], [1.0]]).astype(np.float32)
    x[0, 0] = 1e4
    ones = np.ones(width, np.float32)
    normed = x / np.sqrt(np.square(x.astype(np.float64)).mean(1, keepdims=True))
    codes = np.arange(256).astype(np.uint8)
    known = codes.view(np.int8).astype(np.float64) if output == "int8" else from_fp8(codes, fp8_type)
    largest = {"int8": 127, "fp8e4nv": 448, "fp8e4b8": 240}["int8" if output == "int8" else fp8_type]
    known = step * known[np.isfinite(known) & (np.abs(known) <= largest)]
    pack = pack_rows_kernel(width, input="f32", output=output, fp8_type=fp8_type, static=True)
    norm = norm_kernel(NormSettings(width=width, eps=0.0, output=output, fp8_type=fp8_type, static=True))
    for kernel, wanted in ((pack, x), (norm, normed)):
        out, scale = untouched((rows + 1, round_up(width)), STORED[output]), untouched((rows + 1,), np.float32)
        arguments: dict[str, Any] = {"x": x, "weight": ones, "out": out, "out_scale": scale, "step": step, "num_rows": rows}
        launch(kernel, {p.name: arguments[p.name] for p in kernel.parameters}, T=rows + 1)
        assert (scale[:rows] == np.float32(step)).all()
        nearest = np.abs(wanted[:rows, :, None] - known).min(-1)
        got = values(out[:rows, :width], scale[:rows], output, fp8_type)
        np.testing.assert_allclose(np.abs(got - wanted[:rows]), nearest, rtol=1e-5, atol=1e-5 * step)
        assert is_untouched(out[rows:])
        assert is_untouched(scale[rows:])


def real_kernels(arch: str) -> Iterator[Kernel]:
    """The shapes of 4B to 70B models in the formats that `arch` has."""
    fp8: Any = "fp8e4b8" if arch == "gfx942" else "fp8e4nv"
    yield embedding_kernel(128_256, 4096, 1.0)
    yield embedding_kernel(262_144, 2560, 2560**0.5)
    yield gather_rows_kernel(8192)
    outputs: tuple[Any, ...] = ("bf16", "int8") if arch == "sm_80" else ("bf16", "int8", "fp8")
    for output in outputs:
        options: dict[str, Any] = {"eps": 1e-6, "post_eps": 1e-6, "fp8_type": fp8, "output": output}
        yield norm_kernel(NormSettings(width=2560, residual=True, post_norm=True, **options))
        yield norm_kernel(NormSettings(width=8192, residual=True, **options))
        yield pack_rows_kernel(28_672, input="bf16", output=output, fp8_type=fp8)
        if output != "bf16":
            yield pack_rows_kernel(14_336, input="bf16", output=output, fp8_type=fp8, static=True)
    yield norm_kernel(
        NormSettings(width=16_384, eps=1e-6, residual=True, post_norm=True, post_eps=1e-6, output=outputs[-1], fp8_type=fp8)
    )
    yield norm_kernel(NormSettings(width=8192, eps=1e-5, kind="layer", residual=True, bias=True, output="bf16"), "R")
    yield pack_rows_kernel(32_768, input="f32", output=outputs[-1], fp8_type=fp8)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_90", "sm_100", "gfx942"])
def test_builds_without_spills(build_for: Callable[..., Any], arch: str) -> None:
    kernels = list(real_kernels(arch))
    assert set(build_for(arch, kernels)) == {kernel.name for kernel in kernels}


def test_names_tell_kernels_apart() -> None:
    base = NormSettings(width=64, eps=1e-6)
    changes: list[dict[str, Any]] = [
        {}, {"width": 65}, {"eps": 1e-5}, {"eps": 1.5e-5}, {"kind": "layer"}, {"kind": "layer", "bias": True}, {"residual": True},
        {"post_norm": True, "post_eps": 1e-6}, {"post_norm": True, "post_eps": 1e-5}, {"output": "f32"}, {"output": "int8"},
        {"output": "fp8"}, {"output": "fp8", "fp8_type": "fp8e4b8"}, {"output": "fp8", "static": True},
    ]  # fmt: skip
    kernels = [norm_kernel(dataclasses.replace(base, **change)) for change in changes]
    kernels += [
        norm_kernel(base, "R"),
        embedding_kernel(9, 64, 1.0),
        embedding_kernel(9, 64, 8.0),
        embedding_kernel(9, 64, 80.0),
    ]
    kernels += [gather_rows_kernel(64), gather_rows_kernel(65)]
    for input, output, stride in itertools.product(("bf16", "f32"), ("bf16", "int8", "fp8"), (64, 80)):
        kernels.append(pack_rows_kernel(64, input=input, output=output, input_stride=stride))  # type: ignore[arg-type]
    names = {kernel.name for kernel in kernels}
    assert len(names) == len(kernels)
    assert all(name.isidentifier() for name in names)
    for kernel in kernels:
        compile(kernel.source(), kernel.name, "exec")


def test_refuses_what_no_kernel_computes() -> None:
    with pytest.raises(TargetError, match="rows of 20000 values, expected 1 to 16384"):
        NormSettings(width=20_000, eps=1e-6)
    with pytest.raises(TargetError, match="a bias belongs to a layer norm"):
        NormSettings(width=64, eps=1e-6, bias=True)
    with pytest.raises(TargetError, match="rows of 40000 values"):
        pack_rows_kernel(40_000, input="bf16", output="int8")
    with pytest.raises(TargetError, match="bf16 has no scale that could be static"):
        NormSettings(width=64, eps=1e-6, output="bf16", static=True)
