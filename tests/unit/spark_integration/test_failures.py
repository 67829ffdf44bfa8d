"""Why a query failed, in words; the metrics of its progress; and when a strategy starts it again."""

from __future__ import annotations

import pickle
import re
import socket
import traceback
from collections.abc import Callable

import pytest
from py4j.clientserver import JavaClient, JavaParameters, PythonParameters
from py4j.java_gateway import GatewayProperty
from pyspark.errors import AnalysisException, PySparkValueError, PythonException, StreamingQueryException
from pyspark.sql import Row

import holdfast
from holdfast import errors, restart
from holdfast.errors import ConflictError, HoldfastError, InvalidArgumentError, SchemaMismatchError, StateLostError
from holdfast.spark_integration.client.measures import METRICS, of_group
from holdfast.spark_integration.failures import explain, is_transient
from holdfast.spark_integration.progress_metrics import by_name
from holdfast.spark_integration.restarting import FAILURES_MAX, Exponential
from holdfast.spark_integration.transport.output import is_observed
from tests.servers.programs import free_ports
from tests.source_tree import ROOT


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
    lost = StateLostError("the commit that the query's pointer names is gone", version=8)
    text = in_a_worker(lost, "raised in operator 'totals', shard 4, micro-batch 7")
    what, *where, _ = explain(of_a_query(text)).splitlines()
    assert what == "what:        StateLostError: the commit that the query's pointer names is gone, version=8"
    assert where == ["operator:    totals", "shard:       4", "micro-batch: 7"]


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


def test_an_error_before_the_shuffle_names_the_operator_and_the_micro_batch() -> None:
    """There an aggregate's own functions run, and no shard is known."""
    text = in_a_worker(ValueError("negative"), "raised in operator 'agg', before the shuffle, micro-batch 7")
    *lines, to_do = explain(of_a_query(text)).splitlines()
    assert lines == ["what:        ValueError: negative", "operator:    agg", "micro-batch: 7"]
    assert to_do.endswith("start the query again: nothing of this micro-batch was kept")


def test_advice_does_not_contradict_the_message() -> None:
    """A conflict may be one of two operators in one query, and no other application runs it."""
    text = in_a_worker(ConflictError("pass each its own name="), "raised in operator 'op', shard 2, micro-batch 3")
    assert "to do:       do as the message says, and start the query again" in explain(of_a_query(text))


def test_an_error_outside_of_a_micro_batch_says_nothing_of_one() -> None:
    """Nor of a task: there a module is missing in the program itself."""
    assert explain(KeyError("plain")) == "what:        KeyError: 'plain'"
    assert explain(InvalidArgumentError("no such backend")).splitlines()[-1] == "to do:       do as the message says"
    assert "task" not in explain(ModuleNotFoundError("No module named 'app'"))


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


def test_an_error_that_was_raised_at_a_definition_names_the_operator() -> None:
    """Ours has it in its facts; a processor's `init` runs there, too, and its own exception has a note."""
    assert "operator:    totals" in explain(SchemaMismatchError("columns differ", operator="totals")).splitlines()
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
    expected = ["what:        InvalidArgumentError: no such column", "operator:    op", "shard:       1"]
    assert explain(of_a_query(outer)).splitlines()[:3] == expected


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


