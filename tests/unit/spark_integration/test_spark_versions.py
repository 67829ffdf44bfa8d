"""What differs between Spark's versions stands in one module, and what that uses of Spark is there."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest
from pyspark.sql.types import LongType, StringType, StructType

from holdfast.errors import InvalidArgumentError
from holdfast.spark_integration import spark_versions
from holdfast.spark_integration.keyed.frames import FrameFormat
from holdfast.spark_integration.plan.session import name_folding

pytestmark = pytest.mark.smoke

ROOT = Path(__file__).parents[3]


@functools.cache
def nodes() -> list[tuple[str, ast.AST]]:
    """Return all attributes and imports of our modules, each with the path of its module."""
    folders = ("backends", "benches", "examples", "holdfast", "mvcc", "snapshotter", "spark_integration")
    return [
        (path.relative_to(ROOT).as_posix(), node)
        for folder in folders
        for path in (ROOT / folder).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute | ast.ImportFrom)
    ]


@pytest.mark.slow(1)
def test_no_other_module_asks_for_the_version_of_spark() -> None:
    """Else what differs is found in many places, and a new version is a search."""
    asking = [
        f"{path}:{node.lineno}"
        for path, node in nodes()
        if isinstance(node, ast.Attribute)
        # To unparse each takes seconds.
        and node.attr in {"__version__", "version"}
        and ast.unparse(node).endswith(
            ("pyspark.__version__", "spark.version", "session.version", "sparkSession.version")
        )
    ]
    assert {line.rpartition(":")[0] for line in asking} == {"spark_integration/spark_versions.py"}, asking


def too_old(version: str) -> str:
    return f"holdfast needs PySpark 4.0 or newer, but this is {version}: pip install --upgrade 'pyspark>=4'"


@pytest.mark.parametrize("version", ["3.5.9", "3.4.0", "2.4.8"])
def test_a_spark_that_is_too_old_is_refused_by_name(version: str) -> None:
    with pytest.raises(ImportError, match=f"^{re.escape(too_old(version))}$"):
        spark_versions.require_supported(version)


@pytest.mark.slow(1)
def test_a_spark_that_is_too_old_is_refused_before_anything_is_imported_of_it() -> None:
    """Else the first import of something that it lacks fails, by a name that tells the user nothing."""
    code = "import pyspark; pyspark.__version__ = '3.5.9'; import holdfast; holdfast.stream"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.splitlines()[-1] == f"ImportError: {too_old('3.5.9')}"


def test_java_follows_spark() -> None:
    """A Java that Spark does not know fails in its first query, by an error of the JVM."""
    assert spark_versions.java_versions("4.0.5") == {17, 21}
    assert spark_versions.java_versions("4.1.1") == {17, 21}
    assert spark_versions.java_versions("4.2.0") == {17, 21, 25}
    assert spark_versions.java_versions("5.0.0.dev1") == {17, 21, 25}


@pytest.mark.parametrize(
    ("spark", "arrow", "fits"),
    [
        ("4.0.0", "25.0.1", True),
        ("4.0.4", "26.0.0", False),
        ("4.0.5", "26.0.1", True),
        ("4.1.0", "26.0.1", False),
        ("4.1.3.dev2", "27.1.0", False),
        ("4.1.4", "26.0.1", True),
        ("4.2.0", "26.0.1", True),
        ("5.0.0.dev1", "30.0.0", True),
    ],
)
def test_a_pyarrow_on_which_spark_fails_is_refused(spark: str, arrow: str, fits: bool) -> None:
    """Spark's worker else dies in the first micro-batch, of a float that should be an integer; seen on 4.0.0."""
    if fits:
        spark_versions.require_fitting_arrow(arrow, spark)
        return
    with pytest.raises(InvalidArgumentError, match=rf"Spark {spark} .*pyarrow {arrow}: install 'pyarrow<26'"):
        spark_versions.require_fitting_arrow(arrow, spark)


def test_processors_over_connect_are_refused_before_spark_4_1() -> None:
    """Spark 4.0 has nothing there to run them in: else an attribute was missing."""
    with pytest.raises(InvalidArgumentError, match=r"need Spark 4\.1: use a classic session"):
        spark_versions.require_host_of_processors(classic=False, version="4.0.5")
    spark_versions.require_host_of_processors(classic=True, version="4.0.5")
    spark_versions.require_host_of_processors(classic=False, version="4.1.0")


@pytest.mark.parametrize("expected", ["str", "StructType or str"])
def test_a_wrong_argument_is_an_error_of_this_spark(expected: str) -> None:
    """Conditions differ by version, and one that a Spark does not know is a ValueError."""
    error = spark_versions.wrong_type("outputMode", expected, None)
    assert "`outputMode` should be" in str(error)
    assert "str" in str(error)
    assert "NoneType" in str(error)


def test_spark_4_0_tells_the_number_of_partitions_in_its_own_thread_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """There it stands in a setting that every session has: believed elsewhere, it would fail queries that are right."""
    told = {"spark.sql.shuffle.partitions": "7", "spark.sql.streaming.internal.stateStore.partitions": "3"}

    def partitions(version: tuple[int, int], *, in_sparks_thread: bool) -> int | None:
        monkeypatch.setattr(spark_versions, "_SPARK", version)
        return spark_versions.state_partitions(lambda name: told.get(name, ""), in_sparks_thread=in_sparks_thread)

    assert partitions((4, 0), in_sparks_thread=True) == 7
    assert partitions((4, 0), in_sparks_thread=False) is None
    assert partitions((4, 1), in_sparks_thread=False) == 3


#: Of these no name is public.
PRIVATE = {"pyspark.sql.conversion", "pyspark.sql.pandas.types", "pyspark.sql.pandas.serializers"}


@pytest.mark.slow(1)
def test_no_other_module_converts_frames_by_private_names() -> None:
    """Else another release of Spark fails in many places."""
    using = {
        path
        for path, node in nodes()
        if isinstance(node, ast.ImportFrom)
        and PRIVATE & {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    }
    assert using == {"spark_integration/spark_versions.py"}


def test_frames_are_converted_as_spark_s_worker_does() -> None:
    """The same names could convert otherwise in another release."""
    batch = pa.RecordBatch.from_pydict({"n": [1, 2], "s": ["a", None]})
    n, s = spark_versions.arrow_to_pandas(batch, "UTC", prefer_int_ext_dtype=False)
    assert (n.name, n.dtype, n.tolist(), s.name, s.tolist()) == ("n", "int64", [1, 2], "s", ["a", None])
    columns = [pd.Series([1, 2]), pd.Series(["a", None])]
    back = spark_versions.pandas_to_arrow(columns, StructType().add("n", LongType()).add("s", StringType()), "UTC")
    assert back.to_pydict() == batch.to_pydict()


@pytest.mark.parametrize(("given", "is_on"), [("true", True), ("True", True), (" TRUE ", True), ("False", False)])
def test_what_is_on_for_spark_is_on_here(given: str, is_on: bool) -> None:
    """A session returns a setting as it was given, and Python writes ``True``.

    Were it off here, output would overflow without a word, its columns would go by position, and ``A`` would be ``a``.
    """
    settings = {"spark.sql.session.timeZone": "UTC"}
    session: Any = SimpleNamespace(conf=SimpleNamespace(get=lambda name, *_: settings.get(name, given)))
    found = FrameFormat.of_session(session)
    assert (found.safecheck, found.assign_cols_by_name) == (is_on, is_on)
    frame: Any = SimpleNamespace(sparkSession=session)
    assert name_folding(frame)("A") == ("A" if is_on else "a")
