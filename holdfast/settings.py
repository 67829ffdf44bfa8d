"""Settings from Spark's configuration, as plain values.

Everything under ``spark.holdfast.`` belongs to holdfast. Unknown keys are refused: a misspelt key would silently have
no effect. Settings are sent to workers with the operator, except values under ``spark.holdfast.storage.``, which may be
credentials: a worker reads them from its task's properties, and `Settings` holds only their names. Each sink checks its
own options under ``spark.holdfast.sink.<name>.``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from holdfast.backends.options import nearest_name, parse_size
from holdfast.errors import InvalidArgumentError
from holdfast.snapshotter.storage.options import parse_url

PREFIX = "spark.holdfast."
STORAGE_PREFIX = PREFIX + "storage."
#: Precedes a sink's name, a dot and an option. `Settings` omits these: some are credentials.
SINK_PREFIX = PREFIX + "sink."
RETAINED = "spark.sql.streaming.minBatchesToRetain"
APPLICATION = "spark.app.id"
#: Limit per operator: each shard is a row of Spark's state and part of every task's plan.
MOST_SHARDS = 1 << 16

TimeoutRule = Literal["documented", "spark"]


def _text(value: str) -> str:
    if not value.strip():
        raise ValueError("it is empty")
    return value.strip()


def _location(value: str) -> str:
    try:
        return str(parse_url(_text(value)))
    except InvalidArgumentError as exc:
        # Omits the value, which may contain a credential.
        raise InvalidArgumentError(f"{PREFIX}state.dir cannot be used: {exc.message}", **exc.facts) from None


def _directory(value: str) -> str:
    text = _text(value)
    if not os.path.isabs(text):
        raise ValueError("it must be an absolute path")
    return text


def _whole(least: int = 1, most: int | None = None, hint: str = "") -> Callable[[str], int]:
    def parse(value: str) -> int:
        try:
            number = int(value)
        except ValueError:
            raise ValueError("it must be a whole number") from None
        if number < least or (most is not None and number > most):
            up_to = "" if most is None else f" and at most {most:,}"
            raise ValueError(f"it must be at least {least:,}{up_to}{hint}")
        return number

    return parse


def _carried_bytes(value: str) -> int:
    size_bytes = 0 if value.strip() == "0" else parse_size(value)
    if size_bytes > 1 << 20:
        raise ValueError("it must be at most 1m: Spark writes it in every micro-batch for each shard")
    return size_bytes


def _flag(value: str) -> bool:
    return _one_of("true", "false")(value) == "true"


def _names(value: str) -> tuple[str, ...]:
    return tuple(name for part in value.split(",") if (name := part.strip()))


def _one_of(first: str, second: str) -> Callable[[str], str]:
    def parse(value: str) -> str:
        if value not in (first, second):
            raise ValueError(f"it must be {first!r} or {second!r}")
        return value

    return parse


def _setting(key: str, parse: Callable[[str], Any], default: Any) -> Any:
    return field(default=default, metadata={"key": key, "parse": parse})


@dataclass(frozen=True)
class Settings:
    """The user's settings; docs/configuration.md describes the keys below ``spark.holdfast.``."""

    backend: str = _setting("backend", _text, "memory")
    state_dir: str | None = _setting("state.dir", _location, None)
    local_dir: str | None = _setting("local.dir", _directory, None)
    timeouts: TimeoutRule = _setting("timeouts", _one_of("documented", "spark"), "documented")
    frame_templates: bool = _setting("pandas.frameTemplates", _flag, True)
    shards: int | None = _setting("shards", _whole(most=MOST_SHARDS, hint=": one per task slot is enough"), None)
    allow_new: tuple[str, ...] = _setting("restore.allowNew", _names, ())
    snapshot_max_commits: int = _setting("snapshot.maxCommits", _whole(), 20)
    snapshot_max_bytes: int | None = _setting("snapshot.maxBytes", parse_size, None)
    snapshot_interval_seconds: int | None = _setting("snapshot.intervalSeconds", _whole(), None)
    carried_bytes: int = _setting("commit.carriedBytes", _carried_bytes, 16 << 10)
    upload_bandwidth_bytes: int | None = _setting("snapshot.upload.bandwidth", parse_size, None)
    metrics_in_progress: bool = _setting("metrics.inProgress", _flag, False)
    metrics_port: int | None = _setting("metrics.port", _whole(1024, 65535), None)
    metrics_address: str = _setting("metrics.address", _text, "127.0.0.1")
    retained_versions: int = 100  #: How many versions the query may go back: `RETAINED`
    application: str = ""  #: Spark's id of the application that runs the query
    driver: str = ""  #: The process that defined and runs the query; empty over Spark Connect
    #: Pickled accumulator for reports to that process (`holdfast.spark_integration.shard.news`); may be empty
    news: bytes = field(default=b"", repr=False)
    storage_names: tuple[str, ...] = ()  #: Below ``spark.holdfast.storage.``; values are omitted
    backend_options: Mapping[str, str] = field(default_factory=dict)  #: Below ``spark.holdfast.<backend>.``

    @classmethod
    def parse(cls, configuration: Mapping[str, str], backends: Collection[str] = ()) -> Settings:
        """Read the keys below ``spark.holdfast.``; ignore others. Raises `InvalidArgumentError`.

        `backends`: names of the known backends; the chosen backend checks its own options.
        """
        known = {f.metadata["key"]: f for f in fields(cls) if f.metadata}
        values: dict[str, Any] = {}
        storage_names = []
        # Includes the chosen backend: if it is unknown, that error comes before those of its options.
        named = {*backends, configuration.get(PREFIX + "backend", cls.backend).strip()}
        options: dict[str, dict[str, str]] = {name: {} for name in named}
        for full_key, value in configuration.items():
            if full_key.startswith(STORAGE_PREFIX):
                storage_names.append(full_key.removeprefix(STORAGE_PREFIX))
            elif full_key.startswith(SINK_PREFIX):
                _check_sink_key(full_key)
            elif full_key.startswith(PREFIX):
                key = full_key.removeprefix(PREFIX)
                head, _, option = key.partition(".")
                if key not in known:
                    if not option or head not in options:
                        raise _unknown(full_key, known, backends)
                    options[head][option] = value
                    continue
                try:
                    values[known[key].name] = known[key].metadata["parse"](value)
                except InvalidArgumentError:
                    raise
                except ValueError as exc:
                    raise InvalidArgumentError(f"{full_key} cannot be {value!r}: {exc}") from exc
        if RETAINED in configuration:
            values["retained_versions"] = _retained(configuration[RETAINED])
        if APPLICATION in configuration:
            values["application"] = configuration[APPLICATION]
        chosen = options.get(values.get("backend", "memory"), {})
        return cls(**values, storage_names=tuple(sorted(storage_names)), backend_options=chosen)

    def storage_values(self, configuration: Mapping[str, str]) -> dict[str, str]:
        """Return the values of `storage_names` from the configuration."""
        return {name: configuration[STORAGE_PREFIX + name] for name in self.storage_names}


