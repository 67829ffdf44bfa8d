"""Which of Spark's operators hold pointers, as their metadata and their schemas say; nothing is guessed."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from holdfast.errors import CorruptionError
from holdfast.snapshotter.storage.local import LocalStorage
from holdfast.spark_integration.shard.pointer_row import POINTER_COLUMN
from holdfast.spark_integration.spark_state.operators import NotKnownError, StateOperators


def metadata(number: int, name: str, partitions: int = 4, *stores: str, **more: Any) -> dict[str, Any]:
    infos = [
        {"storeName": store, "numColsPrefixKey": 0, "numPartitions": partitions} for store in stores or ("default",)
    ]
    return {"operatorInfo": {"operatorId": number, "operatorName": name}, "stateStoreInfo": infos} | more


def put(root: Path, key: str, document: object, version: str = "v1") -> None:
    path = root / "state" / key
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{version}\n{json.dumps(document)}")


def schema(root: Path, columns: list[str], version: str = "v2", state: list[str] | None = None) -> None:
    """Store the schema of operator 0; the first column is a struct of `state`."""
    names = [POINTER_COLUMN] if state is None else state
    struct_type = {"type": "struct", "fields": [{"name": name, "type": "long"} for name in names]}
    fields = [{"name": name, "type": "long" if number else struct_type} for number, name in enumerate(columns)]
    texts = ['{"type":"struct","fields":[]}', json.dumps({"type": "struct", "fields": fields})]
    data = struct.pack(">H", len(version)) + version.encode()
    for text in texts:
        halves = text[: len(text) // 2].encode(), text[len(text) // 2 :].encode()
        data += struct.pack(">i", 2) + b"".join(struct.pack(">H", len(half)) + half for half in halves)
    path = root / "state/0/0/_metadata/schema"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def test_metadata_holds_from_a_micro_batch_on(tmp_path: Path) -> None:
    """What an operator was in a micro-batch is read, not what it is now; and a history lists it once."""
    put(tmp_path, "0/_metadata/metadata", metadata(0, "applyInPandasWithState"))
    variables = json.dumps({"stateVariables": [{"stateName": "holdfast_pointer"}]})
    put(tmp_path, "1/_metadata/v2/0", metadata(1, "transformWithStateInPandasExec", 8), "v2")
    put(
        tmp_path,
        "1/_metadata/v2/5",
        metadata(1, "transformWithStateInPandasExec", 8, operatorPropertiesJson=variables),
        "v2",
    )
    put(tmp_path, "1/_metadata/v2/.6.crc", {})
    put(tmp_path, "2/_metadata/metadata", metadata(2, "symmetricHashJoin", 4, "left", "right"))
    with LocalStorage(str(tmp_path)) as location:
        operators = StateOperators(location)
        newest = operators.at(9)
        assert [(one.number, one.partitions, one.variables) for one in newest] == [
            (0, 4, ()),
            (1, 8, ("holdfast_pointer",)),
            (2, 0, ()),
        ]
        lists = location.requests["list"]
        assert operators.at(4)[1].variables == ()
        assert operators.at(5) == newest
        assert location.requests["list"] == lists


@pytest.mark.parametrize(
    ("columns", "state", "holds"),
    [
        (["groupState"], None, True),
        (["groupState", "timeoutTimestamp"], None, True),
        (["groupState", "timeoutTimestamp"], ["n", "total"], False),
        (["groupState", "more"], None, False),
        (["value"], None, False),
    ],
)
def test_names_of_columns_say_whose_state_it_is(
    tmp_path: Path, columns: list[str], state: list[str] | None, holds: bool
) -> None:
    """The user's own applyInPandasWithState has other columns."""
    put(tmp_path, "0/_metadata/metadata", metadata(0, "applyInPandasWithState"))
    schema(tmp_path, columns, state=state)
    with LocalStorage(str(tmp_path)) as location:
        operators = StateOperators(location)
        assert operators.hold_pointers(operators.at(0)[0]) is holds


def test_another_format_is_said_and_damage_is_damage(tmp_path: Path) -> None:
    """A later Spark's files are left to Spark; what is cut or altered is an error that names the file."""
    with LocalStorage(str(tmp_path)) as location:
        assert StateOperators(location).at(0) == []
        put(tmp_path, "0/_metadata/metadata", metadata(0, "applyInPandasWithState"), "v3")
        with pytest.raises(NotKnownError, match="metadata"):
            StateOperators(location).at(0)
        for wrong in ([], {}, metadata(1, "x"), metadata(0, "x", -1), metadata(0, "x", 1 << 40), {"operatorInfo": 5}):
            put(tmp_path, "0/_metadata/metadata", wrong)
            with pytest.raises(CorruptionError, match="_metadata"):
                StateOperators(location).at(0)
        put(tmp_path, "0/_metadata/metadata", metadata(0, "applyInPandasWithState"))
        operators = StateOperators(location)
        with pytest.raises(NotKnownError, match="schema"):
            operators.hold_pointers(operators.at(0)[0])
        schema(tmp_path, ["groupState"], version="v9")
        with pytest.raises(NotKnownError, match="schema"):
            operators.hold_pointers(operators.at(0)[0])
        schema(tmp_path, ["groupState"])
        path = tmp_path / "state/0/0/_metadata/schema"
        whole = path.read_bytes()
        for end in range(0, len(whole) - 1, 7):
            path.write_bytes(whole[:end])
            with pytest.raises((CorruptionError, NotKnownError)):
                operators.hold_pointers(operators.at(0)[0])