@pytest.mark.parametrize(
    ("said", "what", "to_do"),
    [
        ("[STATE_STORE_COMMIT_VALIDATION_FAILED] Validation failed for batch 12.", "limit", "count()"),
        ("java.io.FileNotFoundException: File file:/app-spark/state/0/1/12.delta does not exist",
         "foreachBatch read only a part", "delete the newest file of commits/"),
        ("python3: … (ModuleNotFoundError: No module named 'pyspark')", "lacks", "PYSPARK_PYTHON"),
        ("ModuleNotFoundError: No module named 'holdfast.backends'", "lacks", "PYSPARK_PYTHON"),
        ("[PYTHON_VERSION_MISMATCH] Python in worker has different version: 3.10", "version", "PYSPARK_PYTHON"),
        ('  File "/pyspark/worker.py", line 3, in main\n    load()\nModuleNotFoundError: No module named \'app\'',
         "comes from the module app", 'spark.addArtifacts("app.py"'),
        ("[CONCURRENT_STREAM_LOG_UPDATE] Concurrent update to the log. Multiple jobs", "another program", "stop one"),
        ("Multiple streaming queries are concurrently using file:/app/offsets.", "another program", "stop one"),
        ("Multiple applyInPandasWithStates are not supported on a stream;\n~Project", "Spark allows one", "processors"),
        ("Stateful operators in the metadata: [(0 -> one)]; Stateful operators in current batch: [(0 -> other)].",
         "it has (0 -> one), the query (0 -> other)", "stateStore.providerClass"),
        ("[STREAMING_OUTPUT_MODE] Invalid streaming output mode: complete. This", "aggregations", '"update"'),
        ("Lost task 0.0 in stage 4.0 (TID 9): java.nio.channels.CancelledKeyException\n\tat java.base/sun.nio.ch.X",
         "from one task to the next", "local[*,4]"),
        ("[DATA_SOURCE_NOT_FOUND] Failed to find the data source: holdfast-parquet. Make sure the provider name is",
         "the format holdfast-parquet in the Python", "holdfast.register(spark)"),
        ("Could not serialize object: TypeError: cannot pickle '_thread.lock' object", "_thread.lock", "inside the"),
        ("'DataStreamWriter' object has no attribute 'awaitTermination'", "not started", ".start().awaitTermination"),
    ],
)  # fmt: skip
def test_what_spark_says_of_known_mistakes_gets_its_cause_and_its_cure(said: str, what: str, to_do: str) -> None:
    lines = explain(of_a_query(said)).splitlines()
    assert what in lines[0]
    assert to_do in lines[-1]


def test_metrics_have_the_same_names_everywhere() -> None:
    columns = [{"name": name, "type": "long", "nullable": True, "metadata": {}} for name in ("shards", "rows")]
    over_connect = Row(values=[2, None], schema={"type": "struct", "fields": columns})
    assert by_name(over_connect) == by_name(Row(shards=2, rows=None)) == {"shards": 2, "rows": None}


def test_what_a_state_server_remembers_has_the_same_names_and_units() -> None:
    """What it does not know is null, not zero."""
    values = {"rows": 5, "call_us": 1_500_000, "snapshot_lag_versions": 3, "of a later release": 7}
    found = of_group(2, values)
    assert list(found) == [metric.name for metric in METRICS]
    known = {name: value for name, value in found.items() if value is not None}
    assert known == {"shards": 2, "rows": 5, "call_seconds": 1.5, "snapshot_lag_versions_max": 3}


def test_the_document_explains_each_metric_in_order() -> None:
    rows = re.findall(r"^\| (`.*?`) \|", (ROOT / "docs/metrics.md").read_text(), re.MULTILINE)
    assert re.findall(r"`(\w+)`", " ".join(rows)) == [metric.name for metric in METRICS]


def test_what_others_observe_is_not_ours() -> None:
    """A user may observe something under a name that begins as ours do."""
    assert is_observed({metric.name: 1 for metric in METRICS} | {"more": 1})
    assert not is_observed(by_name(Row(rows=3, shards=1)))
    assert not is_observed(by_name(None))


EVEN = lambda: 0.5  # noqa: E731


@pytest.mark.parametrize(
    ("strategy", "failures_s", "told"),
    [
        (restart.fixed_delay(2, 7), [0, 100, 9000], [7, 7, None]),
        (restart.fixed_delay(0), [0], [None]),
        (restart.failure_rate(2, 10, 1), [0, 9, 18, 27, 28], [1, 1, 1, 1, None]),
        (Exponential(1, 5, 2, 60, 0, None, EVEN), [0, 10, 20, 30, 40, 101, 110], [1, 2, 4, 5, 5, 1, 2]),
        (Exponential(1, 5, 2, 60, 0, 2, EVEN), [0, 1, 2, 90], [1, 2, None, 1]),
    ],
    ids=["fixed", "none", "rate", "exponential", "exponential that ends"],
)
def test_a_strategy_says_when_to_start_again(
    strategy: restart.RestartStrategy, failures_s: list[float], told: list[float | None]
) -> None:
    """Or no more: after its attempts, or where failures are dense. A longer delay begins anew when it was quiet."""
    assert [strategy.delay_s(failures_s[: i + 1]) for i in range(len(failures_s))] == told


