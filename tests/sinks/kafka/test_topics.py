"""Topics that are deleted or made anew under a query, and topics that get their ids under it."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import admin as kafka_admin

from holdfast.errors import InvalidArgumentError, StateLostError
from holdfast.snapshotter.storage.opening import open_storage
from holdfast.spark_integration.sinks.coordinator import Coordinator, Prepared
from holdfast.spark_integration.sinks.kafka.protocol import Answer
from tests.servers.programs import wait_until
from tests.sinks.kafka.lab import SCHEMA, Lab

pytestmark = [pytest.mark.kafka, pytest.mark.slow(20)]
read_field = Answer._field


def without_ids(answer: Answer, field: Any) -> Any:
    """Read a field as a broker writes it that has no ids of topics yet."""
    found = read_field(answer, field)
    return "0" * len(found) if field == "u" else found


@pytest.mark.parametrize("is_made_anew", [True, False])
def test_a_topic_that_was_deleted_under_a_running_query_is_said(lab: Lab, is_made_anew: bool) -> None:
    """What it showed is gone: before the decision and after it the query stops, also where another topic is there."""
    lab.sink.open(lab.query, SCHEMA)
    handle = lab.prepare("0")
    lab.sink.confirm(lab.query, 0, [handle])
    lab.sink.commit(lab.query, 0, [handle])
    handle = lab.prepare("1", batch_id=1)
    admin = kafka_admin.AdminClient({"bootstrap.servers": lab.server.servers})
    admin.delete_topics([lab.topic])[lab.topic].result(30)
    # A broker takes a moment to delete a topic, and another one for the offsets of groups at it.
    end_s = time.monotonic() + 20
    with suppress(StateLostError):
        while time.monotonic() < end_s:
            lab.sink.confirm(lab.query, 1, [handle])
            time.sleep(0.05)
    if is_made_anew:
        make_anew(lab, admin)
    for step in (lab.sink.confirm, lab.sink.commit, lab.sink.commit):
        with pytest.raises(StateLostError, match="deleted, and perhaps recreated"):
            step(lab.query, 1, [handle])
    if is_made_anew:
        assert lab.sink.open(lab.query, SCHEMA) == -1, "by which the next start knows"
        assert lab.shown() == []
    else:
        with pytest.raises(InvalidArgumentError, match="no such topic"):
            lab.sink.open(lab.query, SCHEMA)


@pytest.mark.parametrize("batches", [1, 2])
def test_a_topic_that_was_made_anew_while_the_query_was_away_is_said(lab: Lab, tmp_path: Path, batches: int) -> None:
    """Its first micro-batch is all that it had shown, so that the mark of a topic that shows none is but one behind."""

    def started(batch_id: int) -> Coordinator:
        run = Coordinator(lab.sink, lab.query, open_storage(str(tmp_path)), 100)
        run.start(batch_id, SCHEMA)
        return run

    run = started(0)
    for batch_id in range(batches):
        run.finish(batch_id, Prepared((lab.prepare(str(batch_id), batch_id=batch_id),), 1))
    admin = kafka_admin.AdminClient({"bootstrap.servers": lab.server.servers})
    admin.delete_topics([lab.topic])[lab.topic].result(30)
    wait_until(lambda: lab.topic not in admin.list_topics(timeout=10).topics, list)
    make_anew(lab, admin)
    for _ in range(2):
        with pytest.raises(StateLostError, match="deleted, and perhaps recreated"):
            started(batches)


def make_anew(lab: Lab, admin: kafka_admin.AdminClient) -> None:
    """Create the topic again, and return when the broker knows it."""
    admin.create_topics([kafka_admin.NewTopic(lab.topic, 1, 1)])[lab.topic].result(30)
    wait_until(lambda: lab.topic in admin.list_topics(timeout=10).topics, list)


@pytest.mark.parametrize("is_written", [True, False])
def test_a_topic_that_was_made_anew_before_the_first_decision_is_said(lab: Lab, is_written: bool) -> None:
    """What was written went with it; nothing was shown, so the next start writes into the one that is there."""
    lab.sink.open(lab.query, SCHEMA)
    handle = lab.prepare("gone") if is_written else None
    admin = kafka_admin.AdminClient({"bootstrap.servers": lab.server.servers})
    admin.delete_topics([lab.topic])[lab.topic].result(30)
    wait_until(lambda: lab.topic not in admin.list_topics(timeout=10).topics, list)
    make_anew(lab, admin)
    handle = handle or lab.prepare("gone")
    with pytest.raises(StateLostError, match="deleted, and perhaps recreated"):
        lab.sink.confirm(lab.query, 0, [handle])
    assert lab.sink.open(lab.query, SCHEMA) == -1
    lab.sink.abort(lab.query, lab.sink.leftovers(lab.query))
    handle = lab.prepare("shown")
    lab.sink.confirm(lab.query, 0, [handle])
    lab.sink.commit(lab.query, 0, [handle])
    assert lab.shown() == ["shown"]


def test_topics_that_get_their_ids_with_an_upgrade_are_the_same(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """Brokers say zeros until then; one that is downgraded does so again."""
    lab.sink.open(lab.query, SCHEMA)
    for batch, has_id in enumerate([False, True, False]):
        with monkeypatch.context() as patched:
            if not has_id:
                patched.setattr(Answer, "_field", without_ids)
            handle = lab.prepare(str(batch), batch_id=batch)
            lab.sink.confirm(lab.query, batch, [handle])
            lab.sink.commit(lab.query, batch, [handle])
            assert lab.sink.open(lab.query, SCHEMA) == batch
    assert lab.shown() == ["0", "1", "2"]
