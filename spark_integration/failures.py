"""Explain in a few lines why a query failed; Spark's exceptions take a hundred.

::

    StreamingQueryException            Spark's message, then the Java cause
      └── PythonException              the worker's traceback ──▶ the error, its notes, the user's line
            └── StateLostError: …      raised in operator 'totals', shard 3, micro-batch 7

A worker's error arrives as text, on classic Spark and Spark Connect, so this module reads text.
"""

from __future__ import annotations

import importlib.util
import re
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType

from holdfast import errors
from holdfast.errors import HoldfastError, InvalidArgumentError
from holdfast.spark_integration.spark_versions import java_stack

_TRACEBACK = "Traceback (most recent call last):"
_GROUP = f"+ Exception Group {_TRACEBACK}"
_FRAME = re.compile(r'  File "(?P<path>[^"]+)", line (?P<line>\d+), in (?P<function>.+)')
_RAISED = re.compile(r"(?P<name>[^\W\d][\w.<>]*)(?:: (?P<message>.*))?$", re.DOTALL)
_NOTE_OF_KEY = re.compile(r"raised in operator (?P<operator>'.*'|\".*\") for key (?P<key>\(.*\))")
_NOTE_OF_PLACE = re.compile(
    r"raised in operator (?P<operator>'.*'|\".*\"), (?:shard (?P<shard>\d+)|before the shuffle)"
    r"(?:, micro-batch (?P<batch>\d+))?"
)
_NOTE_OF_DEFINITION = re.compile(r"raised in operator (?P<operator>'.*'|\".*\"), when it was defined")
_NOT_USER_CODE = (
    "/python/pyspark/",
    "/pyspark.zip/",
    "/py4j",
    "/site-packages/",
    "/dist-packages/",
    "/lib/python3",
    "<frozen",
    ".pxi",
    ".pyx",
)
_ENDS_A_MESSAGE = re.compile(
    r"\s*at [\w.$/@]+\(|Driver stacktrace:|=== Streaming Query ===|JVM stacktrace:|Caused by: | SQLSTATE:|  \+-"
)
_JAVA = re.compile(r"(?:^|\s)((?:[a-z_][\w$]*\.){2,}[A-Z][\w$]*(?:Exception|Error)): (.+)")
_CAUSED_BY = re.compile(r"^Caused by: ((?:[\w$]+\.)+[\w$]+): (.+)$", re.MULTILINE)
_UNINFORMATIVE = (
    "Exception thrown in awaitResult:",
    "Full stacktrace of original",
    "raised by the Python Proxy",
    "thrown from the Python worker",
)
#: Names of errors that wrap others; PySpark's own Python errors are in ``pyspark.errors.exceptions.base``.
_WRAPPERS = (
    "pyspark.errors.exceptions.captured.",
    "pyspark.errors.exceptions.connect.",
    "pyspark.errors.exceptions.base.StreamingQueryException",
    "py4j.",
    "grpc.",
)
#: Transient Python errors, by the last part of the name, such as ``requests.exceptions.ConnectionError``.
_TRANSIENT_ERRORS = {
    *("ConnectionError", "ConnectionResetError", "ConnectionRefusedError", "ConnectionAbortedError", "BrokenPipeError"),
    *("TimeoutError", "EndpointConnectionError", "ReadTimeoutError", "ConnectTimeoutError"),
}
#: Phrases of Spark and Java for a lost machine, process or network.
_TRANSIENT_WORDS = re.compile(
    r"ExecutorLostFailure|FetchFailedException|MetadataFetchFailed"
    r"|Python worker (?:exited unexpectedly|failed to connect)"
    r"|java\.net\.(?:Connect|Socket|SocketTimeout|UnknownHost|NoRouteToHost)Exception"
    r"|java\.nio\.channels\.CancelledKeyException"
    r"|java\.util\.concurrent\.TimeoutException|RpcTimeoutException|SdkClientException|StatusCode\.UNAVAILABLE"
    r"|org\.apache\.kafka\.common\.errors\.(?:Timeout|Disconnect|Network|NotLeaderOrFollower|LeaderNotAvailable"
    r"|BrokerNotAvailable|CoordinatorNotAvailable|CoordinatorLoadInProgress)Exception"
)
_SQL_STATE = re.compile(r"(?:\s*SQLSTATE: \w{5})+(?:;\n.*|\s*)$", re.DOTALL)
_OPERATOR_FACT = re.compile(r"\boperator=('[^']*'|\S+)")

