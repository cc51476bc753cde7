"""Byte counts on the command line: `6GiB`, `800MB`, `123456`."""

from __future__ import annotations

import re

import click

_UNITS = {
    "": 1,
    "b": 1,
    **{f"{p}b": 1000**i for i, p in enumerate("kmgt", 1)},
    **{f"{p}ib": 1024**i for i, p in enumerate("kmgt", 1)},
}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*)", re.IGNORECASE)


class ByteSize(click.ParamType[int]):
    """A number of bytes, with a decimal (MB) or binary (MiB) unit."""

    name = "size"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        match = _SIZE.fullmatch(str(value).strip())
        unit = _UNITS.get(match[2].lower()) if match else None
        if match is None or unit is None:
            self.fail(f"{value!r} is not a size; give bytes or a unit, such as 6GiB or 800MB", param, ctx)
        return int(float(match[1]) * unit)
