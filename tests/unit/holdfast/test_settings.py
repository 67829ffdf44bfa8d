"""Settings: what is refused before anything runs, and that no credential is kept, shown or pickled."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import InvalidArgumentError
from holdfast.settings import PREFIX, STORAGE_PREFIX, Settings

SECRET = "sEcReT-42"


def test_defaults_need_no_configuration() -> None:
    assert Settings.parse({}) == Settings() == Settings(backend="memory", state_dir=None, snapshot_max_commits=20)


def test_each_key_sets_its_value_and_others_are_not_ours() -> None:
    parsed = Settings.parse(
        {
            "spark.holdfast.backend": " memory ",
            "spark.holdfast.state.dir": "s3://bucket/app",
            "spark.holdfast.local.dir": "/fast",
            "spark.holdfast.timeouts": "spark",
            "spark.holdfast.pandas.frameTemplates": "false",
            "spark.holdfast.shards": "8",
            "spark.holdfast.restore.allowNew": "totals, sessions",
            "spark.holdfast.snapshot.maxCommits": "5",
            "spark.holdfast.snapshot.maxBytes": "64m",
            "spark.holdfast.snapshot.intervalSeconds": "60",
            "spark.holdfast.snapshot.upload.bandwidth": "50m",
            "spark.holdfast.commit.carriedBytes": "4k",
            "spark.holdfast.metrics.inProgress": "true",
            "spark.holdfast.metrics.port": "9321",
            "spark.holdfast.metrics.address": "0.0.0.0",
            "spark.sql.shuffle.partitions": "2",
            "spark.sql.streaming.minBatchesToRetain": "7",
            "spark.holdfastly": "someone else's",
        }
    )
    assert parsed == Settings(
        "memory",
        "s3://bucket/app",
        "/fast",
        "spark",
        False,
        8,
        allow_new=("totals", "sessions"),
        snapshot_max_commits=5,
        snapshot_max_bytes=64 << 20,
        snapshot_interval_seconds=60,
        carried_bytes=4096,
        upload_bandwidth_bytes=50 << 20,
        metrics_in_progress=True,
        metrics_port=9321,
        metrics_address="0.0.0.0",
        retained_versions=7,
    )
    assert Settings.parse({"spark.holdfast.commit.carriedBytes": "0"}).carried_bytes == 0


@pytest.mark.parametrize(("text", "size_bytes"), [("1", 1), ("7B", 7), (" 512 kb ", 512 << 10), ("2g", 2 << 30)])
def test_sizes_are_written_as_spark_writes_them(text: str, size_bytes: int) -> None:
    parsed = Settings.parse({PREFIX + "snapshot.upload.bandwidth": text})
    assert parsed.upload_bandwidth_bytes == size_bytes


@pytest.mark.parametrize(
    ("key", "near"),
    [
        ("spark.holdfast.backnd", "spark.holdfast.backend"),
        ("spark.holdfast.stateDir", "spark.holdfast.state.dir"),
        ("spark.holdfast.state.dri", "spark.holdfast.state.dir"),
        ("spark.holdfast.state.directory", "spark.holdfast.state.dir"),
        ("spark.holdfast.snapshot.maxcommits", "spark.holdfast.snapshot.maxCommits"),
        ("spark.holdfast.Shards", "spark.holdfast.shards"),
        ("spark.holdfast.SHARDS", "spark.holdfast.shards"),
        ("spark.holdfast.storge.secret", "spark.holdfast.storage.secret"),
    ],
)
def test_a_misspelt_key_is_refused_with_the_nearest_name(key: str, near: str) -> None:
    """It would silently do nothing."""
    with pytest.raises(InvalidArgumentError, match=f"did you mean '{near}'"):
        Settings.parse({key: "1"})


@pytest.mark.parametrize("key", ["spark.holdfast.sink.password", "spark.holdfast.sink.", "spark.holdfast.sink..host"])
def test_an_option_of_no_sink_is_refused(key: str) -> None:
    """Where the sink's name was forgotten, nobody would read it."""
    Settings.parse({"spark.holdfast.sink.totals.password": SECRET, "spark.holdfast.sink.totals.delta.timeout": "1"})
    with pytest.raises(InvalidArgumentError, match=r"spark\.holdfast\.sink\.<name>\.<option>") as refused:
        Settings.parse({key: SECRET})
    assert SECRET not in str(refused.value)


