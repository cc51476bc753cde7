"""Matrix products with weights in every stored format: one kernel for many tokens, one for few, with what follows fused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from ...errors import TargetError
from .kernel import ONE, Extent, Kernel, Parameter, Setting

Format: TypeAlias = Literal["bf16", "fp8", "int8", "int4"]
Activation: TypeAlias = Literal["silu", "gelu_tanh", "gelu"]
Fp8Type: TypeAlias = Literal["fp8e4nv", "fp8e4b8"]
Rows: TypeAlias = Literal["T", "R"]
Backend: TypeAlias = Literal["cuda", "rocm"]

_X_TYPES = {"bf16": "*bf16", "int8": "*i8", "int4": "*bf16"}
_WEIGHT_TYPES = {"bf16": "*bf16", "int8": "*i8", "int4": "*u16"}


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearProblem:
    """`out [rows, n] = x [rows, k] @ weight^T`, and what is fused with it.

    `format` is that of the weight; x is bf16 for bf16 and int4 and of the weight's type with a scale per row otherwise. With
    `activation` the weight has 2n rows and `out = activation(x @ weight[:n]^T) * (x @ weight[n:]^T)`. With `residual` the
    product is added to `out` in place. `group` is the number of columns that share a scale, for int4 alone; fp8 weights have a
    scale per row, or one if `per_tensor_scale`. `rows` counts tokens (T) or rows of logits (R). `backend` decides how int4 is converted.
    """

    n: int
    k: int
    format: Format
    group: int | None = None
    per_tensor_scale: bool = False
    bias: bool = False
    activation: Activation | None = None
    residual: bool = False
    output: Literal["bf16", "f32"] = "bf16"
    fp8_type: Fp8Type = "fp8e4nv"
    rows: Rows = "T"
    backend: Backend = "cuda"

    def __post_init__(self) -> None:
        """Refuse what the kernels do not compute."""
        if self.n < 1 or self.k < 1:
            raise TargetError(f"linear: a weight of n={self.n} by k={self.k}, expected positive sizes")
        if (self.format == "int4") != (self.group is not None):
            raise TargetError(f"linear: format {self.format!r} with group {self.group}; int4 has a group, the others have none")
        if self.group is not None and self.group not in (32, 64, 128):
            raise TargetError(f"linear: group {self.group}, expected 32, 64 or 128")
        if self.per_tensor_scale and self.format != "fp8":
            raise TargetError(f"linear: one scale per tensor belongs to fp8, found {self.format!r}")
        if self.residual and (self.activation is not None or self.output != "f32"):
            raise TargetError("linear: a residual is float32 and is not added to a gated output")

    @property
    def weight_rows(self) -> int:
        """Rows of the weight: 2n for a gated pair."""
        return 2 * self.n if self.activation else self.n

    @property
    def x_stride(self) -> int:
        """Elements from row to row of x, and of weights other than int4."""
        return _round_up(self.k, 16)

    @property
    def out_stride(self) -> int:
        """Elements from row to row of `out`: bf16 rows are inputs of other products as they are."""
        return _round_up(self.n, 16) if self.output == "bf16" else self.n

    @property
    def padded_k(self) -> int:
        """Columns of the weight as stored, int4 in pairs of groups."""
        return _round_up(self.k, 2 * self.group) if self.group else self.x_stride

    @property
    def scheme(self) -> str:
        """The formats as names show them."""
        if self.format == "fp8":
            return ("fp8" if self.fp8_type == "fp8e4nv" else "fp8fnuz") + "_tensor" * self.per_tensor_scale
        return f"int4g{self.group}" + "_rocm" * (self.backend == "rocm") if self.group else self.format


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """How the work is divided: `block_m` rows of x by `block_n` outputs a program, `block_k` columns a step.

    `num_stages` steps are in flight. `split_k` programs share the columns of an output tile (decode). `group_m` tiles of rows are
    taken together and `persistent` programs take all tiles in turn, or each tile has its own program if 0 (prefill). `unroll`
    steps are one iteration of the loop: with more than one product in a loop, Triton no longer carries operands from one
    iteration to the next, which for 8-bit operands costs more instructions than the products (seen on sm_80 and sm_89).
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    split_k: int = 1
    group_m: int = 8
    persistent: int = 0
    unroll: int = 1


