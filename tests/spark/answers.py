"""What Spark's own operators answer, recorded once for each version of Spark.

To a question Spark answers the same each time. ``make record`` asks it, and writes its answers to
``tests/recorded/spark-4.3``: for each test module an Arrow file, with a row for each question::

    question   string               the test or script, who was asked, and how many questions came before
    digest     string               of the source of the question: `tests.spark.questions`
    batches    list<list<string>>   rows by micro-batch, each as Python spells it
    error      string               or the class of an error, and the lines of its text that say what is wrong

``make test`` compares with that, and fails where there is no answer or the digest is another. ``make test-all`` asks
Spark again, and fails where it does not say what is recorded. While answers are recorded, tests hold them against what
they expect, as always: if one of a module fails, nothing of that module is written. A module of which nothing
is recorded for a version of Spark asks it itself.
"""

from __future__ import annotations

import datetime as dt
import math
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa
import pyspark
import pyspark.errors
from pyarrow import ipc
from pyspark.errors import PySparkException
from pyspark.sql import Row

from holdfast.spark_integration.spark_versions import minor_version
from tests.tiers import ALL

#: Whether what Spark says in this run, which asks it all, becomes the record.
RECORDS = ALL and bool(os.environ.get("HOLDFAST_TEST_RECORD"))

Batches = list[list[tuple[Any, ...]]]
_HERE = Path(__file__).parent
FOLDER = _HERE.parent / "recorded" / "spark-{}.{}".format(*minor_version(pyspark.__version__))
_SCHEMA = pa.schema(
    [
        ("question", pa.string()),
        ("digest", pa.string()),
        ("batches", pa.list_(pa.list_(pa.string()))),
        ("error", pa.string()),
    ]
)
_NAMES = {"datetime": dt, "Decimal": Decimal, "Row": Row, "nan": math.nan, "inf": math.inf}


@dataclass(frozen=True)
class Answer:
    """Rows by micro-batch, or an error: as texts, which tell a NaN and a -0.0 from other numbers."""

    batches: list[list[str]] = field(default_factory=list)
    error: str | None = None

    @classmethod
    def of(cls, batches: Batches) -> Answer:
        return cls([[repr(tuple(row)) for row in rows] for rows in batches])

    @classmethod
    def of_error(cls, error: PySparkException) -> Answer:
        return cls(error=f"{type(error).__name__}\n{essence(text_of(error))}")

    def given(self) -> Batches:
        """Return the rows, or raise the error."""
        if self.error is not None:
            name, _, text = self.error.partition("\n")
            raise getattr(pyspark.errors, name)(text)
        return [[eval(row, dict(_NAMES)) for row in rows] for rows in self.batches]


def text_of(error: BaseException | None) -> str:
    """Return the texts of an error from the JVM and of its causes: what fails on the driver says why only there."""
    texts = []
    while error is not None:
        texts += [str(error), str(getattr(error, "_stackTrace", ""))]
        error = getattr(error, "_cause", None)
    return "\n".join(texts)


# Lines that name an error or its condition, unless they are a stack's, and in them what differs from run to run.
_SAYS_WHAT = re.compile(r"(Error|Exception)\b|\[[A-Z][A-Z0-9_.]+\]")
_OF_A_STACK = ("at ", "raise ", "Suppressed:")
_CHANGES = {
    r"Job aborted due to stage failure: .* executor \w+\): ": "",
    r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}": "UUID",
    r"(?<=#)\d+|(?<=@)[0-9a-f]{6,8}\b|(?<=localhost:)\d+": "N",
    r"(file:)?/[\w./-]*/pytest-[\w./-]*": "PATH",
}


def essence(text: str) -> str:
    """Return the lines of an error's text that say what is wrong, each once, without what differs from run to run."""
    lines = [line for line in map(str.strip, text.splitlines()) if _SAYS_WHAT.search(line)]
    text = "\n".join(line for line in lines if not line.startswith(_OF_A_STACK))
    for pattern, name in _CHANGES.items():
        text = re.sub(pattern, name, text)
    return "\n".join(dict.fromkeys(text.splitlines()))


class Book:
    """The recorded answers to the questions of a test module."""

    _open: ClassVar[dict[Path, Book]] = {}

    def __init__(self, module: Path) -> None:
        self.module = module
        self.path = FOLDER / module.relative_to(_HERE).with_suffix(".arrow")
        self.new: dict[str, tuple[str, Answer]] = {}
        self._found: dict[str, tuple[str, Answer]] = {}
        if self.path.exists() and not RECORDS:
            rows = ipc.open_file(self.path).read_all().to_pylist()
            self._found = {row["question"]: (row["digest"], Answer(row["batches"], row["error"])) for row in rows}

    @classmethod
    def of(cls, module: Path) -> Book:
        """Return the book of a test module, one for a run."""
        if module not in cls._open:
            cls._open[module] = cls(module)
        return cls._open[module]

    @classmethod
    def opened(cls) -> list[Book]:
        return list(cls._open.values())

    def write(self) -> None:
        """Write what has been recorded in this run in place of what was there."""
        if self.new:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            rows = [
                {"question": question, "digest": digest, "batches": answer.batches, "error": answer.error}
                for question, (digest, answer) in sorted(self.new.items())
            ]
            table = pa.Table.from_pylist(rows, _SCHEMA)
            with ipc.new_file(self.path, _SCHEMA, options=ipc.IpcWriteOptions(compression="zstd")) as file:
                file.write_table(table)

    def answer(self, question: str, digest: str) -> Answer:
        again = f"run: make record SPARK={pyspark.__version__} ARGS=tests/spark/{self.module.relative_to(_HERE)}"
        if question not in self._found:
            raise AssertionError(f"Spark's answer to {question!r} is not recorded; {again}")
        recorded_for, answer = self._found[question]
        if recorded_for != digest:
            raise AssertionError(f"{question!r} is another question than the one whose answer is recorded; {again}")
        return answer


@dataclass
class Questions:
    """What one test or script asks, one after the other."""

    book: Book
    name: str
    digest: str
    _asked: dict[str, int] = field(default_factory=dict)

    def ask(self, engine: str, ask: Callable[[], Batches]) -> Batches:
        """Return what an engine of Spark answers, or raise its error: as recorded, unless this run is to ask it."""
        self._asked[engine] = number = self._asked.get(engine, 0) + 1
        question = f"{self.name} {engine} {number}"
        if self.book.path.exists() and not ALL:
            return self.book.answer(question, self.digest).given()
        try:
            batches = ask()
        except PySparkException as exc:
            self._heard(question, Answer.of_error(exc))
            raise
        self._heard(question, Answer.of(batches))
        return batches

    def _heard(self, question: str, answer: Answer) -> None:
        if RECORDS:
            self.book.new[question] = self.digest, answer
        elif self.book.path.exists():
            assert answer == self.book.answer(question, self.digest), f"{question!r}: not what is recorded"
