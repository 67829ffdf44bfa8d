"""A trial commit on an empty local copy of the table.

What the table will not take is found before anything is decided, in the words of the library that would refuse it
afterwards.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path

from deltalake import DeltaTable


def rehearse(table: DeltaTable, commit: Callable[[DeltaTable], None]) -> None:
    """Call `commit` with a temporary table of the same protocol, settings and columns."""
    with tempfile.TemporaryDirectory(prefix="holdfast-") as folder:
        log = Path(folder, "_delta_log")
        log.mkdir()
        (log / f"{0:020}.json").write_text("\n".join(map(json.dumps, _beginning(table))))
        commit(DeltaTable(folder))


def _beginning(table: DeltaTable) -> list[dict[str, object]]:
    protocol, metadata = table.protocol(), table.metadata()
    versions: dict[str, object] = {
        "minReaderVersion": protocol.min_reader_version,
        "minWriterVersion": protocol.min_writer_version,
    }
    features = {"readerFeatures": protocol.reader_features, "writerFeatures": protocol.writer_features}
    return [
        {"protocol": versions | {name: listed for name, listed in features.items() if listed is not None}},
        {
            "metaData": {
                "id": metadata.id,
                "format": {"provider": "parquet", "options": {}},
                "schemaString": table.schema().to_json(),
                "partitionColumns": metadata.partition_columns,
                "configuration": metadata.configuration,
                "createdTime": metadata.created_time,
            }
        },
    ]
