"""The Kafka sink on a broker: transactions, topics that go or are made anew, and two drivers."""

from __future__ import annotations

import datetime as dt
import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from confluent_kafka import admin as kafka_admin

from holdfast import clock
from holdfast.errors import FencedError, InvalidArgumentError, StateLostError, UnavailableError
from holdfast.snapshotter.storage.opening import open_storage
from holdfast.spark_integration.sinks.coordinator import Coordinator, Prepared
from holdfast.spark_integration.sinks.kafka.brokers import Cluster
from holdfast.spark_integration.sinks.kafka.protocol import Request, Response, TransactionDescription
from holdfast.spark_integration.sinks.kafka.sink import KafkaSink
from holdfast.spark_integration.sinks.two_phase_sink import Handle, SinkQuery, TwoPhaseSink
from tests import sink_drivers
from tests.model.turns import Turns
from tests.read_kafka import committed, transactional_ids
from tests.servers.kafka import PASSWORD, USER, Kafka
from tests.servers.programs import wait_until
from tests.sink_drivers import Driver, World, judge, prepared, stand_still_anywhere
from tests.sinks.kafka.conftest import SCHEMA, Lab
from tests.tiers import ALL, LONG, cases

pytestmark = [pytest.mark.kafka, pytest.mark.slow(40)]


