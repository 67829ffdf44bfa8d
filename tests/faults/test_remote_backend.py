"""A backend with one owner behind a real state server: what breaks between the two, and who may ask for what."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pytest

from holdfast import errors
from holdfast.backends.base import Pointer
from holdfast.backends.run import Keys, Run, TableSchema
from holdfast.clock import new_id
from holdfast.errors import (
    CorruptionError,
    HoldfastError,
    InvalidArgumentError,
    NotFoundError,
    SchemaMismatchError,
    UnavailableError,
)
from holdfast.spark_integration.client import streams as state_streams
from holdfast.spark_integration.client.connection import StateClient
from holdfast.spark_integration.client.exchange import Exchange
from holdfast.spark_integration.client.messages import ServerLostError, ShardAddress, decode_error, encode_error
from holdfast.spark_integration.client.remote_backend import RemoteBackend
from holdfast.spark_integration.executor import local_dirs
from holdfast.spark_integration.server import open_shards
from holdfast.spark_integration.server.open_shards import OpenShards
from holdfast.testing import MakeBackend
from holdfast.testing.state_rows import COUNTS, P1, P2, PAIRS, contents, counts, users
from tests.faults.executor_process import (
    OWNED,
    Executor,
    StartExecutor,
    eventually,
    remote_backends,
    started_executors,
)

TABLES = {"counts": COUNTS}


@pytest.fixture(scope="module")
def executor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Executor]:
    """One for all tests, also those that kill its server: the next call starts another."""
    tmp_path_factory.getbasetemp()
    with started_executors() as start:
        yield start()


@pytest.fixture
def executors(tmp_path: Path) -> Iterator[StartExecutor]:
    with started_executors() as start:
        yield start


@pytest.fixture
def client(executor: Executor) -> StateClient:
    client = executor.client()
    client.require_server()
    return client


pytestmark = pytest.mark.slow


@pytest.fixture(params=[OWNED, "rocksdb"])
def make(request: pytest.FixtureRequest, executor: Executor, client: StateClient) -> MakeBackend:
    return remote_backends(executor, client, request.param)


@pytest.fixture
def backend(make: MakeBackend, tmp_path: Path) -> RemoteBackend:
    backend = make(tmp_path, TABLES)
    assert isinstance(backend, RemoteBackend)
    return backend


def many(n: int, text: str = "user") -> tuple[Keys, Run]:
    hashes = np.linspace(0, 2**64 - 2**12, n).astype(np.uint64)
    names = pa.array([f"{text}{i}" for i in range(n)], pa.large_string())
    keys = Keys(hashes, pa.RecordBatch.from_arrays([names], schema=COUNTS.key))
    return keys, Run.build(COUNTS, keys, pa.RecordBatch.from_arrays([pa.array(range(n))], schema=COUNTS.value))


def encoded(run: Run) -> pa.Buffer:
    return pa.py_buffer(b"".join(state_streams.encode_run(run)))


def server_of(client: StateClient) -> int:
    pid = client.call("statistics")["pid"]
    assert isinstance(pid, int)
    return pid


def kill(client: StateClient) -> None:
    pid = server_of(client)
    os.kill(pid, signal.SIGKILL)
    psutil.wait_procs([psutil.Process(pid)] if psutil.pid_exists(pid) else [], timeout=10)


# Large state travels in pieces.


def test_more_than_a_message_holds(backend: RemoteBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gets, scans, prefixes and commits of many pieces; each piece bounded in rows and bytes."""
    monkeypatch.setattr(state_streams, "PIECE_BYTES", 10_000)
    monkeypatch.setattr(state_streams, "PIECE_ROWS", 700)
    keys, run = many(5_000)
    backend.apply(None, P1, {"counts": run}, {})
    with backend.view(P1) as view:
        found = view.get("counts", keys)
        assert found.exists.all()
        assert found.values.column(0).to_pylist() == list(range(5_000))
        backwards = view.get("counts", keys.take(np.arange(5_000)[::-1]))
        assert backwards.values.column(0).to_pylist() == list(range(5_000))[::-1]
        assert sum(len(run) for run in view.scan_prefix("counts", keys)) == 5_000
        assert len(contents(view, "counts")) == 5_000


