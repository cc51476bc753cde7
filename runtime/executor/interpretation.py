"""Runs Triton kernels on the CPU through Triton's interpreter, on numpy memory and without torch."""

from __future__ import annotations

import linecache
import os
import sys
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...errors import MissingExtraError, UsageError

_SWITCH = "TRITON_INTERPRET"
_DTYPES = {
    "bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64", "fp8e4nv": "float8_e4m3fn", "fp8e4b8": "float8_e4m3fnuz",
    "i8": "int8", "u8": "uint8", "i16": "int16", "u16": "uint16", "i32": "int32", "u32": "uint32", "i64": "int64", "u64": "uint64",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Pointer:
    """An address and the type behind it, as the interpreter expects of a tensor; `type` is such as `*bf16`."""

    address: int
    type: str

    @property
    def dtype(self) -> str:
        """The element type by its torch name."""
        return _DTYPES[self.type.removeprefix("*")]

    def data_ptr(self) -> int:
        """The address."""
        return self.address


class InterpretedKernel:
    """A kernel from its source text; calling `launch` runs every program of the grid, one after another."""

    def __init__(self, source: str, name: str, where: str) -> None:
        """Execute `source`, which defines the function `name`; `where` names it in error messages and tracebacks.

        Raises `MissingExtraError` without Triton, `UsageError` where Triton was imported for compiling before.
        """
        interpreter = find_interpreter()
        where = f"{where}#{zlib.crc32(source.encode()):08x}"  # the source is looked up by this when first launched
        linecache.cache[where] = (
            len(source),
            None,
            source.splitlines(keepends=True),
            where,
        )  # Triton reads its kernels' source
        scope: dict[str, Any] = {"__name__": f"llmc_interpreted_{name}", "__file__": where}
        exec(compile(source, where, "exec"), scope)
        self._function = scope[name]
        self._grid_executor: Any = interpreter

    def launch(self, grid: Sequence[int], arguments: Sequence[Pointer | int | float]) -> None:
        """Run the kernel over `grid` (three extents)."""
        function = self._function
        with np.errstate(all="ignore"):  # devices do not warn, and what is masked out may be anything
            self._grid_executor(function.rewrite(), function.arg_names, tuple(grid))(*arguments)


def find_interpreter() -> Callable[..., Any]:
    """Triton's grid executor, without its copies between host and device.

    Raises `MissingExtraError` without Triton, `UsageError` where Triton was imported for compiling before.
    """
    loaded = "triton" in sys.modules
    if not loaded:
        os.environ[_SWITCH] = "1"
    try:
        import ml_dtypes  # noqa: F401 - for the rounding below
        import triton
        from triton.runtime.interpreter import GridExecutor, InterpretedFunction
    except ModuleNotFoundError as error:
        raise MissingExtraError(
            f"the interpreter needs the package {error.name!r}, which is not installed; run: pip install 'llmc[compile]'"
        ) from None
    if not isinstance(triton.language.sum, InterpretedFunction):
        raise UsageError(
            f"interpreter: Triton was imported for compiling before, in this process; set {_SWITCH}=1 before it starts, or load "
            "the bundle in a process of its own"
        )

    _round_as_devices_do(triton)
    _patch_once_per_launch()

    class HostGrid(GridExecutor):  # type: ignore[misc]
        """Arguments are host memory already."""

        def _init_args_hst(self, args_dev: Any, kwargs: Any) -> tuple[Any, Any]:
            return args_dev, kwargs

        def _restore_args_dev(self, args_dev: Any, args_hst: Any, kwargs: Any, kwargs_hst: Any) -> None:
            pass

    return HostGrid


def _round_as_devices_do(triton: Any) -> None:
    """Make conversions from float32 to narrower numbers round to the nearest, ties to even.

    Triton 3.9's interpreter cuts bf16 off, and halves an fp8 number whose mantissa overflows when it is rounded.
    """
    import ml_dtypes
    from triton.runtime.interpreter import TensorHandle, interpreter_builder

    language = triton.language
    narrow: dict[Any, Any] = {
        language.bfloat16: ml_dtypes.bfloat16,
        language.float8e4nv: ml_dtypes.float8_e4m3fn,
        language.float8e4b8: ml_dtypes.float8_e4m3fnuz,
    }
    builder: Any = type(interpreter_builder)
    truncate, convert = builder.create_fp_trunc, builder.create_fp_to_fp
    if getattr(truncate, "rounds", False):
        return

    def rounded(source: Any, target: Any) -> Any:
        """The value in the target type, or None for a conversion that the interpreter does well."""
        number = narrow.get(target.scalar)
        if number is None or source.dtype.scalar != language.float32:
            return None
        values = source.data.astype(number)
        return TensorHandle(values.view(f"u{values.dtype.itemsize}"), target.scalar)

    def create_fp_trunc(self: Any, source: Any, target: Any) -> Any:
        result = rounded(source, target)
        return truncate(self, source, target) if result is None else result

    def create_fp_to_fp(self: Any, source: Any, target: Any, rounding: Any) -> Any:
        result = rounded(source, target)
        return convert(self, source, target, rounding) if result is None else result

    create_fp_trunc.rounds = True  # type: ignore[attr-defined]
    builder.create_fp_trunc, builder.create_fp_to_fp = create_fp_trunc, create_fp_to_fp


def _patch_once_per_launch() -> None:
    """Replace the functions of triton.language once in a launch and namespace, not in every call of a helper function (2 ms each)."""
    from triton.runtime import interpreter

    function: Any = interpreter.InterpretedFunction
    if getattr(function.__call__, "patches_once", False):
        return
    patch = interpreter._patch_lang
    patched: set[int] = set()  # ids of the global namespaces of this launch

    def patch_for_launch(kernel: Any) -> Any:
        patched.clear()  # the end of a launch restores what was there before it
        scope = patch(kernel)
        patched.add(id(kernel.__globals__))
        return scope

    def call(self: Any, *arguments: Any, **options: Any) -> Any:
        if id(self.fn.__globals__) not in patched:
            patch(self.fn)
            patched.add(id(self.fn.__globals__))
        try:
            return self.rewrite()(*arguments, **options)
        except Exception as error:
            raise interpreter.InterpreterError(repr(error)) from error

    call.patches_once = True  # type: ignore[attr-defined]
    interpreter._patch_lang = patch_for_launch
    function.__call__ = call