def prefill_kernel(problem: LinearProblem, tile: Tile) -> Kernel:
    """The product for many rows, one output tile after another in an order that is kind to the L2 cache.

    Parameters in order, those left out that the problem lacks: x `[rows, k up to a multiple of 16]`, x_scale f32 `[rows]`
    (fp8, int8), weight, weight_scale (f32 `[n or 2n]` or `[1]`; int4: f16 `[groups, n or 2n]`), bias f32 `[n or 2n]`,
    out `[rows, n]` (bf16: rows of n up to a multiple of 16), num_rows i32.
    """
    _check(problem, tile)
    if tile.split_k != 1:
        raise TargetError(f"linear: prefill does not split columns, found split_k={tile.split_k}")
    tiles_n = -(-problem.n // tile.block_n)
    name = f"linear_prefill_{_identity(problem, tile)}_g{tile.group_m}" + (f"_p{tile.persistent}" if tile.persistent else "")
    settings: dict[str, Setting] = {
        "swapped": problem.format == "int4",  # converted weights are the left operand, which matrix units take from registers
        "promote": False,  # fp8 sums stay in Hopper's matrix units, which keep fewer bits than float32
        "slices": min(
            4, max(1, (tile.block_m if problem.format == "int4" else tile.block_n) // 64)
        ),  # fit a tile's end in registers
        "group_m": tile.group_m,
        "tiles_n": tiles_n,
        "persistent": tile.persistent,
    }
    grid = (
        Extent(factor=tile.persistent) if tile.persistent else Extent(symbol=problem.rows, divisor=tile.block_m, factor=tiles_n)
    )
    return _kernel(name, "linear_prefill", problem, tile, settings, (grid, ONE, ONE))


def decode_kernel(problem: LinearProblem, tile: Tile) -> Kernel:
    """The product for few rows, which reads weights at the speed of the memory; correct for any number of rows.

    Parameters as of `prefill_kernel`, and before num_rows, where `split_k` is not 1: partials (f32; int8: i32) and counters i32,
    of the sizes `workspace_bytes` gives. Counters are 0 before the first launch, and again after each.
    """
    _check(problem, tile)
    split = tile.split_k > 1
    name = f"linear_decode_{_identity(problem, tile)}" + (f"_k{tile.split_k}" if split else "")
    settings: dict[str, Setting] = {
        "swapped": True,
        "promote": True,  # fp8 sums of each step are added up in float32, which costs nothing here
        "slices": 1,
        "split_k": tile.split_k,
    }
    grid = (
        Extent(symbol=problem.rows, divisor=tile.block_m),
        Extent(factor=-(-problem.n // tile.block_n)),
        Extent(factor=tile.split_k),
    )
    return _kernel(name, "linear_decode", problem, tile, settings, grid)


def workspace_bytes(problem: LinearProblem, tile: Tile, max_rows: int) -> tuple[int, int]:
    """Bytes of `partials` and of `counters` for a decode kernel and up to `max_rows` rows; (0, 0) without split columns."""
    if tile.split_k == 1:
        return 0, 0
    tiles = -(-max_rows // tile.block_m) * -(-problem.n // tile.block_n)
    sums = 2 if problem.activation else 1
    return tiles * sums * tile.split_k * tile.block_n * tile.block_m * 4, tiles * 4


def _kernel(
    name: str,
    template: str,
    problem: LinearProblem,
    tile: Tile,
    settings: dict[str, Setting],
    grid: tuple[Extent, Extent, Extent],
) -> Kernel:
    steps = -(-problem.k // tile.block_k)
    share = -(-steps // tile.split_k) * tile.block_k
    columns = share * tile.split_k  # that the programs of a tile walk over; what is beyond k is masked
    group = problem.group or 0
    common: dict[str, Setting] = {
        "summary": _summary(problem),
        "n": problem.n,
        "k": problem.k,
        "format": problem.format,
        "backend": problem.backend,
        "row_scaled": problem.format in ("fp8", "int8"),
        "per_tensor_scale": problem.per_tensor_scale,
        "bias": problem.bias,
        "activation": problem.activation,
        "residual": problem.residual,
        "output": problem.output,
        "x_stride": problem.x_stride,
        "out_stride": problem.out_stride,
        "w_stride": problem.padded_k // 4 if group else problem.x_stride,
        "weight_rows": problem.weight_rows,
        "group": group,
        "num_groups": problem.padded_k // group if group else 0,
        "block_m": tile.block_m,
        "block_n": tile.block_n,
        "block_k": tile.block_k,
        "unroll": tile.unroll,
        "n_tail": problem.n % tile.block_n != 0,
        "k_tail": columns != problem.k,
        "w_tail": columns != problem.padded_k,
        "share": share,
        "split": tile.split_k > 1,
    }
    return Kernel(
        name=name,
        template=template,
        settings=common | settings,
        parameters=_parameters(problem, split=tile.split_k > 1),
        grid=grid,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


def _parameters(problem: LinearProblem, *, split: bool) -> tuple[Parameter, ...]:
    fp8 = f"*{problem.fp8_type}"
    types = {"x": _X_TYPES.get(problem.format, fp8)}
    if problem.format in ("fp8", "int8"):
        types["x_scale"] = "*fp32"
    types["weight"] = _WEIGHT_TYPES.get(problem.format, fp8)
    if problem.format != "bf16":
        types["weight_scale"] = "*fp16" if problem.format == "int4" else "*fp32"
    if problem.bias:
        types["bias"] = "*fp32"
    types["out"] = "*fp32" if problem.output == "f32" else "*bf16"
    if split:
        types |= {"partials": "*i32" if problem.format == "int8" else "*fp32", "counters": "*i32"}
    types["num_rows"] = "i32"
    return tuple(Parameter(name=name, type=type) for name, type in types.items())


def _check(problem: LinearProblem, tile: Tile) -> None:
    for field, size in (("block_m", tile.block_m), ("block_n", tile.block_n), ("block_k", tile.block_k)):
        if size < 16 or size & (size - 1):
            raise TargetError(f"linear: {field}={size}, expected a power of two of at least 16")
    if problem.group and tile.unroll != 1:
        raise TargetError(f"linear: int4 does not unroll its loop, found unroll={tile.unroll}")
    if problem.group and tile.block_k % (2 * problem.group):
        raise TargetError(f"linear: block_k={tile.block_k}, expected a multiple of two groups of {problem.group}")


def _identity(problem: LinearProblem, tile: Tile) -> str:
    """What tells kernels of one template apart."""
    fused = [problem.activation, "bias" if problem.bias else None, "residual" if problem.residual else None]
    words = [problem.scheme, *fused, problem.output, f"n{problem.n}", f"k{problem.k}", problem.rows]
    words += [f"{tile.block_m}x{tile.block_n}x{tile.block_k}", f"w{tile.num_warps}", f"s{tile.num_stages}"]
    words += [f"u{tile.unroll}"] if tile.unroll > 1 else []
    return "_".join(word for word in words if word)


def _summary(problem: LinearProblem) -> str:
    x = f"x {'bf16' if problem.format == 'int4' else problem.format} [{problem.rows}, {problem.k}]"
    product = f"{x} times the transpose of weight {problem.scheme} [{problem.weight_rows}, {problem.k}]"
    if problem.activation:
        product += ": activate(first half of the columns) * second half"
    bias = " + bias" if problem.bias else ""
    return f"out {problem.output} [{problem.rows}, {problem.n}] {'+=' if problem.residual else '='} {product}{bias}"


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
