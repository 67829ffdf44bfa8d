from __future__ import annotations

import traceback

import pytest
from pyspark.errors import AnalysisException, PySparkValueError, PythonException, StreamingQueryException
from pyspark.sql import Row

import holdfast
from holdfast import errors
from holdfast.errors import ConflictError, HoldfastError, InvalidArgumentError, SchemaMismatchError, StateLostError
from holdfast.spark_integration.failures import explain


def add_up(amount: int) -> None:
    if amount < 0:
        raise ValueError(f"negative amount: {amount}")


LINE_OF_THE_RAISE = add_up.__code__.co_firstlineno + 2


def in_a_worker(error: Exception, *notes: str) -> str:
    """Return what a worker tells the driver of an error."""
    for note in notes:
        error.add_note(note)
    try:
        raise error
    except type(error):
        return traceback.format_exc()


def of_a_query(text: str) -> StreamingQueryException:
    """Return an exception with the worker's words in the middle of Spark's."""
    return StreamingQueryException(
        "[STREAM_FAILED] Query [id = 1, runId = 2] terminated with exception: Job aborted due to stage failure: Task 0 "
        "in stage 3.0 failed 1 times, most recent failure: Lost task 0.0 in stage 3.0 (TID 4) (host executor driver): "
        f"org.apache.spark.api.python.PythonException: {text}\n"
        "\tat org.apache.spark.api.python.BasePythonRunner$ReaderIterator.handlePythonException(PythonRunner.scala:7)\n"
        "\nDriver stacktrace: SQLSTATE: XXKST\n=== Streaming Query ===\nIdentifier: [id = 1]\n"
    )


def test_an_exception_of_the_users_function_names_its_line_the_operator_and_the_key() -> None:
    """Of a hundred lines of Spark's the five that help are kept."""
    try:
        add_up(-1)
    except ValueError as exc:
        exc.add_note("raised in operator 'totals' for key ('ann', 3)")
        exc.add_note("raised in operator 'totals', shard 4, micro-batch 7")
        text = traceback.format_exc()
    assert explain(of_a_query(text)) == (
        "what:        ValueError: negative amount: -1\n"
        "operator:    totals\n"
        "key:         ('ann', 3)\n"
        "micro-batch: 7\n"
        f"to do:       correct add_up (test_failures.py, line {LINE_OF_THE_RAISE}), and start the query again: nothing "
        "of this micro-batch was kept"
    )


def test_an_error_of_holdfast_names_the_shard_where_no_key_is_at_fault() -> None:
    text = in_a_worker(
        StateLostError("the commit that the query's pointer names is gone", version=8),
        "raised in operator 'totals', shard 4, micro-batch 7",
    )
    assert explain(of_a_query(text)).splitlines()[:4] == [
        "what:        StateLostError: the commit that the query's pointer names is gone, version=8",
        "operator:    totals",
        "shard:       4",
        "micro-batch: 7",
    ]


@pytest.mark.parametrize(
    "kind", [k for k in vars(errors).values() if isinstance(k, type) and issubclass(k, HoldfastError)]
)
def test_each_of_our_errors_says_what_to_do(kind: type[HoldfastError]) -> None:
    """None is without advice, wherever it was raised: in a worker, or at a definition."""
    for error in (of_a_query(in_a_worker(kind("it went wrong"))), kind("it went wrong")):
        lines = explain(error).splitlines()
        assert lines[0] == f"what:        {kind.__name__}: it went wrong"
        assert lines[-1].startswith("to do:       ")
        assert len(lines) <= 5


class _UnluckyError(Exception):
    """Of a class within a function, Python shows ``make.<locals>.UnluckyError``."""


_UnluckyError.__qualname__ = "make.<locals>.UnluckyError"


@pytest.mark.parametrize(
    ("error", "what"),
    [
        (_UnluckyError("no"), f"{__name__}.make.<locals>.UnluckyError: no"),
        (ExceptionGroup("two", [KeyError("a"), KeyError("b")]), "ExceptionGroup: two (2 sub-exceptions)"),
        (ValueError("first\n\nsecond"), "ValueError: first"),
        (PySparkValueError("Invalid return type"), "PySparkValueError: Invalid return type"),
        (ModuleNotFoundError("No module named 'holdfast.a'"), "ModuleNotFoundError: No module named 'holdfast.a'"),
        (ValueError("STATE_STORE_COMMIT_VALIDATION_FAILED is for batch 3"), "ValueError: STATE_STORE_COMMIT"),
    ],
)  # fmt: skip
def test_an_error_with_notes_is_the_cause_whatever_it_says(error: Exception, what: str) -> None:
    """Such an error was raised while the operator ran: no other part of the text says more."""
    text = in_a_worker(error, "raised in operator 'op' for key (1,)", "raised in operator 'op', shard 2, micro-batch 3")
    lines = explain(of_a_query(text)).splitlines()
    assert lines[0].startswith(f"what:        {what}")
    assert lines[1:4] == ["operator:    op", "key:         (1,)", "micro-batch: 3"]
    assert lines[4].startswith("to do:       correct in_a_worker (test_failures.py, line ")


def test_advice_does_not_contradict_the_message() -> None:
    """A conflict may be one of two operators in one query, and no other application runs it."""
    text = in_a_worker(ConflictError("pass each its own name="), "raised in operator 'op', shard 2, micro-batch 3")
    assert "to do:       do as the message says, and start the query again" in explain(of_a_query(text))


def test_an_error_outside_of_a_micro_batch_says_nothing_of_one() -> None:
    assert explain(KeyError("plain")) == "what:        KeyError: 'plain'"
    assert explain(InvalidArgumentError("no such backend")).splitlines()[-1] == "to do:       do as the message says"