@pytest.mark.parametrize("how", ["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "TLS"])
def test_each_login_writes_commits_and_finds(kafka: Kafka, how: str) -> None:
    kafka.add_scram_user()
    lab = Lab(kafka, kafka.tls_options() if how == "TLS" else kafka.sasl_options(how))
    assert lab.sink.open(lab.query, SCHEMA) == -1
    handle, other = lab.prepare("shown"), lab.prepare("not shown")
    assert {str(one["transactional_id"]) for one in lab.sink.leftovers(lab.query)} == {
        str(one["transactional_id"]) for one in (handle, other)
    }
    lab.sink.confirm(lab.query, 0, [handle])
    lab.sink.commit(lab.query, 0, [handle])
    assert lab.shown() == ["shown"]


@pytest.mark.parametrize("how", ["PLAIN", "SCRAM-SHA-256"])
def test_a_wrong_password_is_said_and_shown_nowhere(
    kafka: Kafka, how: str, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    kafka.add_scram_user()
    wrong = f"{PASSWORD}-and-wrong"
    lab = Lab(kafka, kafka.sasl_options(how) | {"sasl.password": wrong}, timeout_s=10)
    said = []
    with caplog.at_level(logging.DEBUG):
        for step in (lambda: lab.sink.open(lab.query, SCHEMA), lab.begin):
            with pytest.raises(InvalidArgumentError, match=r"sasl\.password") as raised:
                step()
            said.append(str(raised.getrepr(chain=True, showlocals=False)))
    out, err = capfd.readouterr()
    assert PASSWORD not in "".join([*said, caplog.text, out, err])


def test_an_option_that_does_not_exist_is_named(lab: Lab) -> None:
    options = {**lab.query.options, "no.such.option": "1", "sasl.password": PASSWORD}
    with pytest.raises(InvalidArgumentError, match=r"no\.such\.option") as raised:
        lab.sink.open(SinkQuery(lab.sink.name, lab.query.query_id, options=options), SCHEMA)
    assert PASSWORD not in str(raised.getrepr(chain=True))


def test_a_topic_that_is_missing_is_said_before_anything_is_written(lab: Lab) -> None:
    other = KafkaSink(lab.sink.name, "no-such-topic")
    with pytest.raises(InvalidArgumentError, match="no such topic"):
        other.open(lab.query, SCHEMA)


@pytest.fixture
def denied(kafka: Kafka) -> Iterator[Lab]:
    """Yield a lab of a user to whom tests deny things."""
    lab = Lab(kafka, kafka.sasl_options())
    yield lab
    admin = kafka_admin.AdminClient({"bootstrap.servers": kafka.servers})
    kinds = kafka_admin
    everything = kinds.AclBindingFilter(
        kinds.ResourceType.ANY,
        None,
        kinds.ResourcePatternType.ANY,
        f"User:{USER}",
        None,
        kinds.AclOperation.ANY,
        kinds.AclPermissionType.ANY,
    )
    for deleted in admin.delete_acls([everything]).values():
        deleted.result(30)


def deny(lab: Lab, kind: kafka_admin.ResourceType, name: str, operation: kafka_admin.AclOperation) -> None:
    pattern, permission = kafka_admin.ResourcePatternType.LITERAL, kafka_admin.AclPermissionType.DENY
    acl = kafka_admin.AclBinding(kind, name, pattern, f"User:{USER}", "*", operation, permission)
    admin = kafka_admin.AdminClient({"bootstrap.servers": lab.server.servers})
    admin.create_acls([acl])[acl].result(30)
    time.sleep(0.3)  # until the broker has read it


@pytest.mark.parametrize(
    ("kind", "operation", "said"),
    [
        ("TOPIC", "WRITE", "write to the topic"),
        ("TRANSACTIONAL_ID", "WRITE", "transactional"),
        ("GROUP", "READ", "group"),
    ],
)
def test_a_right_that_is_missing_is_named(denied: Lab, kind: str, operation: str, said: str) -> None:
    group = f"holdfast.{denied.sink.name}"
    name = {"TOPIC": denied.topic, "TRANSACTIONAL_ID": f"{group}.check", "GROUP": group}[kind]
    deny(denied, kafka_admin.ResourceType[kind], name, kafka_admin.AclOperation[operation])
    with pytest.raises(InvalidArgumentError, match=said):
        denied.sink.open(denied.query, SCHEMA)


def test_messages_arrive_as_the_rows_are(lab: Lab) -> None:
    moment = dt.datetime(2026, 11, 24, 1, 2, 3, 456_000, dt.UTC)
    topic = lab.server.add_topic(3)
    schema = pa.schema(
        {
            "topic": pa.string(),
            "key": pa.binary(),
            "value": pa.string(),
            "partition": pa.int32(),
            "timestamp": pa.timestamp("us", "UTC"),
            "headers": pa.list_(pa.struct({"key": pa.string(), "value": pa.binary()})),
        }
    )
    rows = [
        {"topic": topic, "key": b"k", "value": "v", "partition": 2, "timestamp": moment,
         "headers": [{"key": "h", "value": b"1"}, {"key": "h", "value": None}]},
        {"topic": topic, "key": b"\0", "value": None, "partition": 1, "timestamp": None, "headers": None},
    ]  # fmt: skip
    sink = KafkaSink(lab.sink.name)
    assert sink.open(lab.query, schema) is None
    sink.commit(lab.query, 0, [prepared(sink, lab.query, pa.RecordBatch.from_pylist(rows, schema))])
    deleted, full = sorted(committed(lab.server, topic), key=lambda one: one.partition() or 0)
    assert (full.key(), full.value(), full.partition(), full.timestamp()[1]) == (b"k", b"v", 2, 1795482123456)
    assert full.headers() == [("h", b"1"), ("h", None)]
    assert (deleted.key(), deleted.value(), deleted.partition(), deleted.headers()) == (b"\0", None, 1, None)


def test_keys_go_to_the_partitions_that_kafkas_own_clients_choose(kafka: Kafka) -> None:
    lab = Lab(kafka, {"bootstrap.servers": kafka.servers})
    lab.topic = kafka.add_topic(10)
    sink = KafkaSink(lab.sink.name, lab.topic)
    schema = pa.schema({"key": pa.string(), "value": pa.string()})
    sink.open(lab.query, schema)
    rows = pa.record_batch([["a", "b", "holdfast"], ["x", "x", "x"]], schema=schema)
    sink.commit(lab.query, 0, [prepared(sink, lab.query, rows)])
    # murmur2(key) & 0x7fffffff % 10, as Java's Utils.toPositive(Utils.murmur2(…)) has it.
    found = {(one.key() or b"").decode(): one.partition() for one in committed(kafka, lab.topic)}
    assert found == {key: _murmur2(key.encode()) % 10 for key in ("a", "b", "holdfast")}


def _murmur2(data: bytes) -> int:
    mixer, mask = 0x5BD1E995, 0xFFFFFFFF
    value = 0x9747B28C ^ len(data)
    whole = len(data) // 4 * 4
    for start in range(0, whole, 4):
        part = int.from_bytes(data[start : start + 4], "little") * mixer & mask
        part = (part ^ part >> 24) * mixer & mask
        value = (value * mixer & mask) ^ part
    if data[whole:]:
        value = (value ^ int.from_bytes(data[whole:], "little")) * mixer & mask
    value = (value ^ value >> 13) * mixer & mask
    return (value ^ value >> 15) & 0x7FFFFFFF


@pytest.mark.parametrize(
    ("row", "said"),
    [({"value": "x" * 2_000_000, "partition": 0}, "larger"), ({"value": "x", "partition": 7}, "no such partition")],
)
def test_what_kafka_does_not_take_is_said_and_nothing_is_left(lab: Lab, row: dict[str, object], said: str) -> None:
    schema = pa.schema({"value": pa.string(), "partition": pa.int32()})
    transaction = lab.begin(schema=schema)
    with pytest.raises(InvalidArgumentError, match=said):  # noqa: PT012  either may notice it
        transaction.write(pa.RecordBatch.from_pylist([row], schema))
        transaction.prepare()
    transaction.abort()
    assert lab.sink.leftovers(lab.query) == []
    assert lab.shown() == []


def test_a_decided_transaction_that_the_broker_has_ended_is_said_to_be_lost(kafka: Kafka) -> None:
    lab = Lab(kafka, {"bootstrap.servers": kafka.servers, "transaction.timeout.ms": "3000"})
    lab.sink.open(lab.query, SCHEMA)
    handles = [lab.prepare("lost", batch_id=7)]
    end_s = time.monotonic() + 30
    while lab.sink.leftovers(lab.query) and time.monotonic() < end_s:
        time.sleep(0.2)
    handles.append(lab.prepare("alive", batch_id=7))
    with pytest.raises(UnavailableError, match=r"transaction\.timeout\.ms"):
        lab.sink.confirm(lab.query, 7, handles)
    for _ in range(2):
        with pytest.raises(StateLostError, match=r"batch=7 lost=1 of=2 visible=0"):
            lab.sink.commit(lab.query, 7, handles)
    lab.sink.abort(lab.query, handles)
    assert lab.shown() == []


def test_another_drivers_attempt_at_a_shown_batch_is_given_up(lab: Lab, caplog: pytest.LogCaptureFixture) -> None:
    """Of two copies of a query, with a state directory each: the late one must not send its messages, too."""
    lab.sink.open(lab.query, SCHEMA)
    late, counts = lab.prepare("late"), lab.prepare("counts")
    lab.sink.commit(lab.query, 0, [counts])
    late = lab.prepare("later")
    lab.sink.commit(lab.query, 0, [late])
    assert "already shows micro-batch 0" in caplog.text
    assert lab.sink.leftovers(lab.query) == []
    assert lab.shown() == ["counts"]


def test_text_that_is_not_utf8_arrives_as_the_bytes_that_it_is(lab: Lab) -> None:
    """Spark's sink sends them too; to decode them in Python would end the query at such a record for good."""
    text = pa.array([b"caf\xe9", "café".encode()]).cast(pa.string(), safe=False)
    rows = pa.record_batch({"value": text, "key": text})
    lab.sink.open(lab.query, rows.schema)
    lab.sink.commit(lab.query, 0, [prepared(lab.sink, lab.query, rows)])
    found = sorted((one.key(), one.value()) for one in committed(lab.server, lab.topic))
    assert found == sorted((each, each) for each in (b"caf\xe9", "café".encode()))


def test_what_the_mark_shows_was_committed_where_coordinators_have_forgotten_a_part(lab: Lab) -> None:
    """Ids expire one after the other: a forgotten one beside a known one is not lost."""
    lab.sink.open(lab.query, SCHEMA)
    handle = lab.prepare("a")
    lab.sink.commit(lab.query, 0, [handle])
    forgotten = {**handle, "transactional_id": f"{handle['transactional_id']}0"}
    lab.sink.commit(lab.query, 0, [handle, forgotten])
    with pytest.raises(StateLostError, match=r"batch=1 lost=1 of=2"):
        lab.sink.commit(lab.query, 1, [handle, forgotten])
    lost = lab.prepare("b")
    lab.sink.abort(lab.query, [lost])
    with pytest.raises(StateLostError, match=r"batch=0 lost=1 of=2"):
        lab.sink.commit(lab.query, 0, [handle, lost])


def test_a_longer_time_than_the_broker_allows_is_refused(kafka: Kafka) -> None:
    lab = Lab(kafka, {"bootstrap.servers": kafka.servers, "transaction.timeout.ms": "900001"})
    for step in (lambda: lab.sink.open(lab.query, SCHEMA), lab.begin):
        with pytest.raises(InvalidArgumentError, match=r"transaction\.max\.timeout\.ms"):
            step()


@pytest.mark.parametrize("has_written", [True, False])
def test_a_zombie_that_was_ended_cannot_write_any_more(lab: Lab, has_written: bool) -> None:
    lab.sink.open(lab.query, SCHEMA)
    zombie = lab.begin()
    rows = pa.record_batch({"value": pa.array(["zombie"])})
    if has_written:
        zombie.write(rows)
        while not committed(lab.server, lab.topic, "read_uncommitted"):
            time.sleep(0.01)
    lab.sink.abort(lab.query, lab.sink.leftovers(lab.query))
    with pytest.raises(FencedError):  # noqa: PT012  either may notice it
        for _ in range(2):
            zombie.write(rows)
        zombie.prepare()
    zombie.abort()
    assert lab.sink.leftovers(lab.query) == []
    lab.sink.commit(lab.query, 0, [lab.prepare("later")])
    assert lab.shown() == ["later"]


def test_the_broker_is_killed_at_each_step(kafka: Kafka) -> None:
    killed_after = cases(["prepare", "commit", "begin", "write", "confirm"])

    def restart(after: str) -> None:
        if after in killed_after:
            kafka.restart()

    lab = Lab(kafka, {"bootstrap.servers": kafka.servers}, timeout_s=30)
    lab.sink.open(lab.query, SCHEMA)
    transaction = lab.begin()
    restart("begin")
    transaction.write(pa.record_batch({"value": pa.array(["a"])}))
    restart("write")
    handle = transaction.prepare()
    restart("prepare")
    lab.sink.confirm(lab.query, 0, [handle])
    restart("confirm")
    lab.sink.commit(lab.query, 0, [handle])
    restart("commit")
    lab.sink.commit(lab.query, 0, [handle])
    assert lab.sink.open(lab.query, SCHEMA) == 0
    assert lab.shown() == ["a"]


@pytest.mark.all
def test_a_broker_that_is_away_is_waited_for_a_limited_time(kafka: Kafka) -> None:
    lab = Lab(kafka, {"bootstrap.servers": kafka.servers})
    lab.sink.open(lab.query, SCHEMA)
    handle = lab.prepare("a")
    lab.sink = KafkaSink(lab.sink.name, lab.topic, timeout_s=1)
    kafka.broker.kill()
    try:
        steps = {
            "open": lambda: lab.sink.open(lab.query, SCHEMA),
            "begin": lab.begin,
            "confirm": lambda: lab.sink.confirm(lab.query, 0, [handle]),
            "commit": lambda: lab.sink.commit(lab.query, 0, [handle]),
            "abort": lambda: lab.sink.abort(lab.query, [handle]),
            "leftovers": lambda: lab.sink.leftovers(lab.query),
        }
        for name, step in steps.items():
            start_s = time.monotonic()
            with pytest.raises(UnavailableError):
                step()
            assert time.monotonic() - start_s < 10, name
    finally:
        kafka.start()
    lab.sink = KafkaSink(lab.sink.name, lab.topic, timeout_s=20)
    lab.sink.commit(lab.query, 0, [handle])
    assert lab.shown() == ["a"]


def known_ids(lab: Lab) -> dict[str, TransactionDescription]:
    """Return all transactional ids of the query that coordinators remember."""
    return transactional_ids(lab.server, f"holdfast.{lab.sink.name}.{lab.query.query_id}.")


def test_a_spare_id_is_taken_up_and_leaves_no_new_one(lab: Lab) -> None:
    """Coordinators keep each id for a week: their number follows partitions, not micro-batches."""
    lab.sink.open(lab.query, SCHEMA)
    handles: list[Handle] = []
    for batch in range(6):
        handles.append(lab.prepare(str(batch), batch_id=batch, spare=handles[-2] if batch > 1 else None))
        lab.sink.confirm(lab.query, batch, handles[-1:])
        lab.sink.commit(lab.query, batch, handles[-1:])
        if batch:
            lab.sink.commit(lab.query, batch, handles[-1:])
    assert len(known_ids(lab)) == 2
    assert len({(one["producer_id"], one["epoch"]) for one in handles}) == 6
    assert lab.shown() == [str(batch) for batch in range(6)]


def test_an_id_that_is_no_longer_as_it_was_left_is_not_taken_up(lab: Lab) -> None:
    """Another attempt has it, it was fenced, it is of another query, or it was forgotten: a new one is as good."""
    lab.sink.open(lab.query, SCHEMA)
    first = lab.prepare("0")
    lab.sink.commit(lab.query, 0, [first])
    taken = lab.prepare("1", batch_id=1, spare=first)
    others = [
        lab.prepare("2", batch_id=1, spare=spare)
        for spare in (first, taken, {**first, "transactional_id": "somebody's"}, {**first, "producer_id": -1})
    ]
    ids = {str(one["transactional_id"]) for one in (taken, *others)}
    assert taken["transactional_id"] == first["transactional_id"]
    assert len(ids) == 5
    lab.sink.commit(lab.query, 1, [taken])
    assert lab.shown() == ["0", "1"]
    lab.sink.abort(lab.query, lab.sink.leftovers(lab.query))
    assert lab.prepare("3", batch_id=2, spare=others[0])["transactional_id"] not in ids


def test_what_was_ended_costs_later_starts_nothing(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """Coordinators keep ids for a week: a start that asked for each would follow the number of starts before it."""
    lab.sink.open(lab.query, SCHEMA)
    for _ in range(3):
        lab.prepare("dead")
    lab.sink.abort(lab.query, lab.sink.leftovers(lab.query))
    assert {one.state for one in known_ids(lab).values()} == {"CompleteAbort"}
    asked: list[str] = []
    ask = Cluster._ask

    def noted(cluster: Cluster, address: tuple[str, int], request: Request[object]) -> object:
        asked.append(request.name)
        return ask(cluster, address, request)

    monkeypatch.setattr(Cluster, "_ask", noted)
    assert lab.sink.leftovers(lab.query) == []
    assert asked == ["Metadata", "ListTransactions"]


def test_a_zombie_with_a_spare_id_is_fenced_once(lab: Lab) -> None:
    """Before its first message, too; later starts leave alone what is fenced already."""
    lab.sink.open(lab.query, SCHEMA)
    first = lab.prepare("0")
    lab.sink.commit(lab.query, 0, [first])
    zombie = lab.begin(1, spare=first)
    assert lab.sink.leftovers(lab.query) == []
    fenced = known_ids(lab)
    assert lab.sink.leftovers(lab.query) == []
    assert known_ids(lab) == fenced
    with pytest.raises(FencedError):  # noqa: PT012  either may notice it
        zombie.write(pa.record_batch({"value": pa.array(["zombie"])}))
        zombie.prepare()
    zombie.abort()
    assert lab.shown() == ["0"]


read_field = Response._field


def without_ids(answer: Response, field: Any) -> Any:
    """Read a field as a broker writes it that has no ids of topics yet."""
    found = read_field(answer, field)
    return "0" * len(found) if field == "u" else found


@pytest.mark.slow(20)
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
        with pytest.raises(StateLostError, match="deleted or recreated"):
            step(lab.query, 1, [handle])
    if is_made_anew:
        assert lab.sink.open(lab.query, SCHEMA) == -1, "by which the next start knows"
        assert lab.shown() == []
    else:
        with pytest.raises(InvalidArgumentError, match="no such topic"):
            lab.sink.open(lab.query, SCHEMA)


@pytest.mark.slow(20)
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
    remake(lab)
    for _ in range(2):
        with pytest.raises(StateLostError, match="deleted or recreated"):
            started(batches)


def remake(lab: Lab) -> None:
    """Delete the topic and create it again; return when the broker knows it."""
    admin = kafka_admin.AdminClient({"bootstrap.servers": lab.server.servers})
    admin.delete_topics([lab.topic])[lab.topic].result(30)
    wait_until(lambda: lab.topic not in admin.list_topics(timeout=10).topics, list)
    make_anew(lab, admin)


def make_anew(lab: Lab, admin: kafka_admin.AdminClient) -> None:
    """Create the topic again, and return when the broker knows it."""
    admin.create_topics([kafka_admin.NewTopic(lab.topic, 1, 1)])[lab.topic].result(30)
    wait_until(lambda: lab.topic in admin.list_topics(timeout=10).topics, list)


@pytest.mark.slow(20)
@pytest.mark.parametrize("is_written", [True, False])
def test_a_topic_that_was_made_anew_before_the_first_decision_is_said(lab: Lab, is_written: bool) -> None:
    """What was written went with it; nothing was shown, so the next start writes into the one that is there."""
    lab.sink.open(lab.query, SCHEMA)
    handle = lab.prepare("gone") if is_written else None
    remake(lab)
    handle = handle or lab.prepare("gone")
    with pytest.raises(StateLostError, match="deleted or recreated"):
        lab.sink.confirm(lab.query, 0, [handle])
    assert lab.sink.open(lab.query, SCHEMA) == -1
    lab.sink.abort(lab.query, lab.sink.leftovers(lab.query))
    handle = lab.prepare("shown")
    lab.sink.confirm(lab.query, 0, [handle])
    lab.sink.commit(lab.query, 0, [handle])
    assert lab.shown() == ["shown"]


@pytest.mark.slow(20)
def test_topics_that_get_their_ids_with_an_upgrade_are_the_same(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """Brokers say zeros until then; one that is downgraded does so again."""
    lab.sink.open(lab.query, SCHEMA)
    for batch, has_id in enumerate([False, True, False]):
        with monkeypatch.context() as patched:
            if not has_id:
                patched.setattr(Response, "_field", without_ids)
            handle = lab.prepare(str(batch), batch_id=batch)
            lab.sink.confirm(lab.query, batch, [handle])
            lab.sink.commit(lab.query, batch, [handle])
            assert lab.sink.open(lab.query, SCHEMA) == batch
    assert lab.shown() == ["0", "1", "2"]


def test_what_an_ended_query_prepares_when_it_wakes_goes_with_the_next_start(lab: Lab, tmp_path: Path) -> None:
    """Its driver dies before it is told. Readers would wait for its transaction until the broker ends it."""

    def started(query: SinkQuery) -> Coordinator:
        run = Coordinator(lab.sink, query, open_storage(str(tmp_path)), 100)
        run.start(0, SCHEMA)
        return run

    started(lab.query).finish(0, Prepared((lab.prepare("shown"),), 1))
    heir = SinkQuery(lab.sink.name, clock.new_uuid(), lab.query.query_id, lab.query.options)
    started(heir)
    late = lab.prepare("late", batch_id=1)
    assert list(lab.sink.leftovers(lab.query)) == [late]
    started(heir)
    assert list(lab.sink.leftovers(lab.query)) == []
    assert lab.shown() == ["shown"]


class KafkaWorld(World):
    """A topic; each request of a driver is a step, those of its tasks, too."""

    def __init__(self, lab: Lab, state_dir: Path) -> None:
        super().__init__(open_storage(str(state_dir)), lab.query)
        self.lab = lab

    def sink(self, turns: Turns) -> TwoPhaseSink:
        return self.lab.sink

    def shown(self) -> Sequence[str]:
        return self.lab.shown()

    def left(self) -> Sequence[object]:
        return self.lab.sink.leftovers(self.query)


@pytest.fixture
def make(kafka: Kafka, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], KafkaWorld]:
    """Return what makes a new world; a driver's turns know what it is about to ask."""
    ask = Cluster._ask

    def ask_in_turn(cluster: Cluster, address: Any, request: Any) -> Any:
        driver = threading.current_thread()
        if not isinstance(driver, Driver):
            return ask(cluster, address, request)
        driver.turns.asks = request.name
        with driver.turns.around():
            driver.turns.asks = None
            return ask(cluster, address, request)

    monkeypatch.setattr(Cluster, "_ask", ask_in_turn)
    monkeypatch.setattr(sink_drivers, "SCHEMA", SCHEMA)
    number = itertools.count()
    return lambda: KafkaWorld(Lab(kafka, {"bootstrap.servers": kafka.servers}), tmp_path / str(next(number)))


@pytest.mark.timeout(1800)
@pytest.mark.slow(5)
@pytest.mark.parametrize("marks", range(3))
def test_a_driver_that_writes_its_mark_late(make: Callable[[], KafkaWorld], marks: int) -> None:
    """It turns the mark back behind what its successor has shown, which is not taken for a topic that was emptied."""
    with make() as world:
        one = Driver(world, "one")
        for _ in range(marks):
            _go_to_its_mark(one)
            one.go(1)
        _go_to_its_mark(one)
        other = Driver(world, "other")
        other.go()
        one.go()
        judge(world, one, other)


@pytest.mark.timeout(1800)
@pytest.mark.slow(25)
def test_a_driver_that_stands_still_anywhere(make: Callable[[], KafkaWorld]) -> None:
    """One stands still before any of its requests, another one starts and stands still, and the first one wakes."""
    stand_still_anywhere(
        make, first_every=1 if LONG else 4 if ALL else 31, second_every=7 if LONG else 11 if ALL else 37
    )


def _go_to_its_mark(driver: Driver) -> None:
    while driver.turns.asks != "OffsetCommit":
        driver.go(1)
        assert driver.error is None