_RESTART = "start the query again: nothing of this micro-batch was kept"
_REPEAT = (
    "Spark has logged the micro-batch as committed, though: to run it again, before the next start, delete the newest "
    "file of commits/ in the checkpointLocation, files of offsets/ with later numbers, and the .crc files of both"
)
#: What to do about errors whose message does not say it.
_WHAT_TO_DO = {
    errors.UnavailableError: "bring back the service that did not answer, and start the query again: nothing is lost",
    errors.StateLostError: "set the query's original state directory and checkpoint location, or restore the missing "
    "objects; else go back to an earlier micro-batch (docs/operations.md), or, if the query began without a state "
    "directory, start over at a new checkpoint location",
    errors.CorruptionError: "run `holdfast verify` to list all damaged objects; restore them, or go back to an "
    "earlier micro-batch (docs/operations.md)",
}


@dataclass(frozen=True)
class _Cause:
    """A failure that Spark raises outside holdfast's code; `pattern` matches it and may have a group ``batch``."""

    pattern: re.Pattern[str]
    what: str
    to_do: str


_CAUSES = (
    _Cause(
        re.compile(r"STATE_STORE_COMMIT_VALIDATION_FAILED\S* .*? for batch (?P<batch>\d+)"),
        "foreachBatch read only a part of the micro-batch, as limit, first and show do, or no rows, so that some "
        "partitions did not commit their state, which Spark requires",
        "read all rows in foreachBatch: with count() or collect(), or with rows.persist() and an action over all rows "
        f"before one over a part. {_REPEAT}",
    ),
    _Cause(
        # By the state store: FileNotFoundException or CANNOT_LOAD_STATE_STORE.
        re.compile(r"state/\d+/\d+/(?:[\w-]+/)?\d+\.(?:delta|changelog|zip) does not exist"),
        "Spark's own state store lacks a file of the last micro-batch: foreachBatch read only a part of it, as limit, "
        "first and show do, or files of the checkpointLocation were deleted",
        f"read all rows in foreachBatch, for example with count() or collect(). {_REPEAT}",
    ),
    _Cause(
        re.compile(r"No module named '(?:pyspark|holdfast|pandas|pyarrow|numpy)\b"),
        "Spark runs tasks in a Python that lacks a package of this program",
        "before the session starts, set the environment variable PYSPARK_PYTHON to an interpreter with the package; on "
        "a cluster, one that exists on every executor (docs/deploy.md)",
    ),
    _Cause(
        re.compile(
            r"applyInPandasWithState in (?P<defined>\w+) mode is not supported with (?P<started>\w+) output mode"
        ),
        r"the query was started in output mode \g<started>, but its operator was defined for \g<defined>",
        r'add .outputMode("\g<defined>") to its writeStream (the default is append), or define the operator for '
        "the other mode",
    ),
    _Cause(
        # Unpickling the function in a task; errors of the function's own imports have notes.
        re.compile(r"/worker\.py\", line .*?ModuleNotFoundError: No module named '(?P<module>\w+)", re.DOTALL),
        r"the function comes from the module \g<module>, which Spark's tasks cannot import",
        r'send it with spark.addArtifacts("\g<module>.py", pyfile=True) or spark-submit --py-files, or install it on '
        "the executors",
    ),
    _Cause(
        # Spark's commit and offset logs have different messages.
        re.compile(r"CONCURRENT_STREAM_LOG_UPDATE|Multiple streaming queries are concurrently using"),
        "another program runs a query on the same checkpointLocation, and has planned or committed this micro-batch",
        "stop one of the two; a second query needs its own checkpointLocation (holdfast clone)",
    ),
    _Cause(
        re.compile(r"'GroupedData' object has no attribute '(?P<method>applyInArrowWithState|transformWithState\w*)'"),
        r"\g<method> was called on Spark's own groupBy",
        r"start from holdfast.stream: holdfast.stream(df).groupBy(…).\g<method>(…)",
    ),
    _Cause(
        # Spark's error with metrics in the progress; without them, holdfast raises its own in the first micro-batch.
        re.compile(r"The metric name is not unique: `?holdfast`?\.`?(?P<operator>[\w.-]+?)`?\. The same name"),
        r"two operators of this query have the same name, '\g<operator>'",
        "pass each its own name=; by default an operator has the name of its function or of its processor's class",
    ),
    _Cause(
        re.compile(r"Multiple applyInPandasWithStates are not supported"),
        "the query has two applyInArrowWithState or applyInPandasWithState operators, and Spark allows one",
        "split the query in two, rewrite the functions as processors (transformWithState), or set "
        "spark.sql.streaming.unsupportedOperationCheck to false (docs/configuration.md)",
    ),
    _Cause(
        re.compile(
            r"Stateful operators in the metadata: \[(?P<before>.*?)\]; "
            r"Stateful operators in current batch: \[(?P<now>.*?)\]"
        ),
        r"the checkpointLocation was created for other stateful operators: it has \g<before>, the query \g<now>",
        "define the original operators in their original order, and set "
        "spark.sql.streaming.stateStore.providerClass to its original value: one-line operators run in "
        "transformWithState with Spark's RocksDB state store, else in applyInPandasWithState",
    ),
    _Cause(
        re.compile(r"Invalid streaming output mode: complete\b"),
        "the query was started in output mode complete, which only Spark's own aggregations support",
        'start it in the mode that its operator was defined for: outputMode("update") or outputMode("append")',
    ),
    _Cause(
        re.compile(r"Could not serialize object: (?P<said>.+)"),
        r"the function, or an object that it uses, cannot be pickled for Spark's tasks: \g<said>",
        "create objects such as locks and connections inside the function, and pass plain values in; a task has no "
        "SparkSession",
    ),
    _Cause(
        re.compile(r"'DataStreamWriter' object has no attribute '(?P<method>awaitTermination|stop|process\w+)'"),
        r"\g<method> was called on a query that was not started",
        r"start it first: df.writeStream.….start().\g<method>(…)",
    ),
    _Cause(
        # ReaderInputStream of Spark 4.0 to 4.3 uses a selector key that another task's refresh() has cancelled.
        re.compile(r"java\.nio\.channels\.CancelledKeyException"),
        "Spark lost the connection to a Python worker while passing the worker from one task to the next: a transient "
        "fault of Spark",
        "run it again: nothing is lost. With the master local[*,4] instead of local[*], Spark retries such tasks",
    ),
    _Cause(
        # Spark lists the formats in the tasks' Python, and takes a failure for an empty list.
        re.compile(r"Failed to find the data source: (?P<format>holdfast(?:-\w+)?)\b"),
        r"Spark does not find the format \g<format> in the Python of its tasks",
        "call holdfast.register(spark) first: it registers the format, or says why it cannot",
    ),
    _Cause(
        re.compile(r"PYTHON_VERSION_MISMATCH"),
        "Spark runs tasks in a different version of Python than this program",
        "set the environment variable PYSPARK_PYTHON to an interpreter of the driver's version (docs/deploy.md)",
    ),
)  # fmt: skip