def test_what_pyspark_raises_for_a_line_of_the_users_is_the_users() -> None:
    """A misspelt attribute of a `Row`, in foreachBatch: PySpark raises its error while it handles another."""

    def save() -> None:
        Row(n=1).total  # noqa: B018

    with pytest.raises(AttributeError) as caught:
        save()
    text = "".join(traceback.format_exception(caught.value))
    what, to_do = explain(
        of_a_query(f"An exception was raised by the Python Proxy. Return Message: {text}")
    ).splitlines()
    assert "Attribute" in what
    assert to_do.startswith("to do:       correct save (test_failures.py, line ")


def test_the_plan_in_an_error_of_an_analysis_is_left_out() -> None:
    error = AnalysisException("[UNRESOLVED_COLUMN] no such column. SQLSTATE: 42703;\n'Project ['nope]\n+- Range\n")
    assert explain(error) == "what:        AnalysisException: [UNRESOLVED_COLUMN] no such column."


def test_the_operator_of_an_error_at_a_definition_is_in_its_facts() -> None:
    assert "operator:    totals" in explain(SchemaMismatchError("columns differ", operator="totals")).splitlines()


def test_an_error_that_was_raised_at_a_definition_names_the_operator() -> None:
    """A processor's `init` runs there, and an exception of its own knows nothing of operators."""
    with pytest.raises(ValueError, match="negative") as caught:
        add_up(-1)
    caught.value.add_note("raised in operator 'totals', when it was defined")
    assert explain(caught.value) == (
        "what:        ValueError: negative amount: -1\n"
        "operator:    totals\n"
        f"to do:       correct add_up (test_failures.py, line {LINE_OF_THE_RAISE})"
    )


def test_an_error_within_another_is_found_where_it_is_indented() -> None:
    """An action in foreachBatch raises in a worker, then in the driver, then in Spark's thread."""
    inner = in_a_worker(InvalidArgumentError("no such column"), "raised in operator 'op', shard 1")
    outer = in_a_worker(PythonException("An exception was thrown from the Python worker:\n  " + "  ".join(
        inner.splitlines(keepends=True)
    )))  # fmt: skip
    assert explain(of_a_query(outer)).splitlines()[:3] == [
        "what:        InvalidArgumentError: no such column",
        "operator:    op",
        "shard:       1",
    ]


def test_of_java_only_the_innermost_cause_is_kept() -> None:
    """An error that is not ours is one line, and none of Spark's wrappings."""
    error = StreamingQueryException(
        "[STREAM_FAILED] Query [id = 1] terminated with exception: Exception thrown in awaitResult:  SQLSTATE: XXKST\n"
        "\nJVM stacktrace:\norg.apache.spark.sql.streaming.StreamingQueryException: Exception thrown in awaitResult: \n"
        "\tat org.apache.spark.sql.execution.streaming.StreamExecution.run(StreamExecution.scala:1)\n"
        "Caused by: org.apache.spark.SparkException: Exception thrown in awaitResult: \n\t... 1 more\n"
        "Caused by: java.io.IOException: No space left on device\n\tat java.base/java.io.FileOutputStream.write(X)\n"
    )
    assert explain(error) == "what:        IOException: No space left on device"
    assert explain(KeyError("plain")).splitlines()[0] == "what:        KeyError: 'plain'"


@pytest.mark.parametrize(
    ("said", "what", "to_do"),
    [
        ("[STATE_STORE_COMMIT_VALIDATION_FAILED] Validation failed for batch 12.", "limit", "count()"),
        ("python3: … (ModuleNotFoundError: No module named 'pyspark')", "lacks", "PYSPARK_PYTHON"),
        ("ModuleNotFoundError: No module named 'holdfast.backends'", "lacks", "PYSPARK_PYTHON"),
        ("[PYTHON_VERSION_MISMATCH] Python in worker has different version: 3.10", "version", "PYSPARK_PYTHON"),
        (
            '  File "/pyspark/worker.py", line 3, in main\n    load()\nModuleNotFoundError: No module named \'app\'',
            "comes from the module app",
            'spark.addArtifacts("app.py"',
        ),
        ("[CONCURRENT_STREAM_LOG_UPDATE] Concurrent update to the log. Multiple jobs", "another program", "stop one"),
        ("Multiple streaming queries are concurrently using file:/app/offsets.", "another program", "stop one"),
        ("Multiple applyInPandasWithStates are not supported on a stream;\n~Project", "Spark allows one", "processors"),
        (
            "Stateful operators in the metadata: [(0 -> one)]; Stateful operators in current batch: [(0 -> other)].",
            "it has (0 -> one), the query (0 -> other)",
            "stateStore.providerClass",
        ),
        ("[STREAMING_OUTPUT_MODE] Invalid streaming output mode: complete. This", "aggregations", '"update"'),
        (
            "Lost task 0.0 in stage 4.0 (TID 9): java.nio.channels.CancelledKeyException\n\tat java.base/sun.nio.ch.X",
            "from one task to the next",
            "local[*,4]",
        ),
        ("Could not serialize object: TypeError: cannot pickle '_thread.lock' object", "_thread.lock", "inside of"),
        ("'DataStreamWriter' object has no attribute 'awaitTermination'", "not started", ".start().awaitTermination"),
    ],
)  # fmt: skip
def test_what_spark_says_of_known_mistakes_gets_its_cause_and_its_cure(said: str, what: str, to_do: str) -> None:
    lines = explain(of_a_query(said)).splitlines()
    assert what in lines[0]
    assert to_do in lines[-1]


def test_a_module_that_the_program_itself_lacks_is_not_one_of_tasks() -> None:
    assert "task" not in explain(ModuleNotFoundError("No module named 'app'"))


def test_the_name_is_public() -> None:
    assert holdfast.explain is explain
