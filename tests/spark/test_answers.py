"""Recorded answers: what is read is what was said, and a question that is another one is not answered."""

from __future__ import annotations

import contextlib
import datetime as dt
import importlib
import math
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyspark.errors
import pytest
from pyarrow import ipc
from pyspark.errors import AnalysisException, PySparkException, StreamingQueryException
from pyspark.sql import Row

from tests.spark import answers, questions
from tests.spark.answers import Answer, Batches, Book, Questions, essence, text_of
from tests.spark.parity import test_calls
from tests.spark.parity.scripts import EVENT_TIME, NO_TIMEOUT

HERE = Path(__file__)
ROWS: Batches = [
    [],
    [(None, 2**62 + 1, -0.0, math.nan, "ü'\n", b"\0", bytearray(b"a"))],
    [(dt.datetime(2026, 1, 2, 3, 4, 5, 6), dt.date(1, 1, 1), dt.timedelta(-1), Decimal("1.50"))],  # noqa: DTZ001
    [(Row(x=1, at=Row(y=[None, {"k": Row(z=1.5)}])), (1, None), True)],
]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Questions]:
    """Return a function that begins a run of a kind, in which a test of this module asks."""
    monkeypatch.setattr(answers, "FOLDER", tmp_path)

    def begun(*, records: bool = False, is_live: bool = False, digest: str = "of then") -> Questions:
        monkeypatch.setattr(answers, "RECORDS", records)
        monkeypatch.setattr(answers, "ALL", records or is_live)
        return Questions(Book(HERE), "test_it", digest)

    return begun


def recorded(run: Callable[..., Questions], *said: Callable[[], Batches]) -> None:
    asked = run(records=True)
    for say in said:
        with contextlib.suppress(PySparkException):
            asked.ask("spark", say)
    asked.book.write()


def fails() -> Batches:
    raise AnalysisException("[SOME_CONDITION.OF_IT] no: plan 1a2b3c4d-0000-1111-2222-333344445555, key#12")


def must_not_be_asked() -> Batches:
    raise AssertionError("was asked")


def test_rows_and_errors_come_back_as_they_were(run: Callable[..., Questions]) -> None:
    """Each value with its type, without Spark; an error with its class, one after the other."""
    recorded(run, lambda: ROWS, fails, list)
    asked = run()
    found = asked.ask("spark", must_not_be_asked)
    assert repr(found) == repr(ROWS)
    with pytest.raises(AnalysisException, match=r"^\[SOME_CONDITION.OF_IT\] no: plan UUID, key#N$"):
        asked.ask("spark", must_not_be_asked)
    assert asked.ask("spark", must_not_be_asked) == []


def test_what_is_not_recorded_fails(run: Callable[..., Questions]) -> None:
    """Another test, another engine, one question more, and source that has changed: each says what to do."""
    recorded(run, lambda: ROWS)
    again = f"make record SPARK={pyspark.__version__} ARGS=tests/spark/test_answers.py"
    with pytest.raises(AssertionError, match=f"'test_it spark 2' is not recorded; run: {again}"):
        [run().ask("spark", must_not_be_asked), (asked := run()).ask("spark", list), asked.ask("spark", list)]
    with pytest.raises(AssertionError, match=f"not recorded; run: {again}"):
        run().ask("spark-row", must_not_be_asked)
    with pytest.raises(AssertionError, match=f"'test_it spark 1' is another question .*; run: {again}"):
        run(digest="of now").ask("spark", must_not_be_asked)