def _check_sink_key(full_key: str) -> None:
    """Refuse keys that cannot be a sink's option; only the query can check that the sink exists."""
    name, _, option = full_key.removeprefix(SINK_PREFIX).partition(".")
    if not name or not option:
        raise InvalidArgumentError(f"unknown setting {full_key!r}: a sink's options are {SINK_PREFIX}<name>.<option>")


def _retained(value: str) -> int:
    try:
        return max(1, int(value))
    except ValueError as exc:  # Spark checks a session's setting but not a stream's option
        raise InvalidArgumentError(f"{RETAINED} cannot be {value!r}: it must be a whole number") from exc


def _unknown(full_key: str, known: Mapping[str, object], backends: Collection[str]) -> InvalidArgumentError:
    key = full_key.removeprefix(PREFIX)
    head, _, rest = key.partition(".")
    begins_a_setting = any(name.startswith(f"{head}.") for name in known)
    near_head = None if begins_a_setting else nearest_name(head, ["storage", "sink", *backends])
    near = f"{near_head}.{rest}" if rest and near_head else nearest_name(key, known)
    names = ", ".join([*(PREFIX + name for name in known), *(f"{PREFIX}{name}.*" for name in backends)])
    hint = f"did you mean {PREFIX + near!r}?" if near else f"known are {names} and {STORAGE_PREFIX}*"
    return InvalidArgumentError(f"unknown setting {full_key!r}: {hint}")
