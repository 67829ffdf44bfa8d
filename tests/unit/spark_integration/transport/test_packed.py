"""Packing: every row reaches its shard once, whatever the sizes; and the garbage collector of a Python stage."""

from __future__ import annotations

import gc
import itertools
import os
import pickle
import socket
import statistics
import subprocess
import sys
import time
import types
import weakref
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.spark_integration.transport import output as output_module
from holdfast.spark_integration.transport import packed as packed_module
from holdfast.spark_integration.transport import python_stage
from holdfast.spark_integration.transport.output import pack_output, unpack_output
from holdfast.spark_integration.transport.packed import (
    BLOB,
    EVENT_TIME,
    HASH,
    NEVER_LATE,
    PackedTransport,
    pack_rows,
    read_blob,
    write_blob,
)
from holdfast.spark_integration.transport.routes import ROUTE, routes_of, shards_of
from holdfast.testing.state_rows import TYPES, VALUE_TYPES, plain

AT = pa.timestamp("us", "America/New_York")
COLUMNS = pa.schema([(HASH, pa.int64()), ("row", pa.int64()), ("name", pa.string()), ("at", AT)])
NO_EVENT = PackedTransport(1, pa.schema([]), None)


def together(tables: Iterable[pa.Table]) -> pa.Table:
    return pa.concat_tables(tables)


def batch_of(rows: list[tuple[int, int, str | None, int | None]]) -> pa.RecordBatch:
    """Return rows of (hash, row, name, microseconds) as Spark sends them."""
    hashes = np.array([h for h, *_ in rows], np.uint64).view(np.int64)
    at = pa.array([us for *_, us in rows], pa.int64()).view(AT)
    columns = [
        pa.array(hashes),
        pa.array([r[1] for r in rows], pa.int64()),
        pa.array([r[2] for r in rows], pa.string()),
    ]
    return pa.RecordBatch.from_arrays([*columns, at], schema=COLUMNS)


@st.composite
def inputs(draw: st.DrawFn) -> list[pa.RecordBatch]:
    sizes = draw(st.lists(st.integers(0, 15), max_size=5))
    hashes = st.one_of(st.sampled_from([0, 2**63, 2**64 - 1]), st.integers(0, 2**64 - 1))
    row = st.tuples(hashes, st.just(0), st.none() | st.text(max_size=4), st.none() | st.integers(-(2**62), 2**62))
    numbers = iter(range(1000))
    return [
        batch_of([(r[0], next(numbers), *r[2:]) for r in draw(st.lists(row, min_size=n, max_size=n))]) for n in sizes
    ]


@pytest.mark.slow(0.5)
@given(inputs(), st.sampled_from([1, 3, 200]), st.sampled_from([1, 500, 32 << 20]))
def test_every_row_reaches_its_shard_once(batches: list[pa.RecordBatch], shards: int, blob_bytes: int) -> None:
    routes = routes_of(shards)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packed_module, "BLOB_BYTES", blob_bytes)
        packed = list(pack_rows(iter(batches), routes, None))
    received: list[dict[str, Any]] = []
    for batch in packed:
        assert batch.schema.names == [ROUTE, BLOB, EVENT_TIME]
        assert batch.num_rows <= shards
        for row in range(batch.num_rows):
            table = read_blob(batch.column(BLOB)[row].as_py())
            assert table.schema == COLUMNS
            shard = routes.index(batch.column(ROUTE)[row].as_py())
            assert set(shards_of(table[HASH].to_numpy().view(np.uint64), shards)) == {shard}
            assert batch.column(EVENT_TIME)[row].as_py() == NEVER_LATE
            received += table.drop(["at"]).to_pylist()
    sent = [row for batch in batches for row in batch.drop_columns(["at"]).to_pylist()]
    assert sorted(received, key=lambda r: r["row"]) == sorted(sent, key=lambda r: r["row"])
    if blob_bytes == shards == 1:
        assert len(packed) == sum(batch.num_rows > 0 for batch in batches)


