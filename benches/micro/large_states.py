"""What a worker holds in memory where a key's state is large: 20,000 keys of 100 kB on `filesystem`, without Spark.

``python -m holdfast.benches.micro.large_states applyInPandasWithState`` (or ``transformWithStateInPandas``) fills one
shard, then calls the function once for all keys, which reads each state, and once more, which reads and replaces it;
``--keys``, ``--bytes`` and ``--folder`` change the load. Printed is the peak of the process's anonymous memory: Arrow
data, objects and writes, without pages of mapped files. What it held before, it may use again.
"""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Self

import click
import numpy as np
import pandas as pd
import pyarrow as pa
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle
from pyspark.sql.types import BinaryType, StructField, StructType

from holdfast import clock
from holdfast.backends.run_files.backend import FilesystemBackend
from holdfast.benches.jobs.by_key import longs
from holdfast.mvcc import VersionedStore
from holdfast.spark_integration.keyed.frames import FrameFormat
from holdfast.spark_integration.keyed.pandas_with_state import PandasWithState
from holdfast.spark_integration.processor.exchange import FrameExchange
from holdfast.spark_integration.processor.handle import PickledProcessor, declaration_of
from holdfast.spark_integration.processor.transform_with_state import TransformWithState
from holdfast.spark_integration.shard.operator import BatchTimes, ShardFunction, ShardInput

_KEY, _OUTPUT = longs("key"), longs("key", "n")
_STATE = StructType([StructField("bytes", BinaryType())])
_KEY_TYPES = pa.schema([("key", pa.int64())])
_FORMAT = FrameFormat("UTC")


def _value(key: int, size: int) -> bytes:
    """Return a value of its own for a key."""
    return key.to_bytes(8, "little") * (size // 8)


class _Function:
    """Reads a key's state, and replaces it if it has a size to write."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __call__(self, key: tuple[Any, ...], frames: Iterable[pd.DataFrame], state: Any) -> Iterator[pd.DataFrame]:
        held = state.getOption
        if self.size:
            state.update((_value(int(key[0]), self.size),))
        yield pd.DataFrame({"key": [key[0]], "n": [len(held[0]) if held else 0]})


class _Processor(StatefulProcessor):
    """The same by a processor."""

    def __init__(self, size: int) -> None:
        self._size = size

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._bytes = handle.getValueState("bytes", _STATE)

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[pd.DataFrame]:
        held = self._bytes.get()
        if self._size:
            self._bytes.update((_value(int(key[0]), self._size),))
        yield pd.DataFrame({"key": [key[0]], "n": [len(held[0]) if held else 0]})


def _with_state(size: int) -> ShardFunction:
    return PandasWithState(
        function=_Function(size), key_types=_KEY_TYPES, state=_STATE, output=_OUTPUT, timeout_conf="NoTimeout",
        timeout_rule="documented", frame_format=_FORMAT, rows_each=10_000, shown_keys=[0], shown_columns=["key"],
    )  # fmt: skip


def _by_processor(size: int) -> ShardFunction:
    pickled = PickledProcessor(_Processor(size))
    return TransformWithState(
        processor=pickled, declared=declaration_of(pickled, "None"), key_types=_KEY_TYPES, key_schema=_KEY,
        given_keys=[0], shown_columns=["key"], exchange=FrameExchange(_OUTPUT, _FORMAT, 10_000), time_mode="None",
        output_mode="update", is_streaming=True,
    )  # fmt: skip


_APIS: dict[str, Callable[[int], ShardFunction]] = {
    "applyInPandasWithState": _with_state,
    "transformWithStateInPandas": _by_processor,
}


def _anonymous_mb() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    fields: dict[str, str] = dict(line.split(":", 1) for line in lines)
    return int(fields["RssAnon"].split()[0]) >> 10


class _Peak:
    """The largest anonymous memory while it is open, every 2 ms."""

    def __enter__(self) -> Self:
        self.before_mb = self.mb = _anonymous_mb()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._ended.wait(0.002):
            self.mb = max(self.mb, _anonymous_mb())

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        print(f"{self.mb} MiB at the peak, {self.before_mb} before", flush=True)


def _batch(keys: range) -> ShardInput:
    numbers = np.arange(keys.start, keys.stop)
    hashes = np.random.default_rng(0).integers(-(2**63), 2**63 - 1, keys.stop)[keys.start :]
    rows = pa.table({"key": numbers})
    return ShardInput("op", 0, 0, rows, rows, pa.array(hashes), BatchTimes(1, 1, None, None))


@click.command()
@click.argument("api", type=click.Choice(list(_APIS)))
@click.option("--keys", default=20_000)
@click.option("--bytes", "size", default=100_000, help="Of a key's state.")
@click.option("--folder", type=click.Path(path_type=Path), help="On the disk to use.")
def main(api: str, keys: int, size: int, folder: Path | None) -> None:
    """See the module."""
    with tempfile.TemporaryDirectory(dir=folder) as home:
        writing = _APIS[api](size)
        store = VersionedStore(FilesystemBackend(Path(home), writing.tables(), clock.new_id))
        pointer, each = None, max(1, keys // 20)
        for start in range(0, keys, each):
            transaction = store.begin(pointer)
            list(writing.run(_batch(range(start, min(keys, start + each))), transaction))
            pointer = transaction.commit()
        for what, step in (("read", _APIS[api](0)), ("read and replaced", writing)):
            transaction = store.begin(pointer)
            print(f"{api}, {keys} keys of {size} bytes, {what}: ", end="", flush=True)
            with _Peak():
                shown = sum(batch.column("n").to_numpy().sum() for batch in step.run(_batch(range(keys)), transaction))
            if shown != keys * (size // 8 * 8):
                raise AssertionError(f"{shown} bytes of state were read")
            if what != "read":
                print(f"{api}, the commit: ", end="")
                with _Peak():
                    transaction.commit()
            else:
                transaction.abort()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
