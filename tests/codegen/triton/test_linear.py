"""Linear kernels against float64 products of the same stored numbers, in the interpreter, and their builds."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"  # before anything imports Triton

import numpy as np
import pytest
from llmc.codegen.triton.linear import LinearProblem, Tile, decode_kernel, prefill_kernel, workspace_bytes
from llmc.codegen.triton.tiles import choose_tile, load_tables
from llmc.errors import TargetError

Array = np.ndarray[Any, Any]
BOUND = {"bf16": 2.0**-7, "f32": 3e-6}  # the interpreter truncates to bf16
FORMATS = ["bf16", "fp8", "fp8-fnuz", "int8", "int4", "int4-rocm"]
BF16_NAN = 0x7FC0


@dataclass
class Case:
    """The arrays of one launch: `values` by parameter name, and the product in float64 without bias and activation."""

    values: dict[str, Array]
    product: Array


def problem_for(format: str, **settings: Any) -> LinearProblem:
    """Odd sizes: neither n nor k is a multiple of a tile."""
    defaults: dict[str, Any] = {"n": 37, "k": 72, "format": format, "output": "f32"}
    if format == "fp8-fnuz":
        defaults |= {"format": "fp8", "fp8_type": "fp8e4b8"}
    if format.startswith("int4"):
        defaults |= {"format": "int4", "group": 32, "backend": "rocm" if format == "int4-rocm" else "cuda"}
    return LinearProblem(**(defaults | settings))


def from_bf16(bits: Array) -> Array:
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def to_bf16(values: Array) -> Array:
    return (np.asarray(values, np.float32).view(np.uint32) >> 16).astype(np.uint16)


def from_fp8(bits: Array, fnuz: bool) -> Array:
    """Sign, four bits of exponent, three of mantissa; FNUZ has a bias of 8, the other 7."""
    sign = np.where(bits & 0x80, -1.0, 1.0)
    exponent, mantissa = (bits >> 3 & 15).astype(int), bits & 7
    significand = np.where(exponent > 0, 1 + mantissa / 8, mantissa / 4)
    return sign * significand * np.exp2(exponent - (8.0 if fnuz else 7.0))


def make(problem: LinearProblem, rows: int, seed: int = 0) -> Case:
    """Random operands; what a kernel must not use is NaN or a large number."""
    rng = np.random.default_rng(seed)
    n, k = problem.weight_rows, problem.k
    stride = -(-k // 16) * 16
    values: dict[str, Array] = {}
    spare = rows + 3  # rows that no kernel may read or write
    if problem.format in ("bf16", "int4"):
        x_bits = np.full((spare, stride), BF16_NAN, np.uint16)
        x_bits[:rows, :k] = to_bf16(rng.standard_normal((rows, k)))
        values["x"] = x_bits
        x = from_bf16(x_bits[:rows, :k])
    else:
        fnuz = problem.fp8_type == "fp8e4b8"
        x_bits = np.full((spare, stride), {True: 0x80, False: 0x7F}[fnuz] if problem.format == "fp8" else 0x7F, np.uint8)
        x_bits[:rows, :k] = random_bytes(rng, problem, (rows, k))
        scale = rng.uniform(0.5, 2.0, spare).astype(np.float32)
        scale[rows:] = np.nan
        values["x"], values["x_scale"] = x_bits, scale
        x = from_bytes(problem, x_bits[:rows, :k]) * scale[:rows, None]
    if problem.format == "bf16":
        w_bits = np.zeros((n, stride), np.uint16)
        w_bits[:, :k] = to_bf16(rng.standard_normal((n, k)))
        values["weight"] = w_bits
        weight = from_bf16(w_bits[:, :k])
    elif problem.group is not None:
        padded = -(-k // (2 * problem.group)) * 2 * problem.group
        nibbles = np.full((n, padded), 8, np.uint8)
        nibbles[:, :k] = rng.integers(0, 16, (n, k))
        pairs = nibbles.reshape(n, -1, 2, problem.group)
        values["weight"] = np.ascontiguousarray((pairs[:, :, 0] | pairs[:, :, 1] << 4).reshape(n, -1))
        group_scale = rng.uniform(0.5, 2.0, (padded // problem.group, n)).astype(np.float16)
        values["weight_scale"] = group_scale
        weight = (nibbles.astype(float) - 8) * np.repeat(group_scale.T.astype(float), problem.group, axis=1)
        weight = weight[:, :k]
    else:
        w_bits = np.zeros((n, stride), np.uint8)
        w_bits[:, :k] = random_bytes(rng, problem, (n, k))
        scale = rng.uniform(0.5, 2.0, 1 if problem.per_tensor_scale else n).astype(np.float32)
        values["weight"], values["weight_scale"] = w_bits, scale
        weight = from_bytes(problem, w_bits[:, :k]) * (scale if problem.per_tensor_scale else scale[:, None])
    if problem.bias:
        values["bias"] = (10 * rng.standard_normal(n)).astype(np.float32)
    if problem.residual:
        out = rng.standard_normal((spare, problem.n)).astype(np.float32) * 10
        out[rows:] = np.nan
    else:
        out = np.full((spare, problem.n), np.nan, np.float32)
    values["out"] = out if problem.output == "f32" else np.full((spare, problem.out_stride), BF16_NAN, np.uint16)
    return Case(values=values, product=x @ weight.T)


def random_bytes(rng: np.random.Generator, problem: LinearProblem, shape: tuple[int, int]) -> Array:
    """int8 from -127 to 127, or fp8 without its NaNs and without its largest numbers."""
    if problem.format == "int8":
        return rng.integers(-127, 128, shape).astype(np.int8).view(np.uint8)
    return (rng.integers(0, 0x50, shape) | rng.integers(0, 2, shape) * 0x80).astype(np.uint8) + np.uint8(1)


def from_bytes(problem: LinearProblem, values: Array) -> Array:
    if problem.format == "int8":
        return values.view(np.int8).astype(float)
    return from_fp8(values, problem.fp8_type == "fp8e4b8")


def expected(problem: LinearProblem, case: Case, before: Array) -> Array:
    """float64 of everything a kernel fuses."""
    product = case.product
    if problem.bias:
        product = product + case.values["bias"]
    if problem.activation is not None:
        gate, up = np.split(product, 2, axis=1)
        return activate(problem.activation, gate) * up
    return before[: len(product)] + product if problem.residual else product


def activate(name: str, x: Array) -> Array:
    if name == "silu":
        return x / (1 + np.exp(-np.maximum(x, -700)))
    if name == "gelu_tanh":
        return x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
    import math

    return x / 2 * (1 + np.vectorize(math.erf)(x / np.sqrt(2)))


def check(launch: Any, problem: LinearProblem, tile: Tile, phase: str, rows: int) -> None:
    """Run a kernel once (decode with split columns: twice) and compare."""
    kernel = prefill_kernel(problem, tile) if phase == "prefill" else decode_kernel(problem, tile)
    case = make(problem, rows, seed=rows)
    arguments: dict[str, Any] = dict(case.values)
    if tile.split_k > 1:
        partials, counters = workspace_bytes(problem, tile, rows)
        arguments["partials"] = np.full(partials // 4 + 64, -1, np.int32)  # NaN as float32; 64 items that are not the kernel's
        arguments["counters"] = np.zeros(counters // 4 + 1, np.int32)
        arguments["counters"][-1] = 7
    arguments["num_rows"] = rows
    for _ in range(2 if tile.split_k > 1 else 1):
        before = arguments["out"].copy()
        launch(kernel, arguments, T=rows if problem.rows == "T" else 0, R=rows if problem.rows == "R" else 0, B=1)
        out = arguments["out"]
        assert (out[:, problem.n :] == before[:, problem.n :]).all()
        used = out[:rows, : problem.n]
        got = used.astype(np.float64) if problem.output == "f32" else from_bf16(used)
        want = expected(problem, case, before)
        assert np.isfinite(got).all()
        assert np.abs(got - want).max() <= BOUND[problem.output] * np.abs(want).max()
        assert (out[rows:].view(np.uint8) == before[rows:].view(np.uint8)).all()
        assert (out[:, problem.n :] == before[:, problem.n :]).all()
    if tile.split_k > 1:
        assert not arguments["counters"][:-1].any()
        assert arguments["counters"][-1] == 7
        assert (arguments["partials"][-64:] == -1).all()
        assert (arguments["partials"][:-64] != -1).any()


def tile_for(problem: LinearProblem, **settings: Any) -> Tile:
    defaults = {"block_m": 16, "block_n": 16, "block_k": 64 if problem.group else 32, "num_warps": 4, "num_stages": 2}
    return Tile(**(defaults | settings))


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(
    ("phase", "rows", "tile"),
    [
        ("decode", 1, {}),
        ("decode", 5, {"block_n": 32}),
        ("decode", 33, {}),
        ("decode", 17, {"split_k": 3, "block_m": 32}),
        ("decode", 33, {"split_k": 2}),
        ("decode", 5, {"unroll": 2}),
        ("prefill", 1, {}),
        ("prefill", 33, {"block_n": 32, "group_m": 2}),
        ("prefill", 70, {"persistent": 4, "group_m": 3}),
    ],
    ids=lambda value: str(value) if isinstance(value, (str, int)) else "-".join(f"{k}{v}" for k, v in value.items()) or "plain",
)
def test_odd_sizes(launch: Any, format: str, phase: str, rows: int, tile: dict[str, int]) -> None:
    problem = problem_for(format)
    if problem.group is not None and "unroll" in tile:
        pytest.skip("int4 does not unroll")
    check(launch, problem, tile_for(problem, **tile), phase, rows)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_whole_tiles_need_no_masks(launch: Any, format: str, phase: str) -> None:
    problem = problem_for(format, n=32, k=128)
    kernel = (prefill_kernel if phase == "prefill" else decode_kernel)(problem, tile_for(problem))
    assert "k_used" not in kernel.source()
    assert "column_used" not in kernel.source()
    assert "column < N" not in kernel.source()
    check(launch, problem, tile_for(problem), phase, 5)


@pytest.mark.parametrize("format", ["bf16", "int8", "int4"])
@pytest.mark.parametrize(
    ("rows", "tile"),
    [(17, {"block_n": 128}), (5, {"block_n": 256, "persistent": 2}), (130, {"block_m": 128}), (130, {"block_m": 256})],
)
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
def test_large_tiles_are_stored_in_slices(launch: Any, format: str, rows: int, tile: dict[str, int], gated: bool) -> None:
    problem = problem_for(format, n=150, bias=True, activation="silu" if gated else None, residual=not gated)
    sliced_side = "block_m" if format == "int4" else "block_n"
    kernel = prefill_kernel(problem, tile_for(problem, **tile))
    assert ("halve(" in kernel.source()) == (sliced_side in tile)
    check(launch, problem, tile_for(problem, **tile), "prefill", rows)


@pytest.mark.parametrize("phase", ["decode", "prefill"])
@pytest.mark.parametrize(("format", "activation"), [("bf16", "silu"), ("fp8", "gelu_tanh"), ("int8", "gelu"), ("int4", "silu")])
def test_gated_pair(launch: Any, phase: str, format: str, activation: str) -> None:
    problem = problem_for(format, activation=activation, bias=True, output="bf16")
    check(launch, problem, tile_for(problem), phase, 17)


@pytest.mark.parametrize("format", FORMATS)
def test_gated_pair_with_split_columns(launch: Any, format: str) -> None:
    problem = problem_for(format, activation="gelu_tanh", output="bf16")
    check(launch, problem, tile_for(problem, split_k=2), "decode", 17)


@pytest.mark.parametrize("phase", ["decode", "prefill"])
@pytest.mark.parametrize("format", FORMATS)
def test_residual_and_bias(launch: Any, phase: str, format: str) -> None:
    problem = problem_for(format, residual=True, bias=True)
    check(launch, problem, tile_for(problem), phase, 17)


def test_residual_is_added_once_with_split_columns(launch: Any) -> None:
    problem = problem_for("fp8", residual=True, rows="R")
    check(launch, problem, tile_for(problem, split_k=2), "decode", 5)


@pytest.mark.parametrize("phase", ["decode", "prefill"])
@pytest.mark.parametrize("activation", [None, "silu"])
def test_scale_per_tensor(launch: Any, phase: str, activation: str | None) -> None:
    problem = problem_for("fp8", per_tensor_scale=True, activation=activation)
    check(launch, problem, tile_for(problem), phase, 5)


@pytest.mark.parametrize("phase", ["decode", "prefill"])
@pytest.mark.parametrize(("group", "block_k"), [(32, 128), (32, 256), (64, 256), (128, 256)])
def test_groups_per_step(launch: Any, phase: str, group: int, block_k: int) -> None:
    """A step over several pairs of groups, where the last step is not full."""
    problem = problem_for("int4", group=group, k=2 * block_k - 56)
    check(launch, problem, tile_for(problem, block_k=block_k, block_n=32), phase, 5)
    if phase == "decode":
        check(launch, problem, tile_for(problem, block_k=block_k, block_n=32, split_k=2), phase, 5)


def test_extreme_gates_stay_finite(launch: Any) -> None:
    """Gates of +-30000, where the exponential overflows."""
    for activation in ("silu", "gelu_tanh", "gelu"):
        problem = problem_for("bf16", n=16, k=16, activation=activation)
        case = make(problem, 1)
        case.values["x"][:1] = to_bf16(np.full((1, 16), 1000.0))
        case.values["weight"][:16] = to_bf16(np.where(np.arange(16) % 2, 2.0, -2.0)[:, None] * np.ones((16, 16)))
        launch(decode_kernel(problem, tile_for(problem)), {**case.values, "num_rows": 1}, T=1, R=0, B=1)
        assert np.isfinite(case.values["out"][0]).all()
        assert (case.values["out"][0, ::2] == 0).all()


def test_same_name_means_same_source() -> None:
    """Every setting that changes a kernel changes its name."""
    base = problem_for("fp8")
    problems = [
        base,
        *(replace(base, **{field: value}) for field, value in [("n", 38), ("k", 80), ("bias", True), ("residual", True)]),
        *(replace(base, **{field: value}) for field, value in [("output", "bf16"), ("rows", "R"), ("per_tensor_scale", True)]),
        *(replace(base, activation=name) for name in ("silu", "gelu_tanh", "gelu")),
        *(problem_for(format) for format in FORMATS if format != "fp8"),
        *(problem_for("int4", group=group) for group in (64, 128)),
    ]
    tiles = [tile_for(problem_for("int4", group=128), block_k=256)]
    for field, value in [("block_m", 32), ("block_n", 32), ("block_k", 512), ("num_warps", 8), ("num_stages", 3)]:
        tiles.append(replace(tiles[0], **{field: value}))
    kernels = [build(problem, tile) for problem in problems for tile in tiles for build in (prefill_kernel, decode_kernel)]
    kernels += [
        prefill_kernel(problem, replace(tiles[0], **{field: 4})) for problem in problems for field in ("group_m", "persistent")
    ]
    kernels += [decode_kernel(problem, replace(tiles[0], split_k=split)) for problem in problems for split in (2, 4)]
    kernels += [decode_kernel(problem, replace(tiles[0], unroll=2)) for problem in problems if problem.group is None]
    assert len({kernel.name for kernel in kernels}) == len(kernels)
    assert all(kernel.name.isidentifier() for kernel in kernels)


def test_refuses_what_no_kernel_computes() -> None:
    for format, wrong in (
        ("int4", {"group": None}),
        ("int4", {"group": 48}),
        ("bf16", {"group": 32}),
        ("bf16", {"per_tensor_scale": True}),
        ("bf16", {"residual": True, "output": "bf16"}),
        ("bf16", {"residual": True, "activation": "silu"}),
        ("bf16", {"n": 0}),
    ):
        with pytest.raises(TargetError):
            problem_for(format, **wrong)
    problem = problem_for("int4", group=128)
    with pytest.raises(TargetError, match="multiple of two groups"):
        decode_kernel(problem, tile_for(problem, block_k=128))
    with pytest.raises(TargetError, match="power of two"):
        decode_kernel(problem, tile_for(problem, block_n=48))
    with pytest.raises(TargetError, match="split"):
        prefill_kernel(problem, tile_for(problem, block_k=256, split_k=2))


MATRIX_INSTRUCTIONS = {
    "sm_80": {"bf16": "HMMA", "int8": "IMMA", "int4": "HMMA"},
    "sm_89": {"bf16": "HMMA", "fp8": "QMMA", "int8": "IMMA", "int4": "HMMA"},
    "sm_90": {"bf16": "HGMMA", "fp8": "QGMMA", "int8": "IGMMA", "int4": "HGMMA"},
    "sm_100": {"bf16": "UTCHMMA", "fp8": "UTCQMMA", "int8": "UTCIMMA", "int4": "UTCHMMA"},
    "gfx942": {"bf16": "v_mfma_f32", "fp8": "v_mfma_f32", "int8": "v_mfma_i32", "int4": "v_mfma_f32"},
}


@pytest.mark.slow
@pytest.mark.parametrize("arch", MATRIX_INSTRUCTIONS)
def test_builds_use_the_matrix_units(build_for: Any, arch: str) -> None:
    """Products of an 8B model with the tiles of the tables: the build itself refuses spills and too much shared memory."""
    facts = next(table.facts for table in load_tables().values() if table.facts.arch == arch)
    rocm = arch == "gfx942"
    expected_name: dict[str, str] = {}
    kernels = []
    for format, instruction in MATRIX_INSTRUCTIONS[arch].items():
        settings: dict[str, Any] = {
            "format": format,
            "backend": "rocm" if rocm else "cuda",
            "fp8_type": "fp8e4b8" if rocm else "fp8e4nv",
        }
        if format == "int4":
            settings["group"] = 128
        long = LinearProblem(n=4096, k=14336, residual=True, output="f32", **settings)
        gated = LinearProblem(n=14336, k=4096, activation="silu", **settings)
        kernels.append(prefill_kernel(long, choose_tile(long, "prefill", 4096, facts)))
        expected_name[kernels[-1].name] = instruction
        if format in ("bf16", "int4"):
            kernels.append(decode_kernel(gated, choose_tile(gated, "decode", 16, facts)))
            expected_name[kernels[-1].name] = instruction
    for name, built in build_for(arch, kernels).items():
        found = " ".join(built.matrix_instructions)
        assert expected_name[name] in found, f"{name}: {found or 'none'}"
