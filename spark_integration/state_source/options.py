"""The options of a read, parsed from Spark's texts and checked."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

from holdfast.backends.options import nearest_name
from holdfast.errors import InvalidArgumentError
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.snapshotter.storage.opening import open_storage
from holdfast.snapshotter.storage.options import CREDENTIALS, parse_storage_options
from holdfast.spark_integration.lookup.keys import Shards, parse_key
from holdfast.spark_integration.shard.task import session_values

STORAGE = "storage."
#: Spark hands names over in lower case, so those of storage that have others stand in a JSON object.
STORAGE_IN_JSON = "storage"
NAMES = (
    "path",
    "operator",
    "table",
    "stateVarName",
    "columns",
    "key",
    "shards",
    STORAGE_IN_JSON,
    "stateDir",
    "batchId",
    "readChangeFeed",
    "changeStartBatchId",
)
_AS_GIVEN = {name.lower(): name for name in NAMES}
#: Of a query only.
_OF_QUERY = ("batchId", "readChangeFeed", "changeStartBatchId")
_FLAGS = {"true": True, "false": False}
_DIGITS_MAX = 18


@dataclass(frozen=True)
class Place:
    """A directory of savepoints, or a state directory, and what opens it."""

    url: str
    options: Mapping[str, str] = field(repr=False)

    def open(self) -> ObjectStorage:
        return open_storage(self.url, parse_storage_options(self.options))

    def without_credentials(self) -> Place:
        """Return the place without credentials, to send to tasks."""
        return replace(self, options={name: value for name, value in self.options.items() if name not in CREDENTIALS})

    def in_task(self) -> Place:
        """Return the place with the credentials that the running task has from its session."""
        return replace(self, options={**self.options, **session_values(CREDENTIALS)})


@dataclass(frozen=True)
class ReadOptions:
    """What to read, and how."""

    path: str  #: Of a savepoint: its directory, a slash, and its name. Of a query: its checkpoint location.
    operator: str | None = None  #: Its name; needed of a query, and of a savepoint that has several
    table: str = "state"  #: A state table, or the name of a processor's variable
    columns: tuple[str, ...] = ()  #: Those to show, in this order; all if there are none
    key: Mapping[str, Any] = field(default_factory=dict)  #: Read the rows of this key only; all if it is empty
    shards: Shards | None = None  #: Read these only; None for all
    state_dir: str | None = None  #: Of a query; None for a savepoint
    batch_id: int | None = None  #: The micro-batch, the last one of a change feed; None for the last committed one
    changes_from: int | None = None  #: Show what has changed since this micro-batch began; None for the state
    storage: Mapping[str, str] = field(default_factory=dict, repr=False)  #: What opens the storage

    @classmethod
    def parse(cls, given: Mapping[str, str]) -> Self:
        """Return the options of a read. Raises `InvalidArgumentError`."""
        values = {name.lower(): value for name, value in given.items()}
        storage = {name.removeprefix(STORAGE): value for name, value in values.items() if name.startswith(STORAGE)}
        values = {name: value for name, value in values.items() if not name.startswith(STORAGE)}
        storage |= in_json(values.get(STORAGE_IN_JSON, "{}"))
        for name in values:
            if name not in _AS_GIVEN:
                raise _unknown(name)
        if "table" in values and "statevarname" in values:
            raise InvalidArgumentError("table and stateVarName are one option: name the table once")
        if not values.get("path", "").strip("/"):
            raise InvalidArgumentError("load the path of a savepoint: its directory, a slash, and its name")
        changes_from = _changes_from(values)
        of_query = next((name for name in _OF_QUERY if name.lower() in values), None)
        if of_query is not None and "statedir" not in values:
            raise InvalidArgumentError(
                "a savepoint is one version: holdfast.state(spark, checkpoint_location, operator, …) reads a query and "
                "takes this, and holdfast savepoint diff compares savepoints",
                option=of_query,
            )
        return cls(
            values["path"],
            values.get("operator"),
            values.get("table", values.get("statevarname", "state")),
            _columns(values["columns"]) if "columns" in values else (),
            parse_key(values["key"]) if "key" in values else {},
            Shards.parse(values["shards"]) if "shards" in values else None,
            values.get("statedir"),
            _batch_id(values),
            changes_from,
            storage,
        )


def _unknown(name: str) -> InvalidArgumentError:
    near = nearest_name(name, list(_AS_GIVEN))
    return InvalidArgumentError(
        f"no such option; the options are {', '.join(NAMES[1:])}, and {STORAGE}<name> for "
        "spark.holdfast.storage.<name>",
        option=name,
        near=_AS_GIVEN.get(near) if near else None,
    )


def storage_options(given: Mapping[str, str]) -> dict[str, str]:
    """Return the options for what a session sets as ``spark.holdfast.storage.<name>``; Spark keeps each name's case.

    Only what must be is in JSON: Spark hides values of options by the options' names.
    """
    in_json = {name: value for name, value in given.items() if name != name.lower()}
    options = {STORAGE + name: value for name, value in given.items() if name not in in_json}
    return options | ({STORAGE_IN_JSON: json.dumps(in_json)} if in_json else {})


def in_json(text: str) -> dict[str, str]:
    """Parse the option ``storage``. Raises `InvalidArgumentError` if this is no JSON object of texts."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict) or any(type(value) is not str for value in found.values()):
        # Without the text, which may hold credentials.
        raise InvalidArgumentError('the option storage is a JSON object of names and texts, as {"anon": "true"}')
    return found


def columns_option(names: object) -> str:
    """Return the option's text for columns of any names. Raises `InvalidArgumentError`."""
    found = None if isinstance(names, str) or not isinstance(names, Iterable) else list(names)
    if not found or any(not isinstance(name, str) for name in found):
        raise InvalidArgumentError("columns is a list of names, left out for all columns", columns=names)
    return json.dumps(found)


def _columns(text: str) -> tuple[str, ...]:
    """Parse ``a, b`` or, for names with a comma, ``["a", "b"]``."""
    names: object = [name.strip() for name in text.split(",") if name.strip()]
    if text.startswith("["):
        try:
            names = json.loads(text)
        except (ValueError, RecursionError):
            names = None
    if not isinstance(names, list) or any(type(name) is not str for name in names):
        raise InvalidArgumentError('the option columns is as a,b or ["a", "b"]', columns=text[:200])
    if not names:
        raise InvalidArgumentError("the option columns names no column: leave it out for all", columns=text[:200])
    if len(set(names)) < len(names):
        raise InvalidArgumentError("the option columns names a column twice", columns=text[:200])
    return tuple(names)


def _batch_id(values: Mapping[str, str]) -> int | None:
    text = values.get("batchid")
    if text is not None and not _is_number(text):
        raise InvalidArgumentError("the option batchId is a micro-batch: a number, 0 or more", given=text[:200])
    return None if text is None else int(text)


def _changes_from(values: Mapping[str, str]) -> int | None:
    text, is_feed = values.get("changestartbatchid"), values.get("readchangefeed", "false").lower()
    if is_feed not in _FLAGS:
        raise InvalidArgumentError("the option readChangeFeed must be true or false", given=is_feed[:200])
    if not _FLAGS[is_feed]:
        if text is not None:
            raise InvalidArgumentError("changeStartBatchId needs readChangeFeed=true")
        return None
    if text is None or not _is_number(text):
        raise InvalidArgumentError("readChangeFeed needs changeStartBatchId: the first micro-batch", given=text)
    return int(text)


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= _DIGITS_MAX