@dataclass(frozen=True)
class _Raised:
    """An error at the end of a traceback. `name`: its class, with the module unless that is ``builtins``."""

    name: str
    message: str
    frames: list[tuple[str, str, str]]
    where: Mapping[str, str]  #: ``operator``, ``key``, ``shard`` and ``batch``, if noted

    @property
    def is_noted(self) -> bool:
        """Whether the error passed through holdfast's code in a worker, which added notes."""
        return bool(self.where.keys() & {"key", "shard", "batch"})

    @property
    def kind(self) -> type[HoldfastError] | None:
        """The error's class if holdfast defines it, else None."""
        module, _, name = self.name.rpartition(".")
        found = getattr(errors, name, None) if module in ("", errors.__name__) else None
        return found if isinstance(found, type) and issubclass(found, HoldfastError) else None

    @property
    def is_of_py4j(self) -> bool:
        """Whether it was raised between Python and the driver's JVM."""
        paths = [path for path, _, _ in self.frames if not re.search(r"/lib/python3[^/]*/(?!site-packages/)", path)]
        return bool(paths) and "/py4j" in paths[-1]

    @property
    def place(self) -> str | None:
        """The line of user code that raised the error, or called the code that did."""
        for path, line, function in reversed(self.frames):
            if not any(part in path for part in _NOT_USER_CODE) and not path.startswith(_own_folders()):
                return f"{function} ({Path(path).name}, line {line})"
        return None


