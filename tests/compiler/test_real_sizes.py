"""Real-size configurations go through every pass and lowering on shapes alone, within the memory a laptop has."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

CONFIGS = sorted((Path(__file__).parent.parent.parent / "examples" / "configs").glob("*.json"))


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_dry_run(config: Path) -> None:
    command = [sys.executable, "-m", "llmc", "compile", str(config), "--target", "cpu-int4", "--dry-run", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    layers = json.loads(config.read_text())["num_hidden_layers"]
    operators = report["targets"]["cpu-int4"]["operators"]
    assert operators["llmc.rope_paged_attention"] == 2 * layers
    assert operators["llmc.linear_glu"] == 2 * layers
    assert {name.split(".")[0] for name in operators} == {"llmc", "getitem"}
    assert report["peak_rss_bytes"] < 4e9
    billions = float(config.stem.split("-")[-1].removesuffix("b"))
    assert abs(report["num_parameters"] / 1e9 - billions) / billions < 0.2
