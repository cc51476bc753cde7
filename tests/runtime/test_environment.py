"""Environment variables: unset and empty are the default, a bad value is one line."""

from __future__ import annotations

from pathlib import Path

import pytest
from llmc import environment
from llmc.errors import UsageError


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in environment.VARIABLES:
        monkeypatch.delenv(variable.name, raising=False)


def test_defaults(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert environment.NUM_THREADS.get() is None
    assert environment.DUMP_DIR.get() is None
    assert environment.LOG.get() == "warning"
    monkeypatch.setenv("LLMC_HOME", str(tmp_path))
    assert environment.CACHE.get() == tmp_path / "cache"
    monkeypatch.setenv("LLMC_NUM_THREADS", "")
    assert environment.NUM_THREADS.get() is None


def test_values_are_read_when_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMC_NUM_THREADS", "7")
    assert environment.NUM_THREADS.get() == 7
    monkeypatch.setenv("LLMC_LOG", "DEBUG")
    assert environment.LOG.get() == "debug"


@pytest.mark.parametrize(
    ("name", "value"),
    [("NUM_THREADS", "0"), ("NUM_THREADS", "-1"), ("NUM_THREADS", "two"), ("NUM_THREADS", "1e9"), ("LOG", "loud"),
     ("HOME", __file__), ("CACHE", __file__), ("DUMP_DIR", __file__)],
)  # fmt: skip
def test_bad_values(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(f"LLMC_{name}", value)
    with pytest.raises(UsageError, match=f"LLMC_{name}=.*expected"):
        getattr(environment, name).get()
