"""The test of a state directory at the start names what is not allowed, and leaves nothing behind."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from holdfast.errors import InvalidArgumentError, UnavailableError
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.snapshotter.storage.opening import open_storage
from holdfast.snapshotter.storage.probe import probe_storage
from holdfast.snapshotter.storage.wrappers import WrappedStorage
from holdfast.testing.faulty_storage import Action, Fault, FaultyStorage
from tests.servers.hdfs import Hdfs
from tests.servers.s3 import BUCKET, S3Server

if TYPE_CHECKING:
    from typing_extensions import Buffer

PERMISSIONS = {"put": "s3:PutObject", "get": "s3:GetObject", "list": "s3:ListBucket", "delete": "s3:DeleteObject"}
_PLACES = itertools.count()


@pytest.fixture
def memory() -> Iterator[ObjectStorage]:
    with open_storage(f"memory://probe/{next(_PLACES)}") as storage:
        yield storage


@pytest.fixture(params=["moto", "versitygw"])
def server(request: pytest.FixtureRequest) -> S3Server:
    found: S3Server = request.getfixturevalue(request.param)
    return found


def test_it_does_each_thing_once_and_leaves_nothing(memory: ObjectStorage) -> None:
    storage = FaultyStorage(memory)
    probe_storage(storage, "totals/probes", new_id=lambda: "5f0c")
    assert [operation.action for operation in storage.operations] == ["put", "put", "get", "list", "delete"]
    assert storage.operations[0].keys == ("totals/probes/probe-5f0c",)
    assert not memory.list("")


class _Heedless(WrappedStorage):
    """Takes the condition of a put, and does not heed it."""

    def put_if_absent(self, key: str, data: Buffer) -> None:
        self.inner.put(key, data)


def test_a_store_that_does_not_heed_the_condition_is_refused(memory: ObjectStorage) -> None:
    """Some gateways to S3 take If-None-Match and replace the object all the same: there, two drivers would decide."""
    with pytest.raises(InvalidArgumentError, match=r"failed the check.*only if it is absent.*Google"):
        probe_storage(_Heedless(memory), "totals/probes")
    assert not memory.list("")


def test_a_store_that_answers_from_a_copy_is_refused(memory: ObjectStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "list", lambda prefix: [])
    with pytest.raises(UnavailableError, match="right after its put"):
        probe_storage(memory, "totals/probes")


@pytest.mark.parametrize("action", ["put", "get", "list", "delete"])
def test_a_failure_that_may_pass_stays_one(memory: ObjectStorage, action: Action) -> None:
    storage = FaultyStorage(memory, [Fault("fail", action=action)])
    with pytest.raises(UnavailableError, match="injected fault"):
        probe_storage(storage, "totals/probes")
    storage.assert_all_hit()
    assert len(memory.list("")) == (action == "delete")


@pytest.mark.s3
@pytest.mark.parametrize("action", PERMISSIONS)
def test_s3_permission_that_is_missing(server: S3Server, action: str) -> None:
    url = f"s3://{BUCKET}/probe/{next(_PLACES)}"
    message = rf"state\.dir failed.*access denied.*action={action} .*key=totals/probes/.*permission="
    with server.user_without(PERMISSIONS[action]) as options, open_storage(url, options) as storage:
        with pytest.raises(InvalidArgumentError, match=message + PERMISSIONS[action]) as raised:
            probe_storage(storage, "totals/probes")
        assert str(options["secret"]) not in str(raised.value)


@pytest.mark.s3
def test_s3_user_with_all_permissions(server: S3Server) -> None:
    """A user who lacks only what is never asked for passes: so it was the missing permission above."""
    url = f"s3://{BUCKET}/probe/{next(_PLACES)}"
    with server.user_without("s3:PutBucketTagging") as options, open_storage(url, options) as storage:
        probe_storage(storage, "totals/probes")
        assert not storage.list("")


@pytest.mark.s3
def test_s3_bucket_that_is_absent(server: S3Server) -> None:
    with (
        open_storage("s3://no-such-bucket/app", server.options()) as storage,
        pytest.raises(InvalidArgumentError, match=r"no such bucket: create it.*action=put key=totals/probes/"),
    ):
        probe_storage(storage, "totals/probes")


@pytest.mark.s3
def test_s3_wrong_credentials(server: S3Server) -> None:
    with server.wrong_credentials() as options, open_storage(f"s3://{BUCKET}/probe", options) as storage:
        with pytest.raises(InvalidArgumentError, match=r"check credentials.*action=put key=totals/probes/") as raised:
            probe_storage(storage, "totals/probes")
        assert str(options["secret"]) not in str(raised.value)


@pytest.mark.hdfs
@pytest.mark.parametrize(("mode", "action"), [(0o500, "put"), (0o555, "put"), (0o333, "list")])
def test_hdfs_folder_of_somebody_else(hdfs: Hdfs, mode: int, action: str) -> None:
    root = f"/probe/{next(_PLACES)}"
    hdfs.client().mkdirs(f"{root}/totals/probes", create_parent=True)
    hdfs.client().set_permission(f"{root}/totals/probes", mode)
    with (
        hdfs.other_user(),
        open_storage(hdfs.url + root, hdfs.options()) as storage,
        pytest.raises(InvalidArgumentError, match=f"access denied: check the user.*action={action} key=totals/probes/"),
    ):
        probe_storage(storage, "totals/probes")
    assert not hdfs.files(root), "nothing is left behind"


@pytest.mark.hdfs
def test_hdfs(hdfs: Hdfs) -> None:
    with open_storage(f"{hdfs.url}/probe/{next(_PLACES)}", hdfs.options()) as storage:
        probe_storage(storage, "totals/probes")
        assert not storage.list("")


@pytest.mark.skipif(os.geteuid() == 0, reason="permissions do not bind root")
def test_folder_that_can_only_be_read(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with open_storage(str(tmp_path)) as storage, pytest.raises(InvalidArgumentError, match="make the folder writable"):
        probe_storage(storage, "totals/probes")


def test_folder_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "totals").write_bytes(b"1")
    with open_storage(str(tmp_path)) as storage, pytest.raises(InvalidArgumentError, match="action=put key=totals/"):
        probe_storage(storage, "totals/probes")