def test_a_version_of_which_nothing_is_recorded_is_asked(
    run: Callable[..., Questions], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    begun = run()
    monkeypatch.setattr(answers, "FOLDER", tmp_path / "spark-5.0")
    assert begun.ask("spark", lambda: ROWS) is ROWS


def test_spark_that_says_otherwise_fails(run: Callable[..., Questions]) -> None:
    """In ``make test-all``: rows, order, types, and an error in the place of rows."""
    recorded(run, lambda: [[(1,), (2,)]], fails)
    assert run(is_live=True).ask("spark", lambda: [[(1,), (2,)]]) == [[(1,), (2,)]]
    for other in ([[(2,), (1,)]], [[(1,), (2.0,)]], [[(1,)], [(2,)]], []):
        with pytest.raises(AssertionError, match="not what is recorded"):
            run(is_live=True).ask("spark", lambda other=other: other)
    with pytest.raises(AssertionError, match="not what is recorded"):
        run(is_live=True).ask("spark", fails)


def test_a_record_is_the_same_each_time(run: Callable[..., Questions]) -> None:
    written = []
    for said in (ROWS, ROWS[::-1], ROWS):
        recorded(run, lambda said=said: said, fails)
        written.append(Book(HERE).path.read_bytes())
    assert written[0] == written[2] != written[1]


def test_what_is_kept_of_an_error() -> None:
    """The lines that say what is wrong, once, also of its causes; neither the JVM's stack nor what changes."""
    error = StreamingQueryException("File x\n    raise ValueError()\nValueError: no @1a2b3c4d\n\tat x.Error")
    lost = "Job aborted due to stage failure: Lost task 0.0 in stage 3.0 (TID 7) (10.0.0.1 executor driver): "
    error._stackTrace = f"ValueError: no @5e6f7a8b\nCaused by: {lost}x.y.ZException: [A_B] z\n\t\tat x.Error"  # type: ignore[attr-defined]
    kept = "ValueError: no @N\nCaused by: x.y.ZException: [A_B] z"
    assert essence(text_of(error)) == kept == essence(kept)
    [name, _, text] = (Answer.of_error(error).error or "").partition("\n")
    assert (name, text) == ("StreamingQueryException", kept)
    assert issubclass(getattr(pyspark.errors, name), PySparkException)


def test_a_digest_is_that_of_all_the_source_that_a_test_names() -> None:
    """Functions, constants, fixtures and what is imported; not what runs it."""
    texts = questions._reached(test_calls.__name__, "test_values_of_the_state")
    for part in ("defkeep_values(", "VALUES:dict[", "MOMENT=", "defnotes_of(", 'OUTPUT="keystring'):
        found = [text for text in texts if text.startswith(part)]
        assert len(found) == (part != 'OUTPUT="keystring'), part
    assert any(t.startswith("_COMMANDS") for t in questions._reached(test_calls.__name__, "test_frames"))
    assert not any(text.startswith("classTrial") for text in texts)


@pytest.mark.parametrize(
    ("changed", "is_another"),
    [
        ("N = 1\ndef test_it():\n    '''Says.'''\n    # why\n    return N", False),
        ("N = 1\nM = 2\n@decorated\ndef test_it() :\n    return (\n        N\n    )", True),
        ("N = 1\nM = 2\n@decorated\ndef test_it():\n    return N\n", False),
        ("N = 2\ndef test_it():\n    return N", True),
        ("N = 1\ndef test_it():\n    return -N", True),
        ("N = 1\ndef test_it(N):\n    return N", True),
    ],
)
def test_digests_differ(changed: str, is_another: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not with a docstring, a comment, a decorator or what another test names."""

    def digest_of(source: str) -> str:
        path = tmp_path / "module.py"
        path.write_text(source)
        monkeypatch.setattr(questions, "_path", lambda module: path)
        questions._source.cache_clear()
        try:
            return questions.digest(_in("tests.spark.parity.module", "test_it"))
        finally:
            questions._source.cache_clear()

    assert (digest_of(changed) != digest_of("N = 1\ndef test_it():\n    return N\n")) is is_another


def test_a_digest_changes_with_the_data() -> None:
    """The rows and commands of a script are data, not source."""
    [same, other] = [questions.digest(test_calls.test_frames, script) for script in (EVENT_TIME, NO_TIMEOUT)]
    assert same != other
    assert same == questions.digest(test_calls.test_frames, EVENT_TIME)


RECORDS = sorted(path.relative_to(answers.FOLDER.parent) for path in answers.FOLDER.parent.rglob("*.arrow"))


@pytest.mark.parametrize("path", RECORDS, ids=str)
def test_records_of_each_version_are_of_the_source_of_now(path: Path) -> None:
    """A test that has changed is recorded anew for each version: what is told without any Spark."""
    module = importlib.import_module(f"tests.spark.{'.'.join(path.with_suffix('').parts[1:])}")
    rows = ipc.open_file(answers.FOLDER.parent / path).read_all().select(["question", "digest"]).to_pylist()
    recorded = {(row["question"].partition(" ")[0].partition("[")[0], row["digest"]) for row in rows}
    of_now = {(name, questions.digest(getattr(module, name))) for name, _ in recorded if hasattr(module, name)}
    of_now |= {(script.name, questions.digest(_plays(module), script)) for script in getattr(module, "SCRIPTS", ())}
    if hasattr(module, "run_together"):
        of_now.add(("all", questions.digest(module.run_together)))
    assert recorded == of_now, f"make record for {path.parts[0]}"


def _plays(module: Any) -> Callable[..., Any]:
    return next(getattr(module, name) for name in ("play_on", "play_script") if hasattr(module, name))


def _in(module: str, name: str) -> Any:
    def function() -> None: ...

    function.__module__, function.__name__ = module, name
    return function
