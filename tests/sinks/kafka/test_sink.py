"""The Kafka sink against a broker: logins and rights, messages, time limits, zombies, brokers that are away."""

from __future__ import annotations

import datetime as dt
import logging
import time
from collections.abc import Iterator

import pyarrow as pa
import pytest
from confluent_kafka import admin as kafka_admin

from holdfast import clock
from holdfast.errors import FencedError, InvalidArgumentError, StateLostError, UnavailableError
from holdfast.spark_integration.sinks.kafka.brokers import Cluster
from holdfast.spark_integration.sinks.kafka.protocol import Request, TransactionDescription
from holdfast.spark_integration.sinks.kafka.sink import KafkaSink
from holdfast.spark_integration.sinks.two_phase_sink import Handle, SinkAttempt, SinkQuery
from tests.read_kafka import committed, transactional_ids
from tests.servers.kafka import PASSWORD, USER, Kafka
from tests.sinks.kafka.lab import SCHEMA, Lab
from tests.tiers import cases

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
    """Deny something to `USER`."""
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
    transaction = sink.begin(SinkAttempt(lab.query, 0, 0, clock.new_id() + clock.new_id()), schema)
    transaction.write(pa.RecordBatch.from_pylist(rows, schema))
    handle = transaction.prepare()
    sink.commit(lab.query, 0, [handle])
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
    transaction = sink.begin(SinkAttempt(lab.query, 0, 0, clock.new_id() + clock.new_id()), schema)
    transaction.write(pa.record_batch([["a", "b", "holdfast"], ["x", "x", "x"]], schema=schema))
    sink.commit(lab.query, 0, [transaction.prepare()])
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
    assert "shows micro-batch 0 already" in caplog.text
    assert lab.sink.leftovers(lab.query) == []
    assert lab.shown() == ["counts"]


def test_text_that_is_not_utf8_arrives_as_the_bytes_that_it_is(lab: Lab) -> None:
    """Spark's sink sends them too; to decode them in Python would end the query at such a record for good."""
    text = pa.array([b"caf\xe9", "café".encode()]).cast(pa.string(), safe=False)
    rows = pa.record_batch({"value": text, "key": text})
    lab.sink.open(lab.query, rows.schema)
    transaction = lab.begin(schema=rows.schema)
    transaction.write(rows)
    lab.sink.commit(lab.query, 0, [transaction.prepare()])
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
