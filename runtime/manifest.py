"""The schema of manifest.json, the table of contents that every load of a bundle begins with."""

from __future__ import annotations

import re
from typing import Annotated

import msgspec

from .. import __version__
from ..errors import BundleError

SCHEMA_VERSION = 2
MANIFEST_NAME = "manifest.json"
MAX_MANIFEST_BYTES = 64 << 20

Count = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
Size = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
Sha256 = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]


class ModelFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What the model is; for people and tools, and for the bound on the length of a sequence."""

    name: str
    architecture: str
    num_parameters: Count
    vocab_size: Count
    context_length: Count


class TargetEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A target the bundle was compiled for: the paths of its program.json and of the weight files it takes, all of them whole."""

    name: str
    program: str
    weights: Annotated[list[str], msgspec.Meta(min_length=1)]


class FileEntry(msgspec.Struct, frozen=True, kw_only=True):
    """Size in bytes and SHA-256 (lower-case hex) of one file."""

    size: Size
    sha256: Sha256


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """manifest.json. Unknown fields are ignored: what older runtimes cannot ignore raises `schema_version`."""

    schema_version: int
    min_runtime: str
    model: ModelFacts
    toolchain: dict[str, str]
    targets: Annotated[list[TargetEntry], msgspec.Meta(min_length=1)]
    files: dict[str, FileEntry]


class _Versions(msgspec.Struct):
    schema_version: int
    min_runtime: str


def encode_manifest(manifest: Manifest) -> bytes:
    """The bytes of manifest.json: sorted keys, two spaces, a final newline; equal manifests, equal bytes."""
    return msgspec.json.format(msgspec.json.encode(manifest, order="sorted"), indent=2) + b"\n"


def decode_manifest(data: bytes, where: str) -> Manifest:
    """Parse manifest.json, versions first, so that a newer bundle is not called broken; raises BundleError."""
    try:
        versions = msgspec.json.decode(data, type=_Versions)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BundleError(f"{where}: not a manifest: {error}; compile the bundle again") from None
    if versions.schema_version > SCHEMA_VERSION:
        raise BundleError(
            f"{where}: schema_version is {versions.schema_version}, this llmc {__version__} reads up to "
            f"{SCHEMA_VERSION}; upgrade llmc or compile the bundle again with this version"
        )
    if versions.schema_version < SCHEMA_VERSION:
        raise BundleError(
            f"{where}: schema_version is {versions.schema_version}, this llmc {__version__} reads {SCHEMA_VERSION}; "
            "compile the bundle again"
        )
    if _release(versions.min_runtime, where) > _release(__version__, "llmc"):
        raise BundleError(f"{where}: needs llmc {versions.min_runtime} or newer, this is {__version__}: pip install -U llmc")
    try:
        manifest = msgspec.json.decode(data, type=Manifest)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BundleError(f"{where}: not of the schema: {error}; compile the bundle again") from None
    names = [target.name for target in manifest.targets]
    if len(set(names)) != len(names):
        raise BundleError(f"{where}: the targets {names} are not distinct")
    return manifest


def _release(version: str, where: str) -> tuple[int, ...]:
    match = re.match(r"(\d{1,9})\.(\d{1,9})(?:\.(\d{1,9}))?", version)
    if match is None:
        raise BundleError(f"{where}: version {version[:40]!r} is not of the form 1.2.3")
    return tuple(int(part or 0) for part in match.groups())