def test_pieces_are_bounded_and_whole() -> None:
    batch = pa.record_batch({"text": ["x" * 10_000] * 100 + ["y" * (5 << 20)] + [""] * 100_000})
    pieces = list(state_streams.pieces(batch))
    assert pa.Table.from_batches(pieces).combine_chunks().to_batches()[0].equals(batch)
    assert max(p.num_rows for p in pieces) <= state_streams.PIECE_ROWS
    large = [p for p in pieces if p.nbytes > state_streams.PIECE_BYTES]
    assert [p.num_rows for p in large] == [1], "only a single row may be larger"
    assert [p.num_rows for p in state_streams.pieces(batch.slice(0, 0))] == [0]


def test_a_row_of_many_megabytes(backend: RemoteBackend) -> None:
    name = "n" * (20 << 20)
    backend.apply(None, P1, counts((name, 1), ("b", 2)), {})
    with backend.view(P1) as view:
        assert users(view, name, "b") == [(1,), (2,)]


def test_a_scan_that_is_given_up_ends_the_reading_too(backend: RemoteBackend, client: StateClient) -> None:
    _, run = many(200_000)
    backend.apply(None, P1, {"counts": run}, {})
    with backend.view(P1) as view:
        for _ in range(3):
            scan = view.scan("counts")
            assert len(next(scan))
            scan.close()  # type: ignore[attr-defined]
            assert users(view, "user1", "nobody") == [None, None], "their hashes are others"
        half = view.scan("counts")
        first = len(next(half))
        assert users(view, "nobody") == [None], "other requests go on between"
        assert first + sum(len(run) for run in half) == 200_000


def test_runs_arrive_byte_by_byte_as_they_were(tmp_path: Path) -> None:
    """Small buffers are joined, large ones cut, and nothing changes its place."""
    for n in (0, 1, 7, 5_000, 300_000):
        run = many(n)[1]
        buffers = state_streams.encode_run(run)
        pieces = list(state_streams.byte_pieces(buffers))
        assert b"".join(piece.column(0).buffers()[1].slice(0, piece.num_rows) for piece in pieces if len(piece)) == (
            b"".join(buffers)
        )
        assert max(piece.num_rows for piece in pieces) <= state_streams.PIECE_BYTES
        assert len(pieces) < 20
        sizes = {"counts": sum(b.size for b in buffers)}
        assert state_streams.receive_runs(sizes, pieces, TABLES, tmp_path)["counts"].batch.equals(run.batch)


def test_runs_too_large_for_memory_are_received_into_a_file_without_a_name(tmp_path: Path) -> None:
    _, run = many(50_000)
    data = encoded(run)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(state_streams, "FILE_BYTES", 1000)
        found = state_streams.receive_runs({"counts": data.size}, state_streams.byte_pieces([data]), TABLES, tmp_path)
    assert found["counts"].batch.equals(run.batch)
    assert list(tmp_path.iterdir()) == []


# Connections that break.

HOLDER = """
import sys
from pathlib import Path
from holdfast.backends.base import Pointer
from holdfast.spark_integration.client.remote_backend import RemoteBackend
from holdfast.spark_integration.client.connection import StateClient
from holdfast.spark_integration.client.messages import ShardAddress
shard = ShardAddress(**__import__("json").loads(sys.argv[2]))
backend = RemoteBackend(StateClient(Path(sys.argv[1])), shard, shard.schemas(), lambda: "x")
views = [backend.view(Pointer.parse(sys.argv[3])) for _ in range(3)]
scans = [view.scan("counts") for view in views]
for scan in scans:
    next(scan)
print("holds", flush=True)
sys.stdin.read()
"""


