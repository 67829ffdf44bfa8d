"""The commands on S3."""

from __future__ import annotations

import time

import pytest

from holdfast.snapshotter.storage.opening import open_storage
from tests.model.shard_history import ShardHistory
from tests.servers.s3 import ACCESS_KEY, BUCKET, SECRET_KEY, Moto, S3Server, Versitygw
from tests.unit.holdfast.commands.state_dir import put_record, run


@pytest.fixture(
    params=[
        pytest.param("moto", marks=pytest.mark.s3),
        pytest.param("versitygw", marks=[pytest.mark.s3, pytest.mark.all]),
    ]
)
def server(request: pytest.FixtureRequest) -> S3Server:
    found: Moto | Versitygw = request.getfixturevalue(request.param)
    return found


def test_on_s3_with_options_from_the_environment(server: S3Server) -> None:
    """All four commands; credentials come from the environment and are in no output."""
    url = f"s3://{BUCKET}/commands"
    with open_storage(url, server.options()) as storage:
        put_record(storage)
        history = ShardHistory(storage)
        made = history.grow(None, 29, snapshot_every=10)
        time.sleep(1.1)  # time stamps are in whole seconds
        history.grow(made[-1], 1)
    options = (
        f"key={ACCESS_KEY} secret={SECRET_KEY} client_kwargs.endpoint_url={server.url} "
        "client_kwargs.region_name=us-east-1"
    )
    outputs = []
    for command in (["inspect"], ["log"], ["verify"], ["gc", "--retain", "5", "--grace", "0", "--yes"], ["verify"]):
        for as_json in ([], ["--json"]):
            result = run(command[0], url, *command[1:], *as_json, HOLDFAST_STORAGE_OPTIONS=options)
            assert result.exit_code == 0, (command, result.output, result.exception)
            outputs.append(result.output)
    assert "9 objects deleted" in outputs[6]
    assert not [o for o in outputs if SECRET_KEY in o or ACCESS_KEY in o]
    with open_storage(url, server.options()) as storage:
        left = {info.key for info in storage.list("")}
        storage.delete(left)
    assert not [key for key in left if "probes" in key]
    assert len([key for key in left if "/commits/" in key]) == 21
