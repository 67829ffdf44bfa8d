"""The bench of RocksDB's options: it runs on the RocksDB that is installed, and leaves nothing behind."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from click.testing import CliRunner
from rocksdict import Rdict

from holdfast.benches.rocksdb_options import TABLES, main


@pytest.mark.parametrize("table", ["density", "reads", "life", "shards"])
def test_a_table_has_a_row_of_figures_for_each_variant(table: str, tmp_path: Path) -> None:
    """A way of reading or writing that fails shows here, and not when somebody asks for figures."""
    size = ["--keys", "3000", "--batch", "300", "--commits", "2", "--repeats", "1"]
    result = CliRunner().invoke(main, [table, *size, "--directory", str(tmp_path)], catch_exceptions=False)
    header, _, *rows = result.output.strip().splitlines()
    assert len(rows) == len(TABLES[table][1])
    for row in rows:
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        assert len(cells) == len(header.strip("|").split("|"))
        assert all(math.isfinite(float(cell)) for cell in cells[1:])
    assert list(tmp_path.iterdir()) == []


def test_rocksdb_takes_all_tunings(tmp_path: Path) -> None:
    """Each variant opens a database that reads back what was put: no option is refused, or means something else."""
    tunings = {tuning for _, variants in TABLES.values() for tuning, _ in variants.values()}
    for number, tuning in enumerate(tunings):
        database = Rdict(str(tmp_path / str(number)), tuning.options(*tuning.memory()))
        database[b"key"] = b"value"
        database.flush()
        assert database[b"key"] == b"value"
        database.close()
