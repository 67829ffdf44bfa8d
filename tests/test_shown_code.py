"""The code that the documents show runs as it stands, and gives what they say: what needs no Spark.

`tests/spark/queries/test_documents.py` runs the rest; `tests/test_pages.py` checks what can be checked without running.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from holdfast.backends.registry import find_backend
from holdfast.errors import InvalidArgumentError
from holdfast.snapshotter.storage.opening import open_storage
from holdfast.testing import BackendContract
from tests.pages import block_with, text
from tests.unit.snapshotter.savepoints.conftest import STATE, a_savepoint

BUILT_IN = ("memory", "filesystem", "rocksdb")


def test_the_embedded_store_of_the_guide_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    block = block_with("docs/operators.md", "VersionedStore")
    exec(block.replace("/tmp/shard", str(tmp_path / "shard")), {})
    assert "[1,2]" in re.sub(r"\s", "", capsys.readouterr().out)


def test_a_function_is_tested_as_the_guide_shows() -> None:
    names: dict[str, Any] = {}
    exec(block_with("docs/testing.md", "PandasWithStateTester"), names)
    names["test_a_user_who_has_left_is_counted"]()


def test_a_processor_is_tested_as_the_guide_shows() -> None:
    names: dict[str, Any] = {}
    exec(block_with("docs/testing.md", "TwsTester"), names)
    names["test_the_third_failure_is_reported_after_a_minute"]()
    names["test_failures_are_forgotten"]()


def test_the_guide_lists_every_option_with_its_default() -> None:
    rows = re.findall(
        r"^\| `spark\.holdfast\.(\w+)\.(\w+)` \| `?(\w[^`|]*?)`? \|", text("docs/backends.md"), re.MULTILINE
    )
    for name in BUILT_IN:
        with pytest.raises(InvalidArgumentError, match="unknown setting") as failure:
            find_backend(name).parse_options(name, {"zzzzzzzz": "1"})
        known = set(re.findall(rf"spark\.holdfast\.{name}\.(\w+)", str(failure.value))) - {"zzzzzzzz"}
        assert known == {option for backend, option, _ in rows if backend == name}
        defaults = {option: default for backend, option, default in rows if backend == name and default != "none"}
        assert find_backend(name).parse_options(name, defaults) == find_backend(name).parse_options(name, {})


@pytest.mark.slow(1)
def test_duckdb_and_polars_read_a_savepoint_as_the_guide_shows(tmp_path: Path) -> None:
    """Neither of them with code of ours; every row, whatever piece it is in."""
    with open_storage(str(tmp_path)) as target:
        a_savepoint(target, "before-upgrade", tables=(STATE,))
    names: dict[str, Any] = {}
    for part in ("savepoints.read(", "import duckdb"):
        exec(block_with("docs/savepoints.md", part).replace("/data/savepoints", str(tmp_path)), names)
    assert len(names["pieces"]) > 2
    expected = sorted((f"u{i}", i) for i in range(100) for _ in range(2))
    frame = names["in_polars"]
    assert sorted(frame.select("key.user", "value.n").rows()) == expected
    assert not frame["deleted"].any()
    assert [n for _, n in names["largest"].fetchall()] == [n for _, n in sorted(expected, key=lambda row: -row[1])[:10]]


def test_a_backend_of_ones_own_begins_as_the_guide_shows(tmp_path: Path) -> None:
    """The skeleton reads its options, and the suite runs on it: of a class without methods it says what lacks."""
    names: dict[str, Any] = {}
    exec(block_with("docs/backends.md", "class MyBackend"), names)
    exec(block_with("docs/backends.md", "class TestMyBackend"), names)
    parsed = names["MyBackend"].parse_options("mine", {"level": "fast", "cache": "1g"})
    assert parsed == {"level": "fast", "cache": 1 << 30}
    with pytest.raises(InvalidArgumentError, match="fast or small"):
        names["MyBackend"].parse_options("mine", {"level": "slow"})
    assert issubclass(names["TestMyBackend"], BackendContract)
    with pytest.raises(TypeError, match="abstract"):
        names["MyBackend"](tmp_path, {}, str)
