"""What travels between a worker and its state server: slices of state, errors, and requests that are refused."""

from __future__ import annotations

import dataclasses
import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from holdfast import errors
from holdfast.clock import new_id
from holdfast.errors import (
    HoldfastError,
    InvalidArgumentError,
    NotFoundError,
)
from holdfast.spark_integration.client import streams as state_streams
from holdfast.spark_integration.client.connection import StateClient
from holdfast.spark_integration.client.exchange import Exchange
from holdfast.spark_integration.client.messages import ServerLostError, decode_error, encode_error
from holdfast.spark_integration.client.remote_backend import RemoteBackend
from holdfast.testing import MakeBackend
from holdfast.testing.state_rows import P1, P2, contents, counts, users
from tests.faults.executor_process import (
    Executor,
    eventually,
)
from tests.faults.remote_backend.rows import TABLES, encoded, exchanged, many, server_of

pytestmark = pytest.mark.slow


def test_more_than_a_message_holds(backend: RemoteBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gets, scans, prefixes and commits of many slices, each bounded in rows and bytes."""
    monkeypatch.setattr(state_streams, "SLICE_BYTES", 10_000)
    monkeypatch.setattr(state_streams, "SLICE_ROWS", 700)
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
    slices = list(state_streams.slices(batch))
    assert pa.Table.from_batches(slices).combine_chunks().to_batches()[0].equals(batch)
    assert max(p.num_rows for p in slices) <= state_streams.SLICE_ROWS
    large = [p for p in slices if p.nbytes > state_streams.SLICE_BYTES]
    assert [p.num_rows for p in large] == [1], "only a single row may be larger"
    assert [p.num_rows for p in state_streams.slices(batch.slice(0, 0))] == [0]


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
        slices = list(state_streams.byte_slices(buffers))
        assert b"".join(part.column(0).buffers()[1].slice(0, part.num_rows) for part in slices if len(part)) == (
            b"".join(buffers)
        )
        assert max(part.num_rows for part in slices) <= state_streams.SLICE_BYTES
        assert len(slices) < 20
        sizes = {"counts": sum(b.size for b in buffers)}
        assert state_streams.receive_runs(sizes, slices, TABLES, tmp_path)["counts"].batch.equals(run.batch)


def test_runs_too_large_for_memory_are_received_into_a_file_without_a_name(tmp_path: Path) -> None:
    _, run = many(50_000)
    data = encoded(run)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(state_streams, "FILE_BYTES", 1000)
        found = state_streams.receive_runs({"counts": data.size}, state_streams.byte_slices([data]), TABLES, tmp_path)
    assert found["counts"].batch.equals(run.batch)
    assert list(tmp_path.iterdir()) == []


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
    assert str(P2) in str(caught.value)
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
        exchanged(client, message, [pa.record_batch({"nonsense": [1.5]})], pa.schema({"nonsense": pa.float64()}))
    lost = isinstance(caught.value, ServerLostError) and "another runs now" not in str(caught.value)
    assert not lost, message


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
