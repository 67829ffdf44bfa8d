"""One parser of URLs: what a path, a URL of Hadoop's and a cloud's mean, for state, savepoints and sinks alike."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from holdfast import sinks
from holdfast.errors import InvalidArgumentError
from holdfast.settings import Settings
from holdfast.snapshotter.storage.options import parse_url

_AS_WRITTEN = {
    "/data/app": "/data/app",
    "app": os.path.abspath("app"),
    "file:/data/app": "/data/app",
    "file:///data//app/": "/data/app",
    "FILE://localhost/data": "/data",
    "/data/with space?#%20": "/data/with space?#%20",
    "hdfs:/app": "hdfs:///app",
    "hdfs:///app/": "hdfs:///app",
    "hdfs://namenode:8020/app": "hdfs://namenode:8020/app",
    "S3A://bucket/app/": "s3a://bucket/app",
    " s3://bucket/app": "s3://bucket/app",
    "./totals:v2": os.path.abspath("totals:v2"),
    "s3://bucket/a:b": "s3://bucket/a:b",
    "abfss://box@account.dfs.core.windows.net/app": "abfss://box@account.dfs.core.windows.net/app",
    "sftp://user@host/app": "sftp://user@host/app",
    "sftp://host:22/a@b": "sftp://host:22/a@b",
    "hdfs://namenode:8020/a:b@c": "hdfs://namenode:8020/a:b@c",
    "sftp://user@[fd00::1]:22/app": "sftp://user@[fd00::1]:22/app",
    "hdfs://[2001:db8:0:0:0:0:0:1]/app": "hdfs://[2001:db8:0:0:0:0:0:1]/app",
}
_REFUSED = {
    "": "URL or a path",
    "~/app": "~ is not expanded",
    "file:app": "absolute path",
    "file://host/app": "names a host",
    "/data/a\x00b": "zero byte",
    "s3:/bucket/app": "write s3://",
    "totals:v2": "or ./totals:… where it is a path",
    "s3://CANARY:CANARY@bucket/app": "holds credentials",
    "sftp://user:CANARY@host/app": "holds credentials",
    "abfss://box@account/app?sig=CANARY": "holds credentials or parameters",
    "dbfs:/app": "/dbfs/",
    r"C:\data\app": "Windows",
    r"\\host\share\app": "Windows",
    r"\\?\C:\data\app": "Windows",
    "gs://CANARY:CANARY/CANARY@bucket/app": "holds credentials",
    "sftp://user:CANARY/CANARY@host:22/app": "holds credentials",
    "sftp://[fd00::1]:CANARY/app": "holds credentials",
    "simplecache::s3://bucket": "chained",
    "simplecache::sftp://[fd00::1]/app": "chained",
}


def test_a_path_reads_as_one() -> None:
    assert parse_url(Path("/data/app")) == ("file", "", "/data/app")


@pytest.mark.parametrize("url", _AS_WRITTEN)
def test_state_and_sinks_understand_a_url_alike(url: str) -> None:
    """A sink took file:/x for a folder of that name below the working directory, and refused Azure's URLs."""
    expected = _AS_WRITTEN[url]
    assert str(parse_url(url)) == expected
    assert str(parse_url(expected)) == expected
    assert Settings.parse({"spark.holdfast.state.dir": url}).state_dir == expected
    assert sinks.parquet("totals", url).url == expected  # type: ignore[attr-defined]
    assert sinks.delta("totals", url).url == expected  # type: ignore[attr-defined]


@pytest.mark.parametrize("url", _REFUSED)
def test_state_and_sinks_refuse_a_url_alike(url: str) -> None:
    for opened in (
        parse_url,
        lambda url: Settings.parse({"spark.holdfast.state.dir": url}),
        lambda url: sinks.parquet("totals", url),
        lambda url: sinks.delta("totals", url),
    ):
        if url or opened is parse_url:
            with pytest.raises(InvalidArgumentError, match=_REFUSED[url]) as raised:
                opened(url)
            assert "CANARY" not in str(raised.value)