def test_options_of_backends_are_passed_on() -> None:
    """A plug-in's options need no key of ours; those of backends that were not chosen wait for their turn."""
    configuration = {PREFIX + "mine.host": "h", PREFIX + "memory.limit": "2g", PREFIX + "backend": "mine"}
    assert Settings.parse(configuration, ["memory", "mine"]).backend_options == {"host": "h"}
    del configuration[PREFIX + "backend"]
    assert Settings.parse(configuration, ["memory", "mine"]).backend_options == {"limit": "2g"}
    with pytest.raises(InvalidArgumentError, match=r"'spark.holdfast.mine.host'.*known are .*spark.holdfast.memory.\*"):
        Settings.parse(configuration, ["memory"])
    with pytest.raises(InvalidArgumentError, match=r"did you mean 'spark.holdfast.memory.limit'"):
        Settings.parse({PREFIX + "memry.limit": "2g"}, ["memory"])
    # Whoever chose a backend that is not installed shall hear of that, not of its options.
    configuration[PREFIX + "backend"] = "mine"
    assert Settings.parse(configuration, ["memory"]).backend_options == {"host": "h"}


def test_a_key_like_no_other_gets_the_list() -> None:
    with pytest.raises(InvalidArgumentError, match=r"known are .*spark\.holdfast\.backend.*storage\.\*"):
        Settings.parse({"spark.holdfast.zzzzzzzzzzzzzzzzzzzzzzzz": "1"})


@pytest.mark.parametrize(
    ("key", "value", "why"),
    [
        *(("shards", value, "a whole number") for value in ("four", "2.5")),
        ("metrics.port", "http", "a whole number"),
        *(("shards", "0", "at least 1"), ("snapshot.maxCommits", "-1", "at least 1")),
        *(("snapshot.intervalSeconds", "0", "at least 1"), ("shards", "65537", "at most 65,536")),
        *(("snapshot.upload.bandwidth", value, "512m or 2g") for value in ("0", "fast")),
        *(("snapshot.maxBytes", "many", "512m or 2g"), ("commit.carriedBytes", "2m", "at most 1m")),
        *(("backend", " ", "empty"), ("state.dir", "", "empty"), ("local.dir", "relative/path", "absolute")),
    ],
)
def test_a_value_that_does_not_fit_names_key_value_and_reason(key: str, value: str, why: str) -> None:
    with pytest.raises(InvalidArgumentError, match=why) as caught:
        Settings.parse({PREFIX + key: value})
    assert str(caught.value).startswith(f"{PREFIX}{key} cannot be {value!r}")


def test_storage_options_are_kept_by_name_only() -> None:
    parsed = Settings.parse({STORAGE_PREFIX + "secret": SECRET, STORAGE_PREFIX + "client_kwargs.endpoint_url": "u"})
    assert parsed.storage_names == ("client_kwargs.endpoint_url", "secret")
    assert SECRET not in repr(parsed)
    assert SECRET.encode() not in pickle.dumps(parsed)
    assert pickle.loads(pickle.dumps(parsed)) == parsed


@given(st.dictionaries(st.text().map(lambda t: PREFIX + t), st.text()))
def test_any_configuration_is_parsed_or_refused(configuration: dict[str, str]) -> None:
    try:
        parsed = Settings.parse(configuration)
    except InvalidArgumentError:
        return
    assert len(parsed.storage_names) <= len(configuration)