def explain(error: BaseException | None) -> str:
    """Explain in at most five lines why a query failed and what to do about it.

    Parameters
    ----------
    error : BaseException or None
        An error of Spark, `holdfast` or a function of the query, from ``awaitTermination``, ``query.exception()`` or
        the query's definition, in classic Spark or over Spark Connect. None if the query has not failed.

    Returns
    -------
    str
        Lines with ``what``, ``operator``, ``key`` or ``shard``, ``micro-batch`` and ``to do``, if the error has them.
        For an error raised by neither holdfast nor a Python function, Spark's innermost cause.

    Examples
    --------
    >>> try:
    ...     query.awaitTermination()
    ... except Exception as error:
    ...     print(holdfast.explain(error))
    what:        ValueError: negative amount: -1
    operator:    totals
    key:         ('ann',)
    micro-batch: 7
    to do:       correct add_up (app.py, line 12), and start the query again: nothing of this micro-batch was kept
    """
    if error is None:
        return _lines("nothing has failed")
    if not isinstance(error, BaseException):
        raise InvalidArgumentError("explain takes the error itself, not its text", given=type(error).__name__)
    text = _text(error)
    all_raised = list(_raised(text))
    raised = _chosen(all_raised)
    for cause in _CAUSES:
        found = cause.pattern.search(text)
        if found is not None and not (raised and raised.is_noted):
            where = {"batch": found.groupdict().get("batch")}
            return _lines(found.expand(cause.what), where, found.expand(cause.to_do))
    if raised is None:
        return _lines(_innermost(text, all_raised))
    name = raised.name.rpartition(".")[2] if raised.name.startswith(("holdfast.", "pyspark.")) else raised.name
    what = f"{name}: {raised.message}".removesuffix(": ")
    return _lines(what, raised.where, _to_do(raised))


def is_transient(error: BaseException) -> bool:
    """Return whether a restart may help: the error is retryable, or a machine, process or network was lost."""
    text = _text(error)
    raised = _chosen(list(_raised(text)))
    if raised is not None and raised.kind is not None:
        return raised.kind.retryable
    if raised is not None and raised.name.rpartition(".")[2] in _TRANSIENT_ERRORS:
        return not raised.is_of_py4j
    if raised is not None and (raised.is_noted or raised.frames):
        return False  # raised by the user's function
    return _TRANSIENT_WORDS.search(text) is not None


def _text(error: BaseException) -> str:
    """Return the messages of an exception and its causes, including Py4J's, which Spark hides."""
    chain: list[BaseException] = []
    behind: BaseException | None = error
    while behind is not None and behind not in chain:
        chain.append(behind)
        behind = behind.__cause__ or behind.__context__
    return "\n".join(["".join(traceback.format_exception(error)), *map(java_stack, chain)])


def _lines(what: str, where: Mapping[str, str | None] = MappingProxyType({}), to_do: str | None = None) -> str:
    narrowest = "key" if where.get("key") else "shard"
    said = {"what": what, "operator": where.get("operator"), narrowest: where.get(narrowest)}
    said |= {"micro-batch": where.get("batch"), "to do": to_do}
    return "\n".join(f"{name + ':':<13}{' '.join(text.split())}" for name, text in said.items() if text is not None)


