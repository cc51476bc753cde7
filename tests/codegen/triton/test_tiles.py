"""The rule that chooses tiles, and the tables of its choices that come with llmc."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
from llmc.codegen.triton.linear import LinearProblem, Tile
from llmc.codegen.triton.tiles import (
    DeviceFacts,
    choose_tile,
    compute_table,
    compute_tile,
    load_tables,
    parse_table,
    section_name,
)
from llmc.errors import TargetError
from llmc.targets.target import resolve_target

ROOT = Path(__file__).parent.parent.parent.parent
sys.path.append(str(ROOT / "benchmarks"))
import tune  # noqa: E402

DEVICES = ["a100", "b200", "h100", "h200", "l40s", "mi300x", "rtx4090"]
H100 = DeviceFacts(arch="sm_90", num_processors=132, shared_memory_per_block_bytes=232448, memory_bandwidth_bytes_per_s=3.35e12)
SHAPES = [(6144, 4096, None), (4096, 4096, None), (14336, 4096, "silu"), (4096, 14336, None), (128256, 4096, None)]


@pytest.mark.parametrize("name", DEVICES)
def test_tables_are_what_the_rule_gives(name: str) -> None:
    """To change a table is to change the rule, until someone measures; then this test names the device as measured."""
    text = (ROOT / "codegen" / "triton" / "tuning" / f"{name}.toml").read_text(encoding="utf-8")
    table = load_tables()[name]
    assert tune.render(name, compute_table(table.facts)) == text, f"run: python benchmarks/tune.py --device {name}"
    device = resolve_target(f"{name}-bf16").device
    assert table.facts == tune.device_facts(device)


def test_every_device_has_a_table() -> None:
    assert list(load_tables()) == DEVICES


def test_a_table_survives_its_text() -> None:
    table = load_tables()["mi300x"]
    assert parse_table(tune.render("mi300x", table)) == table


@pytest.mark.parametrize("format", ["bf16", "fp8", "int8"])
@pytest.mark.parametrize(("n", "k", "activation"), SHAPES)
def test_decode_keeps_enough_bytes_under_way(format: str, n: int, k: int, activation: str | None) -> None:
    """Twice bandwidth times latency, on two thirds of the processors or more."""
    problem = LinearProblem(n=n, k=k, format=format, activation=activation)
    tile = choose_tile(problem, "decode", 16, H100)
    programs = -(-n // tile.block_n) * tile.split_k
    assert programs >= 88
    row_bytes = tile.block_k * (2 if format == "bf16" else 1)
    assert row_bytes >= 256
    under_way = min(programs, 132) * (tile.num_stages - 1) * tile.block_n * row_bytes * (2 if activation else 1)
    assert under_way >= 2 * 3.35e12 * 0.6e-6


def test_columns_are_split_only_where_outputs_are_few() -> None:
    few = choose_tile(LinearProblem(n=1024, k=14336, format="bf16"), "decode", 16, H100)
    many = choose_tile(LinearProblem(n=128256, k=4096, format="bf16"), "decode", 16, H100)
    assert few.split_k > 1
    assert many.split_k == 1


@pytest.mark.parametrize("format", ["bf16", "fp8", "int8"])
def test_long_prefills_take_the_largest_tile(format: str) -> None:
    tile = choose_tile(LinearProblem(n=6144, k=4096, format=format), "prefill", 4096, H100)
    assert (tile.block_m, tile.block_n, tile.num_warps) == (128, 256, 8)
    gated = choose_tile(LinearProblem(n=14336, k=4096, format=format, activation="silu"), "prefill", 8192, H100)
    assert (gated.block_m, gated.block_n) == (128, 128)


@pytest.mark.parametrize(("rows", "block_m"), [(1, 16), (16, 16), (17, 32), (64, 64), (200, 64)])
def test_decode_tiles_hold_the_rows(rows: int, block_m: int) -> None:
    """Weights are read once for up to 64 rows."""
    tile = choose_tile(LinearProblem(n=4096, k=4096, format="bf16"), "decode", rows, H100)
    assert tile.block_m == block_m


def test_int4_steps_are_pairs_of_groups() -> None:
    for table in load_tables().values():
        for name, entries in table.sections.items():
            if "int4" in name:
                group = int(name.split("int4g")[1].split(".")[0].removesuffix("_glu"))
                assert all(entry.tile.block_k % (2 * group) == 0 for entry in entries), name


def test_a_device_of_a_known_architecture_uses_the_most_alike_table() -> None:
    problem = LinearProblem(n=4096, k=4096, format="bf16")
    mine = DeviceFacts(
        arch="sm_89", num_processors=130, shared_memory_per_block_bytes=101376, memory_bandwidth_bytes_per_s=1.0e12
    )
    table = load_tables()["rtx4090"]
    assert choose_tile(problem, "decode", 16, mine) == table.find(problem, "decode", 16)


def test_an_unknown_architecture_uses_the_rule() -> None:
    facts = replace(
        H100, arch="sm_75", num_processors=40, shared_memory_per_block_bytes=65536, memory_bandwidth_bytes_per_s=3.2e11
    )
    problem = LinearProblem(n=4096, k=4096, format="int8")
    assert choose_tile(problem, "decode", 12, facts) == compute_tile(problem, "decode", 16, facts)
    with pytest.raises(TargetError, match="fits 1024 bytes"):
        choose_tile(problem, "decode", 12, replace(facts, shared_memory_per_block_bytes=1024))


def test_a_format_the_device_lacks_is_refused() -> None:
    facts = load_tables()["a100"].facts
    with pytest.raises(TargetError, match=r"no tiles \[decode.fp8.rows_16\] for sm_80"):
        choose_tile(LinearProblem(n=4096, k=4096, format="fp8"), "decode", 16, facts)


def test_tables_serve_sizes_beyond_their_last_class() -> None:
    table = load_tables()["h100"]
    problem = LinearProblem(n=400_000, k=40_000, format="bf16")
    assert table.find(problem, "decode", 1000) == table.sections[section_name(problem, "decode", 64)][-1].tile
    assert isinstance(table.find(problem, "prefill", 100_000), Tile)
