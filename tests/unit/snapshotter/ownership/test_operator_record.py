"""Whose an operator's directory is: who may go on in it, and what the others are told."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pyarrow as pa
import pytest

from holdfast.backends import stored_file
from holdfast.backends.run import TableSchema
from holdfast.backends.schema import decode_schemas
from holdfast.errors import (
    ConflictError,
    CorruptionError,
    InvalidArgumentError,
    NotFoundError,
    SchemaMismatchError,
    UnavailableError,
)
from holdfast.snapshotter.ownership.operator_record import (
    OperatorRecord,
    declare_operator,
    read_operator,
    shard_prefix,
)
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.snapshotter.storage.opening import open_storage
from holdfast.testing.faulty_storage import Fault, FaultyStorage
from tests.storage_in_ram import storage_in_ram

KEY = pa.schema([("user", pa.string())])
STATE = pa.schema([("n", pa.int64())])
TABLES = {"state": TableSchema.of("state", KEY, STATE)}
RECORD = OperatorRecord.of("totals", "query-1", "def-1", "run-1", 4, TABLES, 100)


@pytest.fixture
def storage() -> Iterator[ObjectStorage]:
    with storage_in_ram() as opened:
        yield opened


def test_the_first_claim_writes_what_the_later_ones_read(storage: ObjectStorage) -> None:
    declare_operator(storage, RECORD)
    written = bytes(storage.get("totals/operator"))
    declare_operator(storage, RECORD)
    declare_operator(storage, replace(RECORD, run_id="run-2", definition_id="def-2"))
    assert bytes(storage.get("totals/operator")) == written
    assert read_operator(storage, "totals") == RECORD


def test_no_state_is_kept_in_a_location_of_spark(storage: ObjectStorage) -> None:
    """An operator called ``state`` would share a folder with Spark's state."""
    storage.put("metadata", b'{"id":"query-1"}')
    with pytest.raises(InvalidArgumentError, match="is a query's checkpointLocation"):
        declare_operator(storage, RECORD)
    assert [info.key for info in storage.list("")] == ["metadata"]


@pytest.mark.parametrize(
    ("other", "error", "message"),
    [
        (replace(RECORD, query_id="query-2"), ConflictError, "state of another query: give the operator another name"),
        (
            replace(RECORD, definition_id="def-2"),
            ConflictError,
            r"two operators of this query have the same name: pass each its own name=\. .* class",
        ),
        (replace(RECORD, run_id="run-2", shards=8), SchemaMismatchError, r"set spark\.holdfast\.shards"),
    ],
)
def test_a_claim_that_does_not_fit_is_refused_with_the_remedy(
    storage: ObjectStorage, other: OperatorRecord, error: type[Exception], message: str
) -> None:
    declare_operator(storage, RECORD)
    with pytest.raises(error, match=message) as caught:
        declare_operator(storage, other)
    assert storage.url in str(caught.value)
    assert read_operator(storage, "totals") == RECORD


def test_operators_of_other_names_do_not_meet(storage: ObjectStorage) -> None:
    declare_operator(storage, RECORD)
    declare_operator(storage, replace(RECORD, operator="others", query_id="query-2"))
    assert read_operator(storage, "others").query_id == "query-2"


def test_of_two_queries_that_claim_at_once_the_loser_is_told(storage: ObjectStorage) -> None:
    """Both have found none."""
    other = replace(RECORD, query_id="query-2")
    faulty = FaultyStorage(storage, [Fault("delay", action="put", wait=lambda: declare_operator(storage, other))])
    with pytest.raises(ConflictError, match="another query"):
        declare_operator(faulty, RECORD)
    faulty.assert_all_hit()
    assert read_operator(storage, "totals") == other


def _encode(record: OperatorRecord) -> pa.Buffer:
    return stored_file.encode("operator", asdict(record))[0]


def test_a_storage_that_does_not_answer_claims_nothing(storage: ObjectStorage) -> None:
    faulty = FaultyStorage(storage, [Fault("fail", action="put")])
    with pytest.raises(UnavailableError):
        declare_operator(faulty, RECORD)
    assert storage.list("") == []


def test_an_operator_that_is_not_there_is_named(storage: ObjectStorage) -> None:
    with pytest.raises(NotFoundError, match="check the name") as caught:
        read_operator(storage, "totals")
    assert caught.value.facts == {"operator": "totals", "storage": storage.url}


@pytest.mark.parametrize("header", [{}, {**asdict(RECORD), "colour": "red"}])
def test_a_record_with_other_fields_is_named(storage: ObjectStorage, header: dict[str, object]) -> None:
    storage.put("totals/operator", stored_file.encode("operator", header)[0])
    with pytest.raises(CorruptionError, match="totals/operator has other fields"):
        declare_operator(storage, RECORD)


def test_a_damaged_record_is_named(storage: ObjectStorage) -> None:
    storage.put("totals/operator", bytes(_encode(RECORD).to_pybytes()[:-1]))
    with pytest.raises(CorruptionError, match="totals/operator"):
        read_operator(storage, "totals")


def test_shards_sort_as_text_in_their_order() -> None:
    assert shard_prefix("totals", 7) == "totals/shard-0007"
    assert shard_prefix("totals", 12345) == "totals/shard-12345"


def test_the_record_lies_where_the_format_says(tmp_path: Path) -> None:
    with open_storage(str(tmp_path)) as storage:
        declare_operator(storage, RECORD)
    stored = stored_file.decode((tmp_path / "totals" / "operator").read_bytes(), source="it", kind="operator")
    (held,) = decode_schemas(stored.header["schemas"]).values()
    assert (held.key.names, held.value.names) == (["user"], ["n"])


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"retained_versions": None}, r"invalid field, field=retained_versions"),
        ({"shards": "4"}, r"invalid field, field=shards"),
        ({"shards": 0}, r"invalid field, field=shards"),
        ({"query_id": 7}, r"invalid field, field=query_id"),
        ({"schemas": {"state": [1]}}, r"invalid field, field=schemas"),
        ({"operator": "other"}, r"belongs elsewhere.*operator=other"),
        ({"level": 9}, r"has other fields.*unknown=.*level"),
    ],
    ids=str,
)
def test_a_record_that_says_what_none_says_is_damaged(
    storage: ObjectStorage, changed: dict[str, object], said: str
) -> None:
    """Each reader may rely on what it gets, whoever has written it."""
    storage.put("totals/operator", stored_file.encode("operator", asdict(RECORD) | changed)[0])
    with pytest.raises(CorruptionError, match=said):
        read_operator(storage, "totals")


def test_a_record_of_an_earlier_build_is_named(storage: ObjectStorage) -> None:
    """Without the number of retained versions; nothing was released with it."""
    header = asdict(RECORD)
    del header["retained_versions"]
    storage.put("totals/operator", stored_file.encode("operator", header)[0])
    with pytest.raises(CorruptionError, match=r"totals/operator has other fields.*missing=.*retained_versions"):
        read_operator(storage, "totals")
