"""The code that the documents show runs as it stands, and gives what they say.

`tests/test_pages.py` checks what can be checked without running it.
"""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
import pytest

import holdfast
from holdfast.backends.registry import find_backend
from holdfast.errors import InvalidArgumentError
from holdfast.settings import Settings
from holdfast.testing import BackendContract

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROOT = Path(__file__).parents[2]
BUILT_IN = ("memory", "filesystem", "rocksdb")


def read(document: str) -> str:
    return (ROOT / document).read_text()


def python_blocks(document: str) -> list[str]:
    """Return the code that a document shows, also where it is indented as part of a list."""
    blocks = re.findall(r"^ *```python\n(.*?)^ *```", read(document), re.DOTALL | re.MULTILINE)
    return [textwrap.dedent(block) for block in blocks]


def block_with(document: str, text: str) -> str:
    (block,) = [block for block in python_blocks(document) if text in block]
    return block


@pytest.mark.spark
def test_the_quickstart_of_the_readme_gives_right_totals(spark: SparkSession, tmp_path: Path) -> None:
    """What a newcomer copies first works: a streaming query, its state and its output."""
    flights = spark.createDataFrame([("AA", 5.0), ("AA", 7.0), ("UA", None)], "carrier string, delay double")
    flights.coalesce(1).write.parquet(str(tmp_path / "flights"))
    stream = spark.readStream.schema(flights.schema).parquet(str(tmp_path / "flights"))
    (block,) = python_blocks("README.md")
    code = block.replace("/data/app", str(tmp_path / "app")).replace(
        '.format("console").start()', '.format("memory").queryName("quickstart").trigger(availableNow=True).start()'
    )
    names: dict[str, Any] = {"spark": spark, "flights": stream}
    try:
        exec(code, names)  # the document is ours
        for query in spark.streams.active:
            query.awaitTermination(120)
        rows = {tuple(row) for row in spark.table("quickstart").collect()}
    finally:
        spark.conf.unset("spark.holdfast.checkpoint.dir")
    assert rows == {("AA", 2, 7.0), ("UA", 1, None)}


@pytest.mark.spark
def test_the_function_by_key_of_the_guide_gives_right_totals(spark: SparkSession, tmp_path: Path) -> None:
    """What somebody copies who comes from Spark's own operator."""
    events = spark.createDataFrame([("ann", 5.0), ("ann", 7.0), ("bob", 1.0)], "user string, amount double")
    events.coalesce(1).write.parquet(str(tmp_path / "events"))
    names: dict[str, Any] = {"pd": pd, "holdfast": holdfast}
    names["df"] = spark.readStream.schema(events.schema).parquet(str(tmp_path / "events"))
    spark.conf.set("spark.holdfast.checkpoint.dir", str(tmp_path / "app"))
    try:
        exec(block_with("docs/operators.md", "def running("), names)  # the document is ours
        writer = names["out"].writeStream.outputMode("update").format("memory").queryName("by_key")
        location = str(tmp_path / "query")
        writer.option("checkpointLocation", location).trigger(availableNow=True).start().awaitTermination(120)
        rows = {tuple(row) for row in spark.table("by_key").collect()}
        reading = block_with("docs/operators.md", "read_state").replace("/data/app-spark", location)
        exec(reading.replace('"totals"', '"running"'), names | {"spark": spark}, names)
    finally:
        spark.conf.unset("spark.holdfast.checkpoint.dir")
    assert rows == {("ann", 2, 12.0), ("bob", 1, 1.0)}
    assert {row["user"]: row["n"] for row in names["table"].to_pylist()} == {"ann": 2, "bob": 1}


@pytest.mark.spark
def test_the_vectorised_operator_of_the_guide_runs(spark: SparkSession) -> None:
    """What a newcomer to vectorised operators copies: groups, state, a delete; on a batch DataFrame."""
    legs = [("N1", "BOS", 1), ("N1", "DCA", 2), ("N2", "ORD", 1)]
    names: dict[str, Any] = {"df": spark.createDataFrame(legs, "aircraft string, airport string, departed long")}
    exec(block_with("docs/operators.md", "def sessions("), names)  # the document is ours
    assert {tuple(row) for row in names["out"].collect()} == {("N1", 2, "DCA"), ("N2", 1, "ORD")}


def test_the_embedded_store_of_the_guide_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The store works without Spark as docs/operators.md shows it."""
    block = block_with("docs/operators.md", "VersionedStore")
    exec(block.replace("/tmp/shard", str(tmp_path / "shard")), {})
    assert "[1,2]" in re.sub(r"\s", "", capsys.readouterr().out)


def test_a_function_is_tested_as_the_guide_shows() -> None:
    """The test in docs/testing.md passes."""
    names: dict[str, Any] = {}
    exec(block_with("docs/testing.md", "PandasWithStateTester"), names)
    names["test_a_user_who_has_left_is_counted"]()


def test_the_walk_through_the_sessions_shows_what_runs() -> None:
    """docs/sessions.md shows the example's functions as they are, and what it tries out is so."""
    *shown, tried = python_blocks("docs/sessions.md")[:4]
    source = read("examples/flights/sessions.py")
    for block in [*shown, block_with("docs/sessions.md", "def add_delays")]:
        assert block.strip() in source
    exec(tried, {"pd": pd})


@pytest.mark.spark
@pytest.mark.parametrize("document", ["docs/backends.md", "examples/parquet_backend/README.md"])
def test_backends_are_chosen_as_the_guides_show(document: str, spark: SparkSession) -> None:
    """Names of backends and options in the guides are those that exist."""
    known = {"parquet": {"compression": "snappy"}, "rocksdb": {"memory": "1g"}}
    try:
        exec(block_with(document, '"spark.holdfast.backend"'), {"spark": spark})
        settings = Settings.parse(dict(spark.conf.getAll), known)
    finally:
        for name in dict(spark.conf.getAll):
            if name.startswith("spark.holdfast."):
                spark.conf.unset(name)
    assert settings.backend_options == known[settings.backend]


def test_the_guide_lists_every_option_with_its_default() -> None:
    """An option that a backend has stands in docs/backends.md, and no other does."""
    rows = re.findall(
        r"^\| `spark\.holdfast\.(\w+)\.(\w+)` \| `?(\w[^`|]*?)`? \|", read("docs/backends.md"), re.MULTILINE
    )
    for name in BUILT_IN:
        with pytest.raises(InvalidArgumentError, match="unknown setting") as failure:
            find_backend(name).parse_options(name, {"zzzzzzzz": "1"})
        known = set(re.findall(rf"spark\.holdfast\.{name}\.(\w+)", str(failure.value))) - {"zzzzzzzz"}
        assert known == {option for backend, option, _ in rows if backend == name}
        defaults = {option: default for backend, option, default in rows if backend == name and default != "none"}
        assert find_backend(name).parse_options(name, defaults) == find_backend(name).parse_options(name, {})


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