def _to_do(raised: _Raised) -> str | None:
    again = f", and {_RESTART}" if raised.is_noted else ""
    if raised.kind is None:
        place = raised.place or ("the operator's function" if raised.is_noted else None)
        return None if place is None else f"correct {place}{again}"
    for kind, to_do in _WHAT_TO_DO.items():
        if issubclass(raised.kind, kind):
            return to_do
    return f"do as the message says{again}"


def _chosen(found: list[_Raised]) -> _Raised | None:
    """Return the most informative error: one with notes, else holdfast's, else the last Python error."""
    own = [raised for raised in found if not raised.name.startswith(_WRAPPERS)]
    noted = [raised for raised in found if raised.is_noted]
    ours = [raised for raised in own if raised.kind is not None]
    chosen = noted or ours or own
    return chosen[-1] if chosen else None


def _raised(text: str) -> Iterator[_Raised]:
    """Yield the error of each traceback in the text, or the exception itself, in order."""
    lines = text.splitlines()
    starts = [i for i, line in enumerate(lines) if line.rstrip().endswith(_TRACEBACK)]
    if not starts or starts[0] != 0:
        starts.insert(0, -1)
    for start in starts:
        raised = _read(lines, start)
        if raised is not None:
            yield raised


def _read(lines: list[str], start: int) -> _Raised | None:
    """Parse the end of a traceback, which may be indented inside a message."""
    indent = 0 if start < 0 else len(lines[start]) - len(lines[start].lstrip())
    # Only white space before the traceback, not other text, is its indentation.
    margin = "  | " if start >= 0 and _GROUP in lines[start] else lines[max(start, 0)][:indent]
    rest = [line.removeprefix(margin) for line in lines[start + 1 :]]
    frames, end = [], 0
    for line in rest:
        if line and not line.startswith((" ", "\t")):
            break
        if found := _FRAME.match(line):
            frames.append((found["path"], found["line"], found["function"]))
        end += 1
    said: list[str] = []
    notes: dict[str, str] = {}
    is_cut = False  # at the message's first empty line; the notes follow the message
    for line in rest[end:]:
        if line.rstrip().endswith(_TRACEBACK) or _ENDS_A_MESSAGE.match(line):
            break
        is_cut = is_cut or bool(said and not line.strip())
        noted = _NOTE_OF_KEY.match(line) or _NOTE_OF_PLACE.match(line) or _NOTE_OF_DEFINITION.match(line)
        if noted:
            # The innermost comes first.
            notes = {name: value for name, value in noted.groupdict().items() if value is not None} | notes
        elif not is_cut:
            said.append(line)
    matched = _RAISED.match("\n".join(said))
    if matched is None:
        return None
    message = _SQL_STATE.sub("", matched["message"] or "")
    fact = _OPERATOR_FACT.search(message)
    if operator := notes.pop("operator", fact[1] if fact else "").strip("'\""):
        notes["operator"] = operator
    return _Raised(matched["name"], message, frames, notes)


def _innermost(text: str, raised: list[_Raised]) -> str:
    """Return the innermost cause named by Java or PySpark, else the text's first line."""
    of_pyspark = [(one.name, one.message) for one in raised if not one.name.endswith("StreamingQueryException")]
    for found in (_CAUSED_BY.findall(text), of_pyspark, _JAVA.findall(text)):
        said = [(name, message) for name, message in found if not any(words in message for words in _UNINFORMATIVE)]
        if said:
            name, message = said[-1]
            return f"{name.rpartition('.')[2]}: {_SQL_STATE.sub('', message)}"
    lines = [line for line in text.splitlines() if line and not line.startswith((" ", _TRACEBACK))]
    return lines[0] if lines else text


@cache
def _own_folders() -> tuple[str, ...]:
    """Return the folders of holdfast's packages; an editable installation has several."""
    packages = ("backends", "mvcc", "snapshotter", "spark_integration")
    specs = [importlib.util.find_spec(f"holdfast.{package}") for package in packages]
    return tuple(f"{place}/" for spec in specs if spec for place in spec.submodule_search_locations or ())
