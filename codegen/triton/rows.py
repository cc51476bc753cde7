"""Kernels that work row by row: embedding, norms with what surrounds them, packing of linear inputs, gathering of rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from ...errors import TargetError
from .kernel import ONE, Extent, Kernel, Parameter, Setting

Rows: TypeAlias = Literal["T", "R"]
Fp8Type: TypeAlias = Literal["fp8e4nv", "fp8e4b8"]
Operand: TypeAlias = Literal["bf16", "fp8", "int8"]

_LARGEST: dict[Fp8Type, float] = {"fp8e4nv": 448.0, "fp8e4b8": 240.0}
_LANGUAGE_NAME: dict[Fp8Type, str] = {"fp8e4nv": "float8e4nv", "fp8e4b8": "float8e4b8"}
_COPY_BLOCK = 1024  # columns of a program that only copies
_MAX_NORM_WIDTH = 16384  # one program holds a whole row in registers
_MAX_PACK_WIDTH = 32768


def embedding_kernel(vocab: int, width: int, scale: float) -> Kernel:
    """`out f32 [T, width] = weight[token_ids] * scale`; weight is bf16 `[vocab, width up to a multiple of 16]`.

    Parameters: weight, token_ids i32 `[T]`, out, num_tokens.
    """
    block = min(_COPY_BLOCK, _power_of_two(width))
    return Kernel(
        name=f"embedding_v{vocab}_w{width}" + ("" if scale == 1 else f"_times{_identifier(scale)}"),
        template="embedding",
        settings={"vocab": vocab, "width": width, "stride": _stride(width), "block": block, "scale": float(scale)},
        parameters=_parameters({"weight": "*bf16", "token_ids": "*i32", "out": "*fp32", "num_tokens": "i32"}),
        grid=(Extent(symbol="T"), Extent(factor=-(-width // block)), ONE),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class NormSettings:
    """A norm over rows of `width` and what is fused with it.

    With `post_norm`, x is RMS-normalised by `post_eps` and `post_weight` first; with `residual`, it is then added to the residual
    in place and the norm is that of the sum. `kind` is the second norm's; `bias` is a layer norm's. `output` is f32 or a linear's
    input format, whose fp8 type is `fp8_type`; `static` inputs of 8 bits have one scale for all rows, which is an argument.
    """

    width: int
    eps: float
    kind: Literal["rms", "layer"] = "rms"
    residual: bool = False
    post_norm: bool = False
    post_eps: float = 0.0
    bias: bool = False
    output: Operand | Literal["f32"] = "bf16"
    fp8_type: Fp8Type = "fp8e4nv"
    static: bool = False

    def __post_init__(self) -> None:
        """Refuse what the kernel does not compute."""
        _check_width("norm", self.width, _MAX_NORM_WIDTH)
        if self.bias and self.kind != "layer":
            raise TargetError(f"norm: a bias belongs to a layer norm, found kind {self.kind!r}")
        _check_static("norm", self.output, static=self.static)


def norm_kernel(settings: NormSettings, rows: Rows = "T") -> Kernel:
    """A norm as `NormSettings` says, one program a row; `rows` is the number of rows: tokens (T) or rows of logits (R).

    Parameters, those left out that the settings do not use: x f32 `[rows, width]`, post_weight f32 `[width]`, residual f32
    `[rows, width]` (read and written), weight f32 `[width]`, bias f32 `[width]`, out `[rows, width up to a multiple of 16]`,
    out_scale f32 `[rows]` (fp8 and int8), step f32 (static), num_rows. Columns of out from width on are not written.
    """
    parameters = {"x": "*fp32"}
    if settings.post_norm:
        parameters["post_weight"] = "*fp32"
    if settings.residual:
        parameters["residual"] = "*fp32"
    parameters["weight"] = "*fp32"
    if settings.bias:
        parameters["bias"] = "*fp32"
    name = f"{settings.kind}_norm"
    if settings.post_norm:
        name += f"_post_eps{_identifier(settings.post_eps)}"
    if settings.residual:
        name += "_residual"
    if settings.bias:
        name += "_bias"
    name += f"_{_format_name(settings.output, settings.fp8_type, static=settings.static)}"
    name += f"_w{settings.width}_eps{_identifier(settings.eps)}_{rows}"
    return Kernel(
        name=name,
        template="norm",
        settings={
            "width": settings.width,
            "eps": settings.eps,
            "kind": settings.kind,
            "residual": settings.residual,
            "post_norm": settings.post_norm,
            "post_eps": settings.post_eps,
            "bias": settings.bias,
            **_packing(settings.output, settings.fp8_type, settings.width, static=settings.static),
        },
        parameters=_parameters(parameters | _out_parameters(settings.output, settings.fp8_type, static=settings.static)),
        grid=(Extent(symbol=rows), ONE, ONE),
        num_warps=_num_warps(settings.width),
    )


def pack_rows_kernel(
    width: int,
    *,
    input: Literal["bf16", "f32"],
    output: Operand,
    input_stride: int | None = None,
    fp8_type: Fp8Type = "fp8e4nv",
    static: bool = False,
    rows: Rows = "T",
) -> Kernel:
    """Rows in the input format of a linear, one program a row; `rows` is the number of rows: tokens (T) or rows of logits (R).

    Parameters: x `[rows, input_stride]` (default: width), out `[rows, width up to a multiple of 16]`, out_scale f32 `[rows]`
    (fp8 and int8), step f32 (`static`: the scale of all rows), num_rows. Columns of out from width on are not written.
    """
    _check_width("pack_rows", width, _MAX_PACK_WIDTH)
    _check_static("pack_rows", output, static=static)
    stride = width if input_stride is None else input_stride
    name = (
        f"pack_rows_{input}_to_{_format_name(output, fp8_type, static=static)}_w{width}"
        + (f"_of{stride}" if stride != width else "")
        + f"_{rows}"
    )
    parameters = {"x": "*bf16" if input == "bf16" else "*fp32"} | _out_parameters(output, fp8_type, static=static)
    return Kernel(
        name=name,
        template="pack_rows",
        settings={"width": width, "input": input, "input_stride": stride, **_packing(output, fp8_type, width, static=static)},
        parameters=_parameters(parameters),
        grid=(Extent(symbol=rows), ONE, ONE),
        num_warps=_num_warps(width),
    )


def gather_rows_kernel(width: int) -> Kernel:
    """`out f32 [R, width] = x[logit_rows]`. Parameters: x f32 `[T, width]`, logit_rows i32 `[R]`, out, num_rows."""
    block = min(_COPY_BLOCK, _power_of_two(width))
    return Kernel(
        name=f"gather_rows_w{width}",
        template="gather_rows",
        settings={"width": width, "block": block},
        parameters=_parameters({"x": "*fp32", "logit_rows": "*i32", "out": "*fp32", "num_rows": "i32"}),
        grid=(Extent(symbol="R"), Extent(factor=-(-width // block)), ONE),
    )


def _check_width(what: str, width: int, limit: int) -> None:
    if not 0 < width <= limit:
        raise TargetError(f"{what}: rows of {width} values, expected 1 to {limit}: a program holds a row in registers")


def _check_static(what: str, output: str, *, static: bool) -> None:
    if static and output not in ("int8", "fp8"):
        raise TargetError(f"{what}: {output} has no scale that could be static; int8 and fp8 have one")


def _packing(output: str, fp8_type: Fp8Type, width: int, *, static: bool) -> dict[str, Setting]:
    """What the end of a template needs to store rows in a format; `limit` is None where no scale is stored."""
    limit = {"int8": 127.0, "fp8": _LARGEST[fp8_type]}.get(output)
    return {
        "output": output,
        "limit": limit,
        "static": static,
        "fp8_type": _LANGUAGE_NAME[fp8_type],
        "stride": _stride(width),
        "block": _power_of_two(width),
    }


def _out_parameters(output: str, fp8_type: Fp8Type, *, static: bool) -> dict[str, str]:
    stored = {"f32": "*fp32", "bf16": "*bf16", "int8": "*i8", "fp8": f"*{fp8_type}"}[output]
    scale = {"out_scale": "*fp32"} if output in ("fp8", "int8") else {}
    return {"out": stored, **scale, **({"step": "fp32"} if static else {}), "num_rows": "i32"}


def _parameters(types: dict[str, str]) -> tuple[Parameter, ...]:
    return tuple(Parameter(name=name, type=type) for name, type in types.items())


def _format_name(output: str, fp8_type: Fp8Type, *, static: bool) -> str:
    name = {"fp8e4nv": "fp8", "fp8e4b8": "fp8fnuz"}[fp8_type] if output == "fp8" else output
    return f"{name}_static" if static else name


def _identifier(number: float) -> str:
    """All digits of a number in a form that a name can hold: 1e-06 is `1em06`, 2.5 is `2p5`."""
    return repr(float(number)).replace(".", "p").replace("-", "m").replace("+", "")


def _stride(width: int) -> int:
    """Elements from row to row of a linear's input or weight."""
    return -(-width // 16) * 16


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


def _num_warps(width: int) -> int:
    """Warps for a program that holds a row: 16 values a thread, up to 16 warps (1024 threads of AMD's 64-lane warps)."""
    return min(max(_power_of_two(width) // 512, 1), 16)
