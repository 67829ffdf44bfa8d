"""Where a holdfast micro-batch spends its time inside the Python workers; only when profiling.

`install_once` wraps the functions of `SPANS` in a worker that has just been forked, by
`holdfast.benches.instruments.profiled_daemon`: a run without ``--profile`` has nothing of it. Spans nest: ``call``
holds most others. The time that a generator waits for its input is not its own, but a task's time holds all that it
waits. Each span has calls, seconds, and seconds of this thread's CPU, which say more on a busy machine::

    worker 4711, a task of micro-batch 3:   {"batch": 3, "spans": {"pack": [1, 0.213, 0.187], …}}
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import numpy as np

FOLDER_VARIABLE = "HOLDFAST_BENCH_SPANS"

Spent = np.ndarray  # calls, seconds, seconds of CPU

# Span, module below holdfast (or a whole name), attribute; where a name is imported into another module, as there.
SPANS = (
    ("task, waits included", "pyspark.worker", "main"),
    ("read functions", "pyspark.worker", "read_udfs"),
    ("call", "spark_integration.shard.call", "call_shard"),
    ("receive", "spark_integration.transport.packed", "PackedTransport.receive"),
    ("receive", "spark_integration.transport.rows", "RowsTransport.receive"),
    ("open", "spark_integration.shard.call", "open_shard"),
    ("begin", "spark_integration.shard.store", "ShardStore.begin"),
    ("group", "spark_integration.vectorised.arrow_with_state", "group_rows"),
    ("conform keys", "backends.run", "TableSchema.conform"),
    ("function and group", "spark_integration.vectorised.arrow_with_state", "ArrowWithState.run"),
    ("function by key", "spark_integration.keyed.pandas_with_state", "PandasWithState.run"),
    ("by key: frames", "spark_integration.keyed.frames", "FrameFormat.to_frame"),
    ("by key: keys", "spark_integration.keyed.pandas_with_state", "key_tuples"),
    ("by key: state get", "spark_integration.keyed.values", "ValueState.get"),
    ("by key: state put", "spark_integration.keyed.values", "ValueState.put"),
    ("by key: output to Arrow", "spark_integration.keyed.output_frames", "OutputFrames._convert"),
    ("state get", "spark_integration.vectorised.batch", "ShardState.get"),
    ("state put", "spark_integration.vectorised.batch", "ShardState.put"),
    ("conform output", "spark_integration.vectorised.arrow_with_state", "conform_output"),
    ("commit", "mvcc.transaction", "Transaction.commit"),
    ("commit: encode", "snapshotter.commits", "ObjectCommitLog.append"),
    ("commit: put (thread)", "snapshotter.storage.local", "LocalStorage.put"),
    ("commit: apply", "backends.run_files.backend", "RunFilesBackend.apply"),
    ("commit: apply: merge", "backends.run_files.backend", "merge_runs"),
    ("commit: apply: write run", "backends.run_files.backend", "RunFilesBackend._write_run"),
    ("commit: wait for put", "mvcc.store", "PendingCommit.wait"),
    ("announce", "spark_integration.shard.announcing", "announce"),
)
GENERATORS = (
    ("pack", "spark_integration.transport.packed", "pack_rows"),
    ("unpack", "spark_integration.transport.output", "unpack_output"),
    ("pack out", "spark_integration.transport.output", "pack_output"),
)

_times: dict[str, Spent] = {}
_batch = [-1]


@functools.cache
def install_once() -> None:
    """Wrap the functions of `SPANS` in this process, which from then on writes its spans after every task."""
    for span, module, attribute in SPANS:
        _replace(module, attribute, functools.partial(_timed, span))
    for span, module, attribute in GENERATORS:
        _replace(module, attribute, functools.partial(_timed_generator, span))
    _replace("pyspark.worker", "read_udfs", _noting_batch)
    _replace("pyspark.worker", "main", _writing)


def _replace(module: str, attribute: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    owner: Any = importlib.import_module(module if module.startswith("pyspark") else f"holdfast.{module}")
    *outer, name = attribute.split(".")
    for part in outer:
        owner = getattr(owner, part)
    setattr(owner, name, wrap(getattr(owner, name)))


def _now() -> Spent:
    return np.array([0.0, time.perf_counter(), time.thread_time()])


def _add(span: str, spent: Spent) -> None:
    _times[span] = _times.get(span, np.zeros(3)) + spent + (1, 0, 0)


def _timed(span: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def timed(*args: Any, **kwargs: Any) -> Any:
        start = _now()
        try:
            result = function(*args, **kwargs)
        finally:
            _add(span, _now() - start)
        return _own_time(span, result, lambda: np.zeros(3)) if isinstance(result, Iterator) else result

    return timed


def _timed_generator(span: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def timed(first: Any, *args: Any, **kwargs: Any) -> Iterator[Any]:
        waited = [np.zeros(3)]

        def waiting() -> Iterator[Any]:
            while True:
                start = _now()
                try:
                    item = next(first)
                except StopIteration:
                    return
                finally:
                    waited[0] = waited[0] + _now() - start
                    _add(f"{span}: wait for input", _now() - start)
                yield item

        given = waiting() if isinstance(first, Iterator) else first
        return _own_time(span, function(given, *args, **kwargs), lambda: waited[0])

    return timed


def _own_time(span: str, items: Iterator[Any], waited: Callable[[], Spent]) -> Generator[Any, None, Any]:
    """Yield `items`, adding up the time inside them, less what they waited for their input."""
    while True:
        start, before = _now(), waited()
        try:
            item = next(items)
        except StopIteration as end:
            return end.value
        finally:
            _add(span, _now() - start - (waited() - before))
        yield item


def _noting_batch(read_functions: Callable[..., Any]) -> Callable[..., Any]:
    """Note the micro-batch where the task's context is known: at the end of a task it is not any more."""
    from pyspark import TaskContext

    from holdfast.spark_integration.shard.streaming_task import BATCH_PROPERTY

    @functools.wraps(read_functions)
    def noting(*args: Any, **kwargs: Any) -> Any:
        context = TaskContext.get()
        _batch[0] = int((context and context.getLocalProperty(BATCH_PROPERTY)) or -1)
        return read_functions(*args, **kwargs)

    return noting


def _writing(main: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(main)
    def writing(*args: Any) -> Any:
        _times.clear()
        try:
            return main(*args)
        finally:
            times = {span: spent.tolist() for span, spent in _times.items()}
            with open(Path(os.environ[FOLDER_VARIABLE]) / f"{os.getpid()}.jsonl", "a") as file:
                file.write(json.dumps({"batch": _batch[0], "spans": times}) + "\n")

    return writing


def collect(folder: Path, counted: range) -> dict[str, dict[str, float]]:
    """Return for each span its mean over the counted micro-batches.

    Returns
    -------
    dict
        By span: ``calls``, ``ms`` and ``cpu_ms`` a micro-batch, added up over its tasks.
    """
    totals: dict[str, Spent] = {}
    for path in sorted(folder.glob("*.jsonl")):
        for line in path.read_text().splitlines():
            task = json.loads(line)
            if task["batch"] in counted:
                for span, spent in task["spans"].items():
                    totals[span] = totals.get(span, np.zeros(3)) + spent
    means = {span: total / len(counted) for span, total in totals.items()}
    return {
        span: {"calls": round(calls, 2), "ms": round(seconds * 1000, 2), "cpu_ms": round(cpu * 1000, 2)}
        for span, (calls, seconds, cpu) in means.items()
    }
