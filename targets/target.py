"""Resolves a target name `<device>-<scheme>`, or a device TOML file, into the facts that the compiler asks for."""

from __future__ import annotations

import difflib
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Annotated

import msgspec

from ..errors import TargetError

Positive = Annotated[int, msgspec.Meta(gt=0)]
Rate = Annotated[float, msgspec.Meta(gt=0)]
Name = Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9][a-z0-9_]{0,31}\Z")]


class Device(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Facts of one device kind, as in `devices/<name>.toml`; `None` where a fact is unknown or differs by machine.

    `levels` are instruction-set levels, lowest first, and `arch` is what the kernels are built for: `sm_90`, `gfx942`. `sources` say where
    the facts are from. Rates are dense peaks of the data sheet: operations (a fused multiply-add is two) and bytes a second.
    """

    name: Name
    vendor: str
    backend: str
    arch: str
    schemes: Annotated[tuple[Name, ...], msgspec.Meta(min_length=1)]
    summary: str = ""
    sources: tuple[str, ...] = ()
    levels: tuple[str, ...] = ()
    features: tuple[str, ...] = ()
    memory_bytes: Positive | None = None
    memory_bandwidth_bytes_per_s: Rate | None = None
    peak_ops_per_s: dict[str, Rate] = {}
    num_processors: Positive | None = None
    shared_memory_per_block_bytes: Positive | None = None
    default_scheme: Name | None = None

    def __post_init__(self) -> None:
        if self.default_scheme is not None and self.default_scheme not in self.schemes:
            raise ValueError(f"default_scheme {self.default_scheme!r} is not among schemes {list(self.schemes)}")


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """A device and the number format (`scheme`) a model is compiled to."""

    device: Device
    scheme: str

    @property
    def name(self) -> str:
        """`<device>-<scheme>`, the name under which a bundle keeps the program."""
        return f"{self.device.name}-{self.scheme}"

    @property
    def backend(self) -> str:
        """Which code generator and executor serve the device."""
        return self.device.backend

    def supports(self, capability: str) -> bool:
        """Whether the device runs the scheme, or has the instruction-set level or feature, called `capability`."""
        return capability in self.device.schemes + self.device.levels + self.device.features


def resolve_target(name: str | Path) -> Target:
    """The target called `name`, or the one described by the device TOML file at that path.

    A file needs `default_scheme`, since its path names none. Raises TargetError.
    """
    text = str(name)
    if text.endswith(".toml"):
        return _from_file(Path(text))
    targets = {target.name: target for target in list_targets()}
    if text in targets:
        return targets[text]
    device_name, _, scheme = text.rpartition("-")
    device = _devices().get(device_name)
    if device is not None:
        raise TargetError(
            f"target {text!r}: device {device.name!r} has no scheme {scheme!r}; it has {', '.join(device.schemes)}"
        )
    close = difflib.get_close_matches(text, targets, n=1, cutoff=0.5)
    hint = f"did you mean {close[0]!r}? " if close else ""
    valid = ", ".join(f"{device.name}-{{{','.join(device.schemes)}}}" for device in _devices().values())
    raise TargetError(f"unknown target {text!r}; {hint}Valid: {valid}, or the path of a device .toml file")


def list_targets() -> list[Target]:
    """Every target of the devices that come with llmc, by device and then in the order of the device's schemes."""
    return [Target(device=device, scheme=scheme) for device in _devices().values() for scheme in device.schemes]


@cache
def _devices() -> dict[str, Device]:
    folder = resources.files(__package__) / "devices"
    files = sorted((file for file in folder.iterdir() if file.name.endswith(".toml")), key=lambda file: file.name)
    devices = [_decode(file.read_bytes(), f"targets/devices/{file.name}") for file in files]
    return {device.name: device for device in devices}


def _from_file(path: Path) -> Target:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise TargetError(f"device file {path}: {error.strerror}; expected a readable TOML file") from None
    device = _decode(data, str(path))
    if device.default_scheme is None:
        raise TargetError(
            f'device file {path}: no default_scheme; add default_scheme = "{device.schemes[0]}" to say which of '
            f"{', '.join(device.schemes)} is meant"
        )
    return Target(device=device, scheme=device.default_scheme)


def _decode(data: bytes, where: str) -> Device:
    try:
        return msgspec.toml.decode(data, type=Device)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise TargetError(f"device file {where}: {' '.join(str(error).split())}") from None
