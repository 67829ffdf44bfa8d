"""The options of a stream that writes to a sink's data source: what Spark hands over as texts, sorted."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Self

from holdfast.backends.registry import backend_names
from holdfast.errors import InvalidArgumentError
from holdfast.settings import PREFIX, RETAINED, SINK_PREFIX, STORAGE_PREFIX, Settings
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.snapshotter.storage.opening import open_storage
from holdfast.snapshotter.storage.options import parse_storage_options
from holdfast.spark_integration.sinks.exactly_once import (
    decisions_storage,
    session_configuration,
    sink_options,
    warn_of_other_sinks,
)
from holdfast.spark_integration.sinks.two_phase_sink import TwoPhaseSink
from holdfast.spark_integration.state_source.source import STORAGE, STORAGE_IN_JSON, storage_options
from holdfast.spark_integration.state_source.source import in_json as parsed_json

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

STATE_DIR = PREFIX + "state.dir"
#: A JSON object of sink options whose names have capitals, since Spark passes names in lower case.
SINK_IN_JSON = "sink"
_LOCATION, _REPLACES = "checkpointlocation", "replaces"


@dataclass(frozen=True)
class SourceOptions:
    """A stream's sink and query, from its options."""

    location: str  #: Spark's checkpoint location of the query
    replaces: str | None
    settings: Mapping[str, str] = field(repr=False)  #: Those of the session that were given as options
    sink: Mapping[str, str] = field(repr=False)  #: The sink's options

    @classmethod
    def parse(cls, given: Mapping[str, str], sink: TwoPhaseSink, arguments: Collection[str]) -> Self:
        """Return a stream's options, their names in lower case, given the names of the sink's `arguments`.

        Raises `InvalidArgumentError` without checkpoint location or place of decisions, or for an unknown one.
        """
        values = {name.lower(): value for name, value in given.items()}
        location, directory = values.pop(_LOCATION, ""), values.pop(STATE_DIR, "")
        if not location:
            raise InvalidArgumentError(
                "the sink must know its query: give the query's location as the option checkpointLocation of this "
                "stream, not as a setting of the session",
                sink=sink.name,
            )
        if not directory:
            raise InvalidArgumentError(
                f"a sink needs a place for its decisions: give the option {STATE_DIR}, preferably with all others "
                "through .options(**holdfast.sinks.source_options(spark, sink))",
                sink=sink.name,
            )
        settings = {STATE_DIR: directory}
        retained = values.pop(RETAINED.lower(), None)
        if retained is not None:
            settings[RETAINED] = retained
        for name, value in parsed_json(values.pop(STORAGE_IN_JSON, "{}")).items():
            settings[STORAGE_PREFIX + name] = value
        for name in [name for name in values if name.startswith(STORAGE)]:
            settings[PREFIX + name] = values.pop(name)
        replaces = values.pop(_REPLACES, None)
        taken = {name.lower() for name in arguments}
        options = parsed_json(values.pop(SINK_IN_JSON, "{}"))
        options |= _own({name: value for name, value in values.items() if name not in taken}, sink)
        return cls(location, replaces, settings, options)

    def open_decisions(self) -> tuple[ObjectStorage, int]:
        """Open the storage of decisions, which the caller closes; return it with the number of decisions to keep."""
        return decisions_storage(self._parsed, self.settings), self._parsed.retained_versions

    def open_location(self) -> ObjectStorage:
        """Open the storage of Spark's checkpoint location, which the caller closes."""
        return open_storage(self.location, parse_storage_options(self._parsed.storage_values(self.settings)))

    @cached_property
    def _parsed(self) -> Settings:
        return Settings.parse(self.settings, backend_names())


def _own(values: Mapping[str, str], sink: TwoPhaseSink) -> dict[str, str]:
    """Return the sink's options, named as settings of the session would name them."""
    prefix, cased = f"{SINK_PREFIX}{sink.name}.".lower(), {name.lower(): name for name in sink.credentials}
    options = {}
    for name, value in values.items():
        if name.startswith(PREFIX) and not name.startswith(prefix):
            raise InvalidArgumentError(
                f"not an option of the stream's sink: those are {SINK_PREFIX}{sink.name}.<option>, or <option> alone; "
                "the options of the storage are storage.<option>",
                option=name,
                sink=sink.name,
            )
        option = name.removeprefix(prefix)
        options[cased.get(option, option)] = value
    return options


def source_options(spark: SparkSession, sink: TwoPhaseSink) -> dict[str, str]:
    """Return a session's settings for a sink as options of a stream: ``.options(**source_options(spark, sink))``.

    On the driver, Spark shows a data source no settings, so they become options, including how many decisions to keep,
    ``spark.sql.streaming.minBatchesToRetain``. Workers still read credentials from the session, so set them there.

    Parameters
    ----------
    spark : SparkSession
    sink : TwoPhaseSink
    """
    values = session_configuration(spark, sink)
    warn_of_other_sinks(values, sink.name)
    return options_of(values, sink)


def options_of(values: Mapping[str, str], sink: TwoPhaseSink) -> dict[str, str]:
    """Return settings as options of a stream: see `source_options`."""
    own = sink_options(values, sink.name)
    known = {name.lower() for name in own} & {name.lower() for name in sink.credentials}
    in_json = {name: own.pop(name) for name in [*own] if name.lower() not in {name, *known}}
    storage = {
        key.removeprefix(STORAGE_PREFIX): value for key, value in values.items() if key.startswith(STORAGE_PREFIX)
    }
    return {
        **{key: values[key] for key in (STATE_DIR, RETAINED) if key in values},
        **storage_options(storage),
        **{f"{SINK_PREFIX}{sink.name}.{name}": value for name, value in own.items()},
        **({SINK_IN_JSON: json.dumps(in_json)} if in_json else {}),
    }