@pytest.mark.parametrize("make", [restart.fixed_delay, restart.exponential, restart.failure_rate])
def test_a_strategy_is_a_value(make: Callable[[], restart.RestartStrategy]) -> None:
    """It compares, and travels in the pickle of a program's settings."""
    assert pickle.loads(pickle.dumps(make())) == make()


def test_an_exponential_delay_of_many_failures_is_its_longest() -> None:
    """However often it was doubled, it is a number."""
    assert Exponential(1, 5, 2, 60, 0, None, EVEN).delay_s([float(i) for i in range(FAILURES_MAX)]) == 5


def test_the_delay_is_off_by_the_jitter_at_most() -> None:
    """Many queries that lose one server do not all come back in the same second."""
    assert Exponential(10, 10, 1, 60, 0.2, None, lambda: 0.0).delay_s([0]) == pytest.approx(8)
    assert Exponential(10, 10, 1, 60, 0.2, None, lambda: 1.0).delay_s([0]) == pytest.approx(12)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: restart.fixed_delay(-1), "attempts"),
        (lambda: restart.fixed_delay(FAILURES_MAX), "attempts"),
        (lambda: restart.exponential(5, 1), "longest_s"),
        (lambda: restart.exponential(factor=0.5), "factor"),
        (lambda: restart.exponential(jitter=2), "jitter"),
        (lambda: restart.failure_rate(delay_s=float("nan")), "delay_s"),
    ],
)
def test_a_number_that_cannot_be_is_named(make: object, name: str) -> None:
    assert callable(make)
    with pytest.raises(InvalidArgumentError, match=name):
        make()


@pytest.mark.parametrize(
    "error",
    [
        errors.UnavailableError("the storage did not answer"),
        ConnectionResetError("by peer"),
        RuntimeError("Job aborted due to stage failure: ExecutorLostFailure (executor 3 exited caused by …)"),
        RuntimeError("org.apache.spark.SparkException: Python worker exited unexpectedly (crashed)"),
        RuntimeError("Caused by: java.net.ConnectException: Connection refused"),
        RuntimeError("Lost task 0.0 in stage 4.0 (TID 9): java.nio.channels.CancelledKeyException\n\tat java.base/X"),
        RuntimeError("org.apache.kafka.common.errors.TimeoutException: Topic not present in metadata after 60000 ms."),
    ],
)
def test_a_lost_machine_process_or_network_is_transient(error: Exception) -> None:
    assert is_transient(error)


@pytest.mark.parametrize(
    "error",
    [
        errors.StateLostError("gone"),
        errors.FencedError("a newer run"),
        errors.InvalidArgumentError("no"),
        RuntimeError("java.lang.IllegalStateException: something else"),
        ValueError("negative amount: java.net.ConnectException"),
    ],
)
def test_a_lasting_error_is_not_transient(error: Exception) -> None:
    """A newer run that has taken over must not be started against, and a function does not mend itself."""
    with pytest.raises(type(error)) as caught:  # with its traceback, as a query's
        raise error
    assert not is_transient(caught.value)


def test_a_start_that_returns_no_query_is_told_so() -> None:
    """As one whose last line lacks its return, or ``.start()``."""
    with pytest.raises(InvalidArgumentError, match=r"start must return the query .* given=NoneType"):
        holdfast.run(lambda: None)  # type: ignore[arg-type, return-value]


def test_a_lost_jvm_is_not_transient() -> None:
    """Without it no start in this process can succeed; whoever started the process must start it again."""
    (port,) = free_ports(1)
    client = JavaClient(JavaParameters(port=port), PythonParameters(), GatewayProperty(True, None))
    with pytest.raises(ConnectionRefusedError) as caught:  # what PySpark raises then
        client.send_command("a command")
    assert not is_transient(caught.value)
    with pytest.raises(ConnectionRefusedError) as caught:
        socket.create_connection(("127.0.0.1", port))
    assert is_transient(caught.value), "any other connection may come back"
