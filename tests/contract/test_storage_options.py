"""URLs and options: what is refused before any I/O, what is converted, and what third-party exceptions become."""

from __future__ import annotations

import errno
import subprocess
import sys
import traceback

import pytest

from holdfast.errors import CorruptionError, HoldfastError, InvalidArgumentError, NotFoundError, UnavailableError
from holdfast.snapshotter.storage.errors import map_error, translated
from holdfast.snapshotter.storage.opening import open_storage
from holdfast.snapshotter.storage.options import parse_storage_options, secrets_of


def test_options_nest_and_get_types() -> None:
    flat = {
        "key": "12345",
        "secret": "true",
        "token": "1.5",
        "anon": "False",
        "max_concurrency": "8",
        "operation_timeout_seconds": "30",
        "client_kwargs.endpoint_url": "http://localhost:9000",
        "client_kwargs.aws_access_key_id": "007",
        "client_kwargs.verify": "/etc/ca.pem",
        "client_kwargs.use_ssl": "true",
        "config_kwargs.read_timeout": "2.5",
        "config_kwargs.retries.total_max_attempts": "3",
        "config_kwargs.s3.addressing_style": "path",
        "unknown_of_a_plug_in": "7",
    }
    assert parse_storage_options(flat) == {
        "key": "12345",
        "secret": "true",
        "token": "1.5",
        "anon": False,
        "max_concurrency": 8,
        "operation_timeout_seconds": 30.0,
        "client_kwargs": {"aws_access_key_id": "007", "verify": "/etc/ca.pem", "use_ssl": True}
        | {"endpoint_url": "http://localhost:9000"},
        "config_kwargs": {"read_timeout": 2.5, "retries": {"total_max_attempts": 3}}
        | {"s3": {"addressing_style": "path"}},
        "unknown_of_a_plug_in": "7",
    }


@pytest.mark.parametrize(
    "flat",
    [
        {"": "1"},
        {"a..b": "1"},
        {".a": "1"},
        {"a": "1", "a.b": "2"},
        {"a.b": "2", "a": "1"},
        {"anon": "CANARY"},
        {"max_concurrency": "CANARY"},
        {"config_kwargs.read_timeout": "CANARY"},
    ],
)
def test_bad_options(flat: dict[str, str]) -> None:
    with pytest.raises(InvalidArgumentError, match="option") as raised:
        parse_storage_options(flat)
    assert "CANARY" not in "".join(traceback.format_exception(raised.value))


def test_secrets_are_found_at_any_depth() -> None:
    options = {
        "key": "a1",
        "client_kwargs": {"aws_secret_access_key": "b2", "endpoint_url": "http://x"},
        "s3_additional_kwargs": {"SSECustomerKey": "c3"},
        "account_key": "d4",
        "credentials": {"anything": {"inside": "e5"}},
        "anon": True,
        "token": "",
    }
    assert secrets_of(options) == {"a1", "b2", "c3", "d4", "e5"}


SCHEMES = "unknown storage scheme; known schemes: abfs, file, gs, hdfs, memory, s3 and the others of fsspec"


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("s4://bucket", SCHEMES),
        ("s3://", "s3://bucket"),
        ("s3:bucket", "scheme://root"),
        ("s3://b*cket", "s3://bucket"),
        ("s3://bucket/a/../b", "segments"),
        ("s3://bucket//a", "segments"),
        ("memory:///", "name a root"),
        ("memory:x", "scheme://root"),
        ("s3://CANARY:CAN/ARY", "holds credentials"),
    ],
)
def test_refused_urls(url: str, message: str) -> None:
    """Credentials are not repeated."""
    with pytest.raises(InvalidArgumentError, match=message) as raised:
        open_storage(url)
    assert "CANARY" not in "".join(traceback.format_exception(raised.value))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"secrett": "x"}, r"did you mean 'secret'\?.*option=secrett"),
        ({"session": "x"}, "unknown option"),
        ({"key": 12345}, "must be a non-empty string"),
        ({"secret": "with newline\n"}, "white space"),
        ({"token": ""}, "non-empty"),
        ({"endpoint_url": "http://user:CANARY@host"}, "endpoint_url holds credentials"),
        ({"client_kwargs": {"endpoint_url": "http://user:CANARY@host"}}, "endpoint_url holds credentials"),
        ({"key": "CANARY"}, r"set both, or neither.*options='key secret'"),
        ({"secret": "CANARY"}, r"set both, or neither.*options='key secret'"),
        ({"token": "CANARY"}, "requires key and secret"),
        ({"key": "CANARY", "secret": "CANARY", "anon": True}, r"contradict.*options='key secret anon'"),
        ({"key": "CANARY", "secret": "CANARY", "profile": "mine"}, r"contradict.*options='key secret profile'"),
        ({"endpoint_url": "http://a", "client_kwargs": {"endpoint_url": "b"}}, r"contradict.*endpoint_url differ"),
    ],
)
def test_refused_options(options: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message) as raised:
        open_storage("s3://bucket", options)
    assert "CANARY" not in str(raised.value)