def test_how_much_waits_does_not_grow_with_the_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """With 200 shards 6 GB would wait in a worker; of one key, they would be one blob, which Arrow cannot hold."""
    batches = [batch_of([(5, i, "x" * 1000, None)]) for i in range(9)]
    monkeypatch.setattr(packed_module, "WAITING_BYTES", 3 * batches[0].nbytes)
    packed = list(pack_rows(batches, routes_of(200), None))
    rows = [read_blob(blob.as_py()).num_rows for batch in packed for blob in batch.column(BLOB)]
    assert rows == [3, 3, 3]


@pytest.mark.parametrize("rows_each", [None, 1, 7, 1 << 19])
def test_large_blobs_fill_batches_of_so_many_rows(rows_each: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spark fails where a batch that it hands to a worker has more than 1 GiB, and counts its rows only."""
    batches = [batch_of([(5, i, "x" * size, i)]) for i, size in enumerate([1, 30_000, 60_000, 1, 90_000])]
    monkeypatch.setattr(packed_module, "WAITING_BYTES", 1)
    monkeypatch.setattr(packed_module, "BATCH_BYTES", 50_000)
    packed = pa.Table.from_batches(pack_rows(batches, [7], None, rows_each))
    blobs = packed[BLOB].to_pylist()
    assert set(packed[ROUTE].to_pylist()) == {7}
    received = NO_EVENT.receive([packed.to_pandas()], together)
    assert received.rows["row"].to_pylist() == list(range(5))
    if rows_each is None or rows_each == 1 << 19:
        assert len(blobs) == 5
        return
    largest = max(len(blob) for blob in blobs if blob is not None)
    for start in range(0, len(blobs), rows_each):
        assert sum(len(blob) for blob in blobs[start : start + rows_each] if blob is not None) < 50_000 + largest


@pytest.mark.parametrize("make", [bytes, bytearray], ids=["Spark 4.1 and later", "Spark 4.0"])
def test_blobs_are_received_in_each_form_that_spark_gives_them(make: type[bytes | bytearray]) -> None:
    batches = [batch_of([(i, i, "x", i)]) for i in range(3)]
    blobs = [make(write_blob(COLUMNS, [batch])) for batch in batches]
    chunks = [pd.DataFrame({BLOB: some, EVENT_TIME: NEVER_LATE}) for some in (blobs[:2], blobs[2:])]
    assert NO_EVENT.receive(iter(chunks), together) == (pa.Table.from_batches(batches), 0)


def test_a_slice_packs_only_its_rows() -> None:
    batch = batch_of([(0, i, "x" * 100, None) for i in range(1000)])
    assert len(write_blob(COLUMNS, [batch.slice(10, 1)])) < 2000


@pytest.mark.slow(0.5)
@given(inputs(), st.sampled_from([1, 300, 32 << 20]), st.integers(1, 7))
def test_output_comes_back_whole_in_order_and_in_batches_of_the_size_asked(
    batches: list[pa.RecordBatch], blob_bytes: int, rows_each: int
) -> None:
    output = pa.Table.from_batches(batches, COLUMNS).combine_chunks()
    batch = pa.RecordBatch.from_arrays([c.combine_chunks() for c in output.columns], schema=COLUMNS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(output_module, "BLOB_BYTES", blob_bytes)
        frames = list(pack_output([batch]))
    if blob_bytes == 1:
        assert len(frames) == batch.num_rows
    unpacked = list(unpack_output(_as_batches(frames), rows_each))
    assert all(0 < b.num_rows <= rows_each for b in unpacked)
    assert pa.Table.from_batches(unpacked, COLUMNS) == output


def _as_batches(frames: list[pd.DataFrame]) -> Iterator[pa.RecordBatch]:
    for frame in frames:
        yield pa.RecordBatch.from_pydict({BLOB: pa.array(frame[BLOB], pa.binary())})


def test_no_output_sends_no_blob() -> None:
    assert list(pack_output([batch_of([])])) == []


@pytest.mark.parametrize(
    ("data_type", "one", "other"), [*TYPES, *VALUE_TYPES], ids=lambda v: str(v) if isinstance(v, pa.DataType) else ""
)
def test_columns_of_every_type_are_carried(data_type: pa.DataType, one: Any, other: Any) -> None:
    batch = pa.RecordBatch.from_arrays([pa.array([0, 1, 2]), pa.array([one, other, None], data_type)], [HASH, "v"])
    (packed,) = pack_rows([batch], [0], None)
    received = read_blob(packed.column(BLOB)[0].as_py())
    assert received.schema == batch.schema
    assert [plain(v) for v in received["v"].to_pylist()] == [plain(v) for v in batch["v"].to_pylist()]


_processes = itertools.count(10_000_000)


@pytest.fixture(autouse=True)
def _first_time(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As in a process that has just been forked."""
    process = next(_processes)
    monkeypatch.setattr(os, "getpid", lambda: process)
    yield
    gc.unfreeze()


class Cyclic:
    def __init__(self) -> None:
        self.me = self


@pytest.mark.slow(1)
def test_what_is_loaded_is_left_out_of_later_collections() -> None:
    """Once, as freezing takes as long as the collection that it saves; what lives for a task stays collectable."""
    python_stage.freeze_modules()
    assert gc.get_freeze_count() > 10_000
    assert len(gc.get_objects()) < 1_000
    later = [Cyclic()]
    frozen = gc.get_freeze_count()
    python_stage.freeze_modules()
    assert gc.get_freeze_count() <= frozen
    assert any(o is later[0] for o in gc.get_objects())


@pytest.mark.slow(1)
def test_garbage_from_before_and_after_is_collected() -> None:
    before = weakref.ref(Cyclic())
    python_stage.freeze_modules()
    after = weakref.ref(Cyclic())
    gc.collect()
    assert before() is None
    assert after() is None


@pytest.fixture
def before() -> Iterator[tuple[int, int, int]]:
    found = gc.get_threshold()
    yield found
    gc.set_threshold(*found)


def test_only_old_objects_are_collected_less_often(before: tuple[int, int, int]) -> None:
    """In a loop over keys young garbage goes as always."""
    with python_stage.rare_full_collections():
        young, old, oldest = gc.get_threshold()
        assert (young, oldest) == (before[0], before[2])
        assert old > before[1]
        gone = weakref.ref(Cyclic())
        kept: list[list[int]] = []
        while gone() is not None:
            kept.append([])
            assert len(kept) <= 2 * young
    assert gc.get_threshold() == before


def test_what_was_set_comes_back(before: tuple[int, int, int]) -> None:
    """When a call fails, and when calls overlap: of two generators, the one that began first may end first."""
    with pytest.raises(KeyError), python_stage.rare_full_collections():
        raise KeyError
    assert gc.get_threshold() == before
    first, second = python_stage.rare_full_collections(), python_stage.rare_full_collections()
    for call in (first, second):
        call.__enter__()
    for call in (first, second):
        call.__exit__(None, None, None)
    assert gc.get_threshold() == before


@pytest.mark.usefixtures("before")
def test_what_a_function_sets_itself_stays() -> None:
    """And whoever collects old objects even less often may go on so."""
    with python_stage.rare_full_collections():
        gc.set_threshold(50_000, 20, 5)
    assert gc.get_threshold() == (50_000, 20, 5)
    gc.set_threshold(700, 100_000, 10)
    with python_stage.rare_full_collections():
        assert gc.get_threshold() == (700, 100_000, 10)


def import_module(monkeypatch: pytest.MonkeyPatch, name: str) -> list[Cyclic]:
    """Freeze modules when there is another one, and return what was made with it."""
    made = [Cyclic()]
    monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    python_stage.freeze_modules()
    return made


def is_frozen(made: list[Cyclic]) -> bool:
    return not any(o is made[0] for o in gc.get_objects())


@pytest.mark.slow(1)
def test_it_happens_again_for_what_is_imported_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client of an object storage is loaded by a process that has frozen its modules, and is as large as these."""
    python_stage.freeze_modules()
    assert is_frozen(import_module(monkeypatch, "imported_later"))


@pytest.mark.slow(1)
def test_modules_that_come_and_go_freeze_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is frozen is never freed: a function that makes a module in each micro-batch must not fill the memory."""
    for i in range(10):
        import_module(monkeypatch, f"made_{i}")
    assert not is_frozen(import_module(monkeypatch, "made_last"))


@pytest.mark.slow(0.5)
def test_modules_that_come_back_freeze_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    python_stage.freeze_modules()
    import_module(monkeypatch, "comes_and_goes")
    monkeypatch.delitem(sys.modules, "comes_and_goes")
    python_stage.freeze_modules()
    assert not is_frozen(import_module(monkeypatch, "comes_and_goes"))


WORKER = """
import pickle, socket, sys
with socket.create_connection(("127.0.0.1", int(sys.argv[1]))) as connection, connection.makefile("rwb") as jvm:
    while command := jvm.readline():
        pickle.loads(bytes.fromhex(command.decode()))
        jvm.readline()
        jvm.write(b"." * int(sys.argv[2]) + b"\\n")
        jvm.flush()
"""


@pytest.mark.slow(1)
@pytest.mark.skipif(not hasattr(socket, "TCP_QUICKACK"), reason="Linux alone has it")
@pytest.mark.parametrize("answer_bytes", [10, 200_000])
def test_a_worker_that_has_unpickled_a_stateful_step_does_not_wait_for_packets(answer_bytes: int) -> None:
    """Spark sends the step, then rows: the second packet waits until the first is acknowledged. So do answers."""
    step, took_s = python_stage.ImmediateAcks(), []
    vars(step)["name"] = "totals"
    command = pickle.dumps(step).hex().encode() + b"\n"
    with socket.create_server(("127.0.0.1", 0)) as server:
        worker = subprocess.Popen([sys.executable, "-c", WORKER, str(server.getsockname()[1]), str(answer_bytes)])
        connection, _ = server.accept()
        with connection, connection.makefile("rb") as answers:
            for _ in range(30):
                began_s = time.monotonic()
                connection.send(command)
                connection.send(b"rows\n")
                assert len(answers.readline()) == answer_bytes + 1
                took_s.append(time.monotonic() - began_s)
    assert worker.wait() == 0
    assert statistics.median(took_s[-10:]) < 0.03


@pytest.mark.skipif(not hasattr(socket, "TCP_QUICKACK"), reason="Linux alone has it")
def test_a_descriptor_that_has_become_a_file_costs_none(tmp_path: Path) -> None:
    """A worker's connections come and go with its tasks, and their numbers go to whatever is opened next."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        connection = socket.create_connection(server.getsockname())
        python_stage.acknowledge_at_once()
    with (tmp_path / "file").open("w") as file:
        number = connection.detach()
        os.dup2(file.fileno(), number)
    before = os.listdir("/proc/self/fd")
    for _ in range(3):
        python_stage.acknowledge_at_once()
    assert len(os.listdir("/proc/self/fd")) == len(before)
    os.close(number)


def test_a_default_timeout_of_the_user_leaves_a_workers_connections_blocking() -> None:
    """Python makes a new socket object non-blocking, and so the connection below, of which PySpark expects to wait."""
    before = socket.getdefaulttimeout()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        socket.setdefaulttimeout(30)
        try:
            python_stage._socket_of(ours.fileno()).close()
        finally:
            socket.setdefaulttimeout(before)
        assert os.get_blocking(ours.fileno())
