"""A specialised Triton kernel: a template, what is filled in, its parameters and its launch grid."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import TypeAlias

import jinja2

from ...runtime.program import Extent

Setting: TypeAlias = "int | float | str | bool | None"


__all__ = ["ONE", "Extent", "Kernel", "Parameter", "Setting"]
ONE = Extent()  # an axis of one program


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One argument at launch: its name and its Triton type, such as `*bf16`, `*fp8e4nv` or `i32`."""

    name: str
    type: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """One kernel as it is compiled. `name` is the Triton function; equal names must mean equal kernels.

    `settings` fill the template; everything in them is a constant of the source. Every pointer is 16-byte aligned.
    """

    name: str
    template: str
    settings: Mapping[str, Setting]
    parameters: tuple[Parameter, ...]
    grid: tuple[Extent, Extent, Extent] = field(default=(ONE, ONE, ONE))
    num_warps: int = 4
    num_stages: int = 1

    def source(self) -> str:
        """The Python text of the kernel."""
        names = [parameter.name for parameter in self.parameters]
        return _environment().get_template(f"{self.template}.py.j2").render(**self.settings, name=self.name, parameters=names)


@cache
def _environment() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.PackageLoader("llmc.codegen.triton"),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined,
        autoescape=False,  # Python, not HTML
    )