def test_a_killed_worker_leaves_no_view_open(backend: RemoteBackend, client: StateClient, executor: Executor) -> None:
    """A view holds a snapshot of the database: one for each killed worker would keep all old rows for ever."""
    backend.apply(None, P1, {"counts": many(200_000)[1]}, {})
    shard = json.dumps(vars(backend._shard))
    command = [sys.executable, "-c", HOLDER, str(executor.directory), shard, str(P1)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as worker:
        assert worker.stdout is not None
        assert worker.stdout.readline() == b"holds\n"
        assert client.call("statistics")["views"] == 3
        worker.kill()
    eventually(lambda: client.call("statistics")["views"] == 0)
    backend.apply(P1, P2, counts(("ann", 1)), {})


@pytest.mark.parametrize("ask", ["apply", "load"])
def test_a_commit_that_did_not_arrive_whole_makes_nothing(
    backend: RemoteBackend, client: StateClient, ask: str
) -> None:
    """Whether the worker was killed or only ends too early: the server sees the same end."""
    backend.apply(None, P1, counts(("ann", 1)), {})
    data = encoded(many(1000)[1])
    message = {"ask": ask, "shard": vars(backend._shard), "sizes": {"counts": data.size}, "properties": {}}
    message |= {"base": str(P1), "new": str(P2)} if ask == "apply" else {"pointer": str(P2)}
    with Exchange(client, message, 10) as exchange:
        exchange.send(state_streams.byte_pieces([data.slice(0, data.size - 1)]), state_streams.BYTES)
        with pytest.raises(UnavailableError, match="received whole"):
            exchange.answer()
    with Exchange(client, message, 10) as exchange:
        exchange._writer.begin(state_streams.BYTES)
        exchange._writer.write_batch(next(state_streams.byte_pieces([data.slice(0, 1000)])))
    for wrong in (
        {**message, "sizes": {"counts": data.size - 1}},
        {**message, "sizes": {"counts": "7"}},
        {**message, "sizes": {"counts": -1}},
        {**message, "sizes": {}},
    ):
        with pytest.raises(InvalidArgumentError):
            _exchanged(client, wrong, state_streams.byte_pieces([data]), state_streams.BYTES)
    assert backend.versions() == [P1]
    with backend.view(P1) as view:
        assert contents(view, "counts") == {("ann",): (1,)}


@pytest.mark.parametrize("make", ["rocksdb"], indirect=True)
def test_a_killed_server_is_said_to_be_lost_and_another_starts(
    backend: RemoteBackend, client: StateClient, executor: Executor
) -> None:
    """Whatever the worker does at that moment: the error names the log, and the next beginning finds a server."""
    keys, run = many(100_000)
    asked: list[Callable[[Any], object]] = [
        lambda v: v.get("counts", keys),
        lambda v: list(v.scan("counts")),
        lambda v: list(v.scan_prefix("counts", keys)),
        lambda _: backend.apply(P1, Pointer(2, new_id()), {"counts": run}, {}),
        lambda _: backend.versions(),
    ]
    for number, ask in enumerate(asked):
        backend.load(P1, {"counts": run}, {})
        view = backend.view(P1)
        pid = server_of(client)
        timer = threading.Timer(0.01 * number, os.kill, (pid, signal.SIGKILL))
        timer.start()
        with pytest.raises(ServerLostError, match=str(local_dirs.log_path(executor.directory))):
            _until_it_fails(ask, view)
        timer.join()
        view.close()
        client.require_server()
        assert server_of(client) != pid
        with pytest.raises(ServerLostError, match="another runs now"):
            _reopened(view).get("counts", keys)


def _until_it_fails(ask: Callable[[Any], object], view: Any) -> None:
    while True:
        ask(view)


def _reopened(view: Any) -> Any:
    """Return a view of a server that has ended, as a worker has it that did not notice."""
    view._exchange = object()
    return view


def test_a_server_that_was_killed_holds_nothing_but_what_its_files_hold(make: MakeBackend, tmp_path: Path) -> None:
    """Honest: what is not there any more is not found, and never empty."""
    backend = make(tmp_path, TABLES)
    assert isinstance(backend, RemoteBackend)
    backend.apply(None, P1, counts(("ann", 1)), {"step": 1})
    kill(backend._client)
    again = make(tmp_path, TABLES)
    for pointer in [P1] if P1 not in again.versions() else []:
        with pytest.raises(NotFoundError):
            again.view(pointer)
        again.load(P1, counts(("ann", 1)), {"step": 1})
    with again.view(P1) as view:
        assert contents(view, "counts") == {("ann",): (1,)}
        assert view.properties == {"step": 1}


# Errors cross as what they are.


def test_every_error_arrives_as_it_was_raised() -> None:
    for found in vars(errors).values():
        if isinstance(found, type) and issubclass(found, HoldfastError):
            error = found("what is wrong", version=7, path="a b", nothing=None, share=0.5)
            arrived = decode_error(encode_error(error))
            assert type(arrived) is found
            assert arrived is not None
            assert (arrived.message, arrived.facts, str(arrived)) == (error.message, error.facts, str(error))


def test_what_is_no_error_of_ours_makes_no_class() -> None:
    """Names come over a socket: none but our own error classes may be made of them."""
    for name in ("OSError", "Path", "SystemExit", "ClassVar", "annotations", "NewError"):
        data = json.dumps({"error": name, "message": "m", "facts": {}}).encode()
        assert type(decode_error(data)) is HoldfastError
    for data in (b"", b"x", b"[]", b"{}", b'{"error": 1, "message": "m", "facts": {}}', b'{"error": "HoldfastError"}'):
        assert decode_error(data) is None


def test_errors_of_the_server_reach_the_worker(backend: RemoteBackend, client: StateClient) -> None:
    backend.apply(None, P1, counts(("ann", 1)), {})
    with pytest.raises(NotFoundError) as caught:
        backend.view(P2)
    assert str(P2) in str(caught.value) or caught.value.facts
    with pytest.raises(InvalidArgumentError, match="not a pointer"):
        client.call("maintain", json.dumps({"shard": vars(backend._shard), "pointer": "../.."}).encode())
    long = "x" * 200_000
    with pytest.raises(InvalidArgumentError, match="no such exchange") as large:
        Exchange(client, {"ask": long}, 10).answer()
    assert large.value.facts == {"ask": long}


def test_garbage_never_ends_the_server(backend: RemoteBackend, client: StateClient) -> None:
    """Every field of every request: missing, of another type, of another meaning."""
    backend.apply(None, P1, counts(("ann", 1)), {})
    pid = server_of(client)
    shard = vars(backend._shard)
    with backend.view(P1) as view:
        name = view._name  # type: ignore[attr-defined]
        table = {"view": name, "table": "counts"}
        exchanges = [
            {"ask": "view", "shard": shard, "pointer": str(P2)},
            {"ask": "get", **table},
            {"ask": "scan", **table, "first_hash": 0, "last_hash": -1},
            {"ask": "scan_prefix", **table, "columns": 9},
            {"ask": "apply", "shard": shard, "base": str(P1), "new": str(P2), "sizes": {}, "properties": []},
            {"ask": "load", "shard": shard, "pointer": str(P1), "sizes": {"no table": 1}, "properties": {}},
        ]
        for good in exchanges:
            for field in good:
                for value in (None, 7.5, [], {}, "", "nothing", 2**70):
                    if field == "ask" or good[field] != value:
                        _garbage(client, {**good, field: value})
    assert server_of(client) == pid
    assert backend.versions() == [P1]


def _garbage(client: StateClient, message: dict[str, Any]) -> None:
    with pytest.raises(HoldfastError) as caught:
        _exchanged(client, message, [pa.record_batch({"nonsense": [1.5]})], pa.schema({"nonsense": pa.float64()}))
    lost = isinstance(caught.value, ServerLostError) and "another runs now" not in str(caught.value)
    assert not lost, message


def _exchanged(
    client: StateClient, message: dict[str, Any], batches: Iterable[pa.RecordBatch], schema: pa.Schema
) -> None:
    with Exchange(client, message, 10) as exchange:
        exchange.send(batches, schema)
        exchange.answer()


# Only shards of this executor, opened once.


@pytest.mark.parametrize(
    "path",
    ["/etc", "{root}", "{root}/..", "{root}/../other/shard", "relative", "", "{root}/link/shard", "{root}/a/../../x"],
)
def test_directories_elsewhere_are_refused(path: str, backend: RemoteBackend, executor: Executor) -> None:
    """A request names a directory; whoever may connect is this user, but a mistake must not cost other files."""
    link = executor.directory / "link"
    if not link.exists():
        link.symlink_to(executor.root)
    directory = path.format(root=executor.directory)
    outside = dataclasses.replace(backend._shard, directory=directory)
    assert backend.versions() == []  # and its directory is there
    before = sorted(executor.root.rglob("*"))
    elsewhere = RemoteBackend(backend._client, outside, TABLES, new_id)
    for ask in (
        elsewhere.versions,
        lambda: elsewhere.view(P1),
        lambda: elsewhere.load(P1, counts(("ann", 1)), {}),
        lambda: elsewhere.apply(None, P1, counts(("ann", 1)), {}),
        lambda: backend.thaw(P1, Path(directory)),
    ):
        with pytest.raises(InvalidArgumentError, match="not a directory of this executor's shards"):
            ask()
    assert sorted(executor.root.rglob("*")) == before


def test_another_schema_opens_the_shard_again(backend: RemoteBackend) -> None:
    """A query that comes back with other columns is told so; one with the old columns then goes on."""
    backend.apply(None, P1, counts(("ann", 1)), {})
    other = TableSchema.of("counts", COUNTS.key, pa.schema([("n", pa.string())]))
    shard = dataclasses.replace(backend._shard, tables=ShardAddress.of("", "", {}, {"counts": other}).tables)
    changed = RemoteBackend(backend._client, shard, {"counts": other}, new_id)
    with pytest.raises((SchemaMismatchError, NotFoundError)):
        contents(changed.view(P1), "counts")
    if P1 in backend.versions():
        with backend.view(P1) as view:
            assert contents(view, "counts") == {("ann",): (1,)}


def test_a_directory_that_vanishes_is_opened_anew(backend: RemoteBackend) -> None:
    backend.apply(None, P1, counts(("ann", 1)), {})
    shutil.rmtree(backend.directory)
    assert backend.versions() == []
    backend.load(P1, counts(("ann", 1)), {})
    with backend.view(P1) as view:
        assert contents(view, "counts") == {("ann",): (1,)}


def test_workers_side_by_side(make: MakeBackend, client: StateClient, tmp_path: Path) -> None:
    """Threads read one view, others commit to other shards; each has what it would have alone."""
    keys, run = many(20_000)
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            backend = make(tmp_path / str(number), TABLES)
            backend.apply(None, P1, {"counts": run}, {})
            with backend.view(P1) as view:
                backend.apply(P1, P2, counts((f"only {number}", number)), {})
                backend.drop([P1])
                assert view.get("counts", keys).values.column(0).to_pylist() == list(range(20_000))
                assert len(contents(view, "counts")) == 20_000
            with backend.view(P2) as after:
                assert users(after, f"only {number}", f"only {number + 1}") == [(number,), None]
        except BaseException as exc:  # noqa: BLE001  shown below
            failures.append(exc)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures
    eventually(lambda: client.call("statistics")["views"] == 0)


class TestOpenShards:
    """The registry alone, in this process."""

    @pytest.fixture
    def shards(self, executor: Executor) -> OpenShards:
        return OpenShards(executor.directory)

    @pytest.fixture
    def address(self, executor: Executor) -> ShardAddress:
        return ShardAddress.of(executor.directory / "disk" / "query" / new_id(), OWNED, {}, TABLES)

    def test_one_backend_for_all_uses(self, shards: OpenShards, address: ShardAddress) -> None:
        with shards.use(address) as one, shards.use(address) as two:
            assert one is two
        with shards.use(address) as three:
            assert three is one

    def test_what_cannot_be_opened_is_tried_again(self, shards: OpenShards, address: ShardAddress) -> None:
        bad = dataclasses.replace(address, tables={"counts": ["AAAA", "AAAA"]})
        for _ in range(2):
            with pytest.raises(CorruptionError), shards.use(bad):
                pass
        with shards.use(address) as backend:
            assert backend.versions() == []

    def test_another_definition_waits_for_those_who_use_the_old_one(
        self, shards: OpenShards, address: ShardAddress, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        other = ShardAddress.of(address.directory, OWNED, {}, {"counts": COUNTS, "pairs": PAIRS})
        with shards.use(address) as old:
            monkeypatch.setattr(open_shards, "REPLACE_WITHIN_SECONDS", 0.05)
            with pytest.raises(UnavailableError, match="stop the other query"), shards.use(other):
                pass
            monkeypatch.setattr(open_shards, "REPLACE_WITHIN_SECONDS", 10)
            found: list[Any] = []

            def use_other() -> None:
                with shards.use(other) as backend:
                    found.append(backend)

            waiting = threading.Thread(target=use_other)
            waiting.start()
        waiting.join()
        assert found[0] is not old
        assert set(found[0].tables) == {"counts", "pairs"}

    def test_unused_shards_are_closed(
        self, shards: OpenShards, address: ShardAddress, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with shards.use(address) as used:
            monkeypatch.setattr(open_shards, "IDLE_AFTER_MS", -1)
            shards.close_unused()
            with shards.use(address) as still:
                assert still is used
        monkeypatch.setattr(open_shards, "IDLE_AFTER_MS", 10_000)
        shards.close_unused()
        with shards.use(address) as still:
            assert still is used
        shutil.rmtree(address.directory)
        shards.close_unused()
        with shards.use(address) as opened:
            assert opened is not used
        monkeypatch.setattr(open_shards, "IDLE_AFTER_MS", -1)
        shards.close_unused()
        with shards.use(address) as again:
            assert again is not opened

    def test_closing_leaves_what_is_in_use(self, shards: OpenShards, address: ShardAddress) -> None:
        closed: list[str] = []
        second = dataclasses.replace(address, directory=address.directory + "x")
        with shards.use(address) as used, shards.use(second) as free:
            used.close = lambda: closed.append("used")  # type: ignore[method-assign]
            free.close = lambda: closed.append("free")  # type: ignore[method-assign]
            with shards.use(address):
                pass
        with shards.use(address):
            shards.close(0.05)
        assert closed == ["free"]


# Starting, ending, memory.


def test_a_server_that_does_not_start_is_an_error_with_the_end_of_its_log(executors: StartExecutor) -> None:
    executor = executors()
    local_dirs.socket_path(executor.directory).mkdir()
    with pytest.raises(UnavailableError, match=r"(?s)does not start.*its log ends with.*Traceback.*Error.*log=.*\.log"):
        executor.client().require_server()


def test_long_local_directories_of_one_executor_have_a_server_each(executors: StartExecutor) -> None:
    """One in RAM and one on disk, or of two queries; their sockets lie in one place, since their own have no room."""
    executor = executors()
    long = [executor.root / f"{name}-{'x' * 100}" for name in ("ram", "disk")]
    clients = [StateClient(local_dirs.executor_directory(root, executor.id)) for root in long]
    executor.clients += clients
    for client in clients:
        client.require_server()
    pids = [client.call("statistics")["pid"] for client in clients]
    assert len(set(pids)) == 2
    for client, pid in zip(clients, pids, strict=True):
        client.close()
        assert client.call("statistics")["pid"] == pid, "it is reached as before, also by a new connection"


def test_a_server_that_never_answers_is_waited_for_a_bounded_time(executors: StartExecutor) -> None:
    executor = executors()
    lock = local_dirs.take_lock(executor.directory)
    assert lock is not None
    client = executor.client()
    with pytest.raises(UnavailableError, match="does not start"):
        client.require_server(within_seconds=0.3)
    assert client._started is None, "somebody holds the lock: a second one must not be started"
    os.close(lock)
    client.require_server()


def test_what_was_committed_survives_the_end_of_the_executor(executors: StartExecutor, tmp_path: Path) -> None:
    """The server closes its shards, and the next executor's server takes their directories over."""
    versions: list[list[Pointer]] = []
    for _ in range(2):
        executor = executors()
        client = executor.client()
        directory = executor.directory / "disk" / "query" / "totals" / "shard-0000"
        shard = ShardAddress.of(directory, "rocksdb", {}, TABLES)
        client.require_server()
        backend = RemoteBackend(client, shard, TABLES, new_id)
        versions.append(backend.versions())
        if not versions[-1]:
            backend.apply(None, P1, counts(("ann", 1)), {})
            backend.apply(P1, P2, counts(("bob", 2)), {})
            backend.drop([P1])
            process = client._started
            assert process is not None
            executor.kill()
            assert process.wait(30) == 0
    assert versions == [[], [P2]]
    with backend.view(P2) as view:
        assert contents(view, "counts") == {("ann",): (1,), ("bob",): (2,)}


def test_the_server_does_without_pandas(backend: RemoteBackend, client: StateClient) -> None:
    """pyarrow would load it: 57 MB of a budget of memory, and a second before the first answer."""
    backend.apply(None, P1, counts(("ann", 1)), {})
    with backend.view(P1) as view:
        assert users(view, "ann") == [(1,)]
    pid = server_of(client)
    assert "pandas" not in Path(f"/proc/{pid}/maps").read_text()


def test_files_of_the_server_are_private(backend: RemoteBackend, executor: Executor) -> None:
    backend.apply(None, P1, {"counts": many(1000)[1]}, {})
    backend.freeze(P1)
    open_to_others = [p for p in executor.root.rglob("*") if not p.is_symlink() and p.lstat().st_mode & 0o077]
    assert open_to_others == []
