"""The wheel holds every package and data file, and what is installed from it compiles and imports."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel built from a copy of the tree, so that nothing is written into it."""
    import shutil

    source = tmp_path_factory.mktemp("source") / "llmc"
    shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(".*", "build", "models", "tests", "*.egg-info", "__pycache__"))
    out = source.parent / "dist"
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(out), str(source)], check=True, capture_output=True
    )
    return next(out.glob("*.whl"))


def test_the_wheel_holds_every_source_file(wheel: Path) -> None:
    skipped = {"tests", "benchmarks", "examples", "docs", "build", "models"}
    expected = {
        f"llmc/{path.relative_to(ROOT)}"
        for pattern in ("*.py", "*.hpp", "*.cpp", "*.j2", "*.toml")
        for path in ROOT.rglob(pattern)
        if not any(part in skipped or part.startswith(".") for part in path.relative_to(ROOT).parts)
        and path.name not in ("pyproject.toml", "setup.py")
    }
    assert len(expected) > 60
    assert expected - set(zipfile.ZipFile(wheel).namelist()) == set()


def test_every_module_of_the_wheel_imports(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path)
    code = (
        "import importlib, pkgutil, sys; sys.path.insert(0, sys.argv[1]); import llmc\n"
        "assert llmc.__file__.startswith(sys.argv[1]), llmc.__file__\n"
        "names = [m.name for m in pkgutil.walk_packages(llmc.__path__, 'llmc.') if not m.name.endswith('__main__')]\n"
        "[importlib.import_module(name) for name in names]; print(len(names))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 60
