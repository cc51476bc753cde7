"""Checks everything in a bundle and lists every violation, where a load stops at the first."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from ..errors import LlmcError
from .bundle import Bundle, check_machine, read_manifest
from .generation import read_chat_template, read_default_params, read_end_ids, read_tokenizer
from .integrity import check_hash, locate, read_file
from .manifest import MANIFEST_NAME, FileEntry


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One thing that was looked at; `problem` is None if it is as it should be."""

    subject: str
    detail: str
    problem: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All checks of a bundle. Files that the manifest does not name are no problem: they are never read."""

    checks: list[Check]
    extra_files: list[str]

    @property
    def problems(self) -> list[Check]:
        """The checks that failed."""
        return [check for check in self.checks if check.problem is not None]


def verify_bundle(path: str | Path) -> Report:
    """Check all files and all targets of the bundle at `path`; raises BundleError if it has no valid manifest."""
    root = Path(path)
    manifest = read_manifest(root)
    with ThreadPoolExecutor(max_workers=4) as pool:
        files = list(pool.map(lambda item: _check_file(root, *item), sorted(manifest.files.items())))
    checks = [*files, *(_check_target(root, entry.name) for entry in manifest.targets)]
    found = (file.relative_to(root).as_posix() for file in root.rglob("*") if not file.is_dir())
    return Report(checks=checks, extra_files=sorted(set(found) - set(manifest.files) - {MANIFEST_NAME}))


def _check_file(root: Path, name: str, entry: FileEntry) -> Check:
    detail = f"{entry.size} bytes"
    try:
        check_hash(read_file(locate(root, name, entry)), entry, root / name)
    except (LlmcError, OSError) as error:
        return Check(subject=name, detail=detail, problem=str(error))
    return Check(subject=name, detail=detail)


def _check_target(root: Path, name: str) -> Check:
    """The program, weights and tokenizer of one target; its library too, if this machine can run it."""
    detail = "not run here"
    try:
        bundle = Bundle.open(root, target=name, any_machine=True)
        tokenizer = read_tokenizer(bundle)
        read_chat_template(bundle, tokenizer)
        read_default_params(bundle)
        read_end_ids(bundle, tokenizer)
        try:
            check_machine(bundle.program, name, root)
        except LlmcError:
            return Check(subject=name, detail=detail)
        from .executor.cpu import open_best_library

        _, level = open_best_library(bundle, None)
        detail = f"runs here, level {level}"
    except LlmcError as error:
        return Check(subject=name, detail=detail, problem=str(error))
    return Check(subject=name, detail=detail)