@pytest.mark.parametrize(("scheme", "package"), [("gs", "gcsfs"), ("abfs", "adlfs"), ("abfss", "adlfs")])
def test_file_system_whose_package_is_missing(scheme: str, package: str) -> None:
    with pytest.raises(InvalidArgumentError, match=rf"(?i)^{scheme}:// needs .* package .*install {package}"):
        open_storage(f"{scheme}://bucket/x")


def test_hdfs_without_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "holdfast.snapshotter.storage.hdfs", raising=False)
    monkeypatch.setitem(sys.modules, "hdfs_native", None)
    with pytest.raises(InvalidArgumentError, match=r"hdfs-native.*pip install 'holdfast-spark\[hdfs\]'"):
        open_storage("hdfs://namenode:8020/x")


def hdfs_error(java_class: str, text: str = "said so") -> Exception:
    return RuntimeError(f'RPCError("{java_class}", "{text}\\n\\tat org.apache.hadoop.Some.where(Some.java:1)")')


@pytest.mark.parametrize(
    ("original", "expected"),
    [
        (hdfs_error("org.apache.hadoop.security.AccessControlException"), InvalidArgumentError),
        (hdfs_error("org.apache.hadoop.security.token.SecretManager$InvalidToken"), InvalidArgumentError),
        (hdfs_error("org.apache.hadoop.hdfs.server.namenode.SafeModeException"), UnavailableError),
        (hdfs_error("org.apache.hadoop.hdfs.protocol.DSQuotaExceededException"), UnavailableError),
        (hdfs_error("org.apache.hadoop.fs.ParentNotDirectoryException"), InvalidArgumentError),
        (hdfs_error("java.io.IOException", "could only be written to 0 of the 1 minReplication"), UnavailableError),
        (hdfs_error("java.io.IOException", "Source /a and /b must both be directories"), InvalidArgumentError),
        (RuntimeError('FatalRPCError("javax.security.sasl.SaslException", "no")'), InvalidArgumentError),
        (RuntimeError('SASLError("no ticket")'), InvalidArgumentError),
        (RuntimeError("NoSASLMechanism"), InvalidArgumentError),
        (RuntimeError('InvalidArgument("No NameNode hosts found")'), InvalidArgumentError),
        (RuntimeError('DataTransferError("All nodes failed for write")'), UnavailableError),
    ],
    ids=lambda value: str(value)[:60],
)
def test_mapping_of_hdfs(original: Exception, expected: type[HoldfastError]) -> None:
    """The Java class decides, and the stack trace of the server is left out."""
    error = map_error(original, action="put", url="hdfs://h", key="k")
    assert type(error) is expected
    assert "Some.java" not in str(error)


def test_urls_are_normalised() -> None:
    assert open_storage("hdfs://h:8020/a/b/").url == "hdfs://h:8020/a/b"
    assert open_storage("S3A://bucket").url == "s3://bucket"
    assert open_storage("memory://x/y/").url == "memory://x/y"


@pytest.mark.slow(1)
def test_local_storage_needs_neither_fsspec_nor_botocore(tmp_path: object) -> None:
    code = (
        "import sys; from holdfast.snapshotter.storage.opening import open_storage;"
        "s = open_storage(sys.argv[1]);"
        "s.put('a', b'1'); s.get('a'); s.list(''); s.delete(['a']);"
        "print({'fsspec', 's3fs', 'botocore', 'aiohttp'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        capture_output=True, text=True, timeout=60, env={"PYTHONPATH": ":".join(sys.path)}, cwd="/", check=False,
    )  # fmt: skip
    assert done.stdout == "set()\n", done.stderr


def client_error(code: str, status: int) -> Exception:
    from botocore.exceptions import ClientError

    response = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}
    return ClientError(response, "Operation")  # type: ignore[arg-type]


def botocore_error(name: str, **facts: object) -> Exception:
    import botocore.exceptions

    error: Exception = getattr(botocore.exceptions, name)(**facts)
    return error


def caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


