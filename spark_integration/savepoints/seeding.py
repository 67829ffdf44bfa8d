"""Makes a checkpoint location from which a new query continues with saved state and positions.

::

    stub's location                      new location
        state/  ──────── copied ───────▶     state/          version 1 of each pointer; or it is written there at once
        offsets/0  ── its settings ────▶     offsets/0       positions and watermark of the savepoint
        commits/0  ── its form ────────▶     commits/0       the watermark of the micro-batch that comes next
    what it had planned  ──────────────▶     offsets/1       where sinks are continued
    savepoint's sources  ──────────────▶     sources/…
                                             metadata        the new query's id: last

Spark refuses a location that has no ``metadata``, so nobody starts a query from an incomplete one. The query begins
with micro-batch 1, at exactly the saved positions; where it continues sinks, with what the saved query had planned.

Source: Spark 4.3's ``OffsetSeqLog`` and ``CommitLog``, and queries that were started from such locations.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from holdfast.errors import CorruptionError, InvalidArgumentError
from holdfast.snapshotter.savepoints.manifest import SHARDS_LIMIT, PlannedBatch, SavedQuery, SavedSource
from holdfast.snapshotter.savepoints.savepoints import read_log
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.snapshotter.storage.options import parse_url
from holdfast.snapshotter.storage.wrappers import PrefixedStorage
from holdfast.spark_integration.spark_state.query_location import NAMED_SOURCES

#: The setting that says into how many partitions Spark divides the state.
PARTITIONS = "spark.sql.shuffle.partitions"
_COUNT = re.compile("[1-9][0-9]{0,9}")
_STATE = "state/"
_STATE_BYTES_MAX = 4 << 30
_METADATA = re.compile(r"state/[0-9]+/_metadata/(metadata|v[0-9]+/[0-9]+)")
# Paths as Spark writes them: file:/…, file:///…, s3a://bucket/…, or without a scheme.
_PATH = re.compile(r"(?:[A-Za-z][A-Za-z0-9+.-]*:)?/")
_BELOW = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*:)?/.*(?P<state>/state/[0-9]+/_.+)")


@dataclass(frozen=True)
class FirstState:
    """How a location's state was made, which its logs must say."""

    conf: Mapping[str, str]  #: The settings that the query pins
    commits_version: str = "v1"  #: Of the log of commits
    commit: Mapping[str, Any] = field(default_factory=dict)  #: What that says of micro-batch 0, but for the watermark


def pinned(query: SavedQuery, partitions: int | None) -> dict[str, str]:
    """Return the settings that the saved query's micro-batch pinned, with other partitions if given."""
    conf: dict[str, str] = dict(json.loads(query.batch)["conf"])
    strange = [name for name in conf if not name.startswith("spark.sql.")]
    if strange:
        raise CorruptionError("the savepoint pins a setting that Spark does not pin", setting=strange[0])
    return conf | ({PARTITIONS: str(partitions)} if partitions is not None else {})


def partitions_of(conf: Mapping[str, object]) -> int:
    """Return the number of partitions of a query's state; 1 if it pinned none. Raises `CorruptionError`."""
    text = str(conf.get(PARTITIONS, 1))
    if not _COUNT.fullmatch(text) or int(text) >= SHARDS_LIMIT:
        raise CorruptionError("the query's log pins an impossible number of partitions", pinned=text)
    return int(text)


def state_of_stub(stub: ObjectStorage, location: ObjectStorage, conf: Mapping[str, str]) -> FirstState:
    """Copy a stub's state, and return how it was made. Raises `InvalidArgumentError`."""
    _, batch = _text(stub, "offsets/0").split("\n")[:2]
    stub_conf: dict[str, str] = json.loads(batch)["conf"]
    differ = sorted(name for name, value in conf.items() if stub_conf.get(name) != value)
    if differ:
        raise InvalidArgumentError(
            "this Spark lacks settings that the savepoint pins: restore with the release that made it, or a later one",
            settings=", ".join(differ),
        )
    for info in stub.list(_STATE):
        if not info.key.endswith(".crc"):  # checksums of files that may change on the way
            location.put(info.key, moved(info.key, stub.get(info.key, _STATE_BYTES_MAX), location.url))
    version, commit = _text(stub, "commits/0").split("\n")[:2]
    # Settings that a later Spark also pins hold for its state, which it has just made.
    return FirstState(stub_conf, version, json.loads(commit))


def seed(
    location: ObjectStorage,
    first: FirstState,
    savepoint: PrefixedStorage,
    query: SavedQuery,
    *,
    fresh: bool,
    planned: PlannedBatch | None = None,
) -> None:
    """Fill a checkpoint location that has its state, between `begin` and `finish`; if `fresh`, sources begin anew."""
    for source in () if fresh else (*query.sources, *(planned.sources if planned else ())):
        for log in source.logs:
            location.put(f"sources/{source.name}/{log.name}", read_log(savepoint, log))
    # What a source reads again from its beginning must not be late.
    watermark_ms = 0 if fresh else query.next_watermark_ms
    saved = json.loads(query.batch) | {"conf": first.conf} | ({"batchWatermarkMs": 0} if fresh else {})
    location.put("offsets/0", _offsets(query.offsets_version, saved, query.sources, fresh=fresh))
    committed = {**first.commit, "nextBatchWatermarkMs": watermark_ms}
    location.put("commits/0", _log_file(first.commits_version, _json(committed)))
    if planned is not None:
        batch_1 = json.loads(planned.batch) | {"conf": first.conf}
        location.put("offsets/1", _offsets(planned.offsets_version, batch_1, planned.sources, fresh=False))


def _offsets(version: str, batch: Mapping[str, Any], sources: Sequence[SavedSource], *, fresh: bool) -> bytes:
    lines = [("-" if fresh else source.offset) for source in sources]
    if version == NAMED_SOURCES:
        lines = [f"{source.name}:{line}" for source, line in zip(sources, lines, strict=True)]
    return _log_file(version, _json(batch), *lines)


def moved(key: str, data: memoryview, location: str) -> memoryview | bytes:
    """Return a file of Spark's state with the paths of its new place: an operator's metadata may name files."""
    if not _METADATA.fullmatch(key):
        return data
    try:
        version, _, text = bytes(data).decode().partition("\n")
        described = json.loads(text)
    except ValueError as exc:
        raise CorruptionError("metadata of Spark's state cannot be read", key=key) from exc
    return f"{version}\n{_json(_moved(described, key, location))}".encode()


def _moved(value: Any, key: str, location: str) -> Any:
    if isinstance(value, dict):
        return {name: _moved(inner, key, location) for name, inner in value.items()}
    if isinstance(value, list):
        return [_moved(inner, key, location) for inner in value]
    if not isinstance(value, str) or not _PATH.match(value):
        return value
    below = _BELOW.fullmatch(value)
    if below is None:
        raise InvalidArgumentError(
            "metadata of Spark's state names a file outside the checkpoint location, so it cannot be copied",
            key=key,
            path=value,
        )
    place, written = parse_url(location), below["scheme"] or ""
    # Of one store it stays as Spark has it: file:/…, s3a://…
    if place._replace(scheme=written.rstrip(":") or "file").store != place.store:
        written = f"{place.for_spark.scheme}:"
    slashes = "//" if written not in ("", "file:") else ""
    return f"{written}{slashes}{place.authority}{place.path}{below['state']}"


def _text(storage: ObjectStorage, key: str) -> str:
    return bytes(storage.get(key)).decode()


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def _log_file(version: str, *lines: str) -> bytes:
    return "\n".join([version, *lines]).encode()
