"""The figure of README shows what RESULTS.md says."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.errors import InvalidArgumentError

pytest.importorskip("matplotlib")

from holdfast.benches.report import figure

ROOT = Path(__file__).parents[3]
RESULTS = (ROOT / figure.RESULTS).read_text()


def test_the_picture_is_what_the_tables_give() -> None:
    """After a new run: make figure."""
    assert figure.draw(RESULTS) == (ROOT / figure.PICTURE).read_text()


def test_throughput_is_read_from_its_section_only() -> None:
    results = "\n### a: one\n\n**Throughput**\n\n| engine | rows |\n|---|---:|\n| x | 1,234 | 1 |\n\n### b\n"
    assert figure.throughput(results, "a") == {"x": 1234}
    with pytest.raises(InvalidArgumentError, match="no table"):
        figure.throughput(results, "b")
    with pytest.raises(InvalidArgumentError, match="no table"):
        figure.throughput(results, "c")


def test_an_engine_without_a_row_is_named() -> None:
    with pytest.raises(InvalidArgumentError, match="holdfast-memory"):
        figure.draw(RESULTS.replace("| holdfast-memory |", "| other |"))