CASES = [
    (client_error("NoSuchKey", 404), NotFoundError),
    (client_error("NoSuchBucket", 404), InvalidArgumentError),
    (client_error("404", 404), InvalidArgumentError),
    (client_error("AccessDenied", 403), InvalidArgumentError),
    (client_error("403", 403), InvalidArgumentError),
    (client_error("SignatureDoesNotMatch", 403), InvalidArgumentError),
    (client_error("ExpiredToken", 400), InvalidArgumentError),
    (client_error("PermanentRedirect", 301), InvalidArgumentError),
    (client_error("SlowDown", 503), UnavailableError),
    (client_error("InternalError", 200), UnavailableError),
    (client_error("TooManyRequests", 429), UnavailableError),
    (client_error("RequestTimeout", 400), UnavailableError),
    (caused(FileNotFoundError("s3fs"), client_error("NoSuchBucket", 404)), InvalidArgumentError),
    (caused(PermissionError("s3fs"), client_error("InvalidAccessKeyId", 403)), InvalidArgumentError),
    (botocore_error("EndpointConnectionError", endpoint_url="u", error="e"), UnavailableError),
    (botocore_error("ConnectTimeoutError", endpoint_url="u", error="e"), UnavailableError),
    (botocore_error("ReadTimeoutError", endpoint_url="u", error="e"), UnavailableError),
    (botocore_error("HTTPClientError", error="e"), UnavailableError),
    (botocore_error("ResponseStreamingError", error="e"), UnavailableError),
    (botocore_error("IncompleteReadError", actual_bytes=1, expected_bytes=2), UnavailableError),
    (botocore_error("FlexibleChecksumError", error_msg="e"), CorruptionError),
    (botocore_error("NoCredentialsError"), InvalidArgumentError),
    (botocore_error("ProfileNotFound", profile="p"), InvalidArgumentError),
    (botocore_error("ParamValidationError", report="r"), InvalidArgumentError),
    (ValueError("Invalid endpoint"), InvalidArgumentError),
    (TypeError("unexpected keyword"), InvalidArgumentError),
    (ImportError("install gcsfs"), InvalidArgumentError),
    (NotImplementedError("read only"), InvalidArgumentError),
    (TimeoutError(), UnavailableError),
    (ConnectionResetError(errno.ECONNRESET, "reset"), UnavailableError),
    (RuntimeError("anything"), UnavailableError),
    (OSError("no number"), UnavailableError),
    (OSError(errno.EIO, "disk"), UnavailableError),
    (OSError(errno.ENOSPC, "full"), UnavailableError),
    (OSError(errno.EROFS, "read only"), InvalidArgumentError),
    (PermissionError("denied"), InvalidArgumentError),
    (FileNotFoundError("gone"), NotFoundError),
    (IsADirectoryError("folder"), InvalidArgumentError),
    (OSError(errno.ENAMETOOLONG, "long"), InvalidArgumentError),
]


@pytest.mark.parametrize(("original", "expected"), CASES, ids=[repr(case[0])[:60] for case in CASES])
def test_mapping(original: Exception, expected: type[HoldfastError]) -> None:
    error = map_error(original, action="get", url="s3://b", key="k")
    assert type(error) is expected
    assert error.facts["key"] == "k"
    assert error.facts["detail"]
    assert error.retryable == (expected is UnavailableError)


def test_mapping_keeps_the_cause_unless_it_holds_a_secret() -> None:
    for secret, kept in (("absent", True), ("CANARY", False)):
        original = caused(ValueError("harmless"), OSError("with CANARY inside"))
        with pytest.raises(InvalidArgumentError) as raised, translated("get", "s3://b", "k", {secret}):
            raise original
        assert (raised.value.__cause__ is original) == kept
        assert ("CANARY" in "".join(traceback.format_exception(raised.value))) == kept
    error = map_error(
        ValueError("it is CANARY2, not CANARY"), action="get", url="u", key="k", secrets={"CANARY", "CANARY2"}
    )
    assert "it is ***, not ***" in str(error)


def test_our_own_errors_and_interrupts_pass() -> None:
    for error in (CorruptionError("ours"), KeyboardInterrupt()):
        with pytest.raises(type(error)) as raised, translated("get", "s3://b", "k"):
            raise error
        assert raised.value is error


def test_one_hopeless_failure_makes_a_delete_hopeless() -> None:
    failures: list[tuple[str, HoldfastError]] = [("a", UnavailableError("x")), ("b", InvalidArgumentError("y"))]
    storage = open_storage("memory://deleted")
    with pytest.raises(InvalidArgumentError) as raised:
        storage._require_deleted(failures)
    assert (raised.value.facts["failed"], raised.value.facts["key"]) == (2, "b")
    with pytest.raises(UnavailableError):
        storage._require_deleted(failures[:1])
