"""The user's options: what is passed on, refused, and never shown."""

from __future__ import annotations

import ssl

import pytest

from holdfast.errors import InvalidArgumentError
from holdfast.spark_integration.sinks.kafka.options import ClientOptions
from holdfast.spark_integration.sinks.kafka.sink import KafkaSink

_SECRET = "not-to-be-seen"


def options(**values: str) -> ClientOptions:
    """Return options with servers; ``__`` stands for a dot."""
    return ClientOptions.of({name.replace("__", "."): value for name, value in values.items()}, "here:1")


def test_the_option_goes_before_the_argument() -> None:
    assert options(bootstrap__servers="there:2, [::1]:3,PLAINTEXT://far").servers() == [
        ("there", 2),
        ("::1", 3),
        ("far", 9092),
    ]


@pytest.mark.parametrize("servers", ["", " , ", "host:port", ":9092", "host:0", "host:70000"])
def test_servers_that_cannot_be_are_refused(servers: str) -> None:
    with pytest.raises(InvalidArgumentError):
        ClientOptions.of({"bootstrap.servers": servers}, None).servers()


@pytest.mark.parametrize("name", ["transactional.id", "enable.idempotence", "acks", "delivery.report.only.error"])
def test_what_makes_results_exactly_once_is_not_the_users(name: str) -> None:
    with pytest.raises(InvalidArgumentError, match=name):
        ClientOptions.of({name: "1"}, "here:1")


@pytest.mark.parametrize("mechanism", ["GSSAPI", "OAUTHBEARER", "SCRAM-SHA-1"])
def test_logins_that_our_requests_do_not_know_are_refused(mechanism: str) -> None:
    given = options(security__protocol="SASL_SSL", sasl__mechanism=mechanism, sasl__password=_SECRET)
    with pytest.raises(InvalidArgumentError, match="SCRAM-SHA-512") as raised:
        given.security()
    assert _SECRET not in str(raised.value)


def test_a_login_needs_both_halves() -> None:
    with pytest.raises(InvalidArgumentError, match=r"sasl\.password"):
        options(security__protocol="sasl_plaintext", sasl__mechanism="PLAIN", sasl__username="me").security()


def test_certificates_that_cannot_be_read_are_refused_without_what_they_hold() -> None:
    given = options(security__protocol="ssl", ssl__ca__pem=_SECRET)
    with pytest.raises(InvalidArgumentError) as raised:
        given.security()
    assert _SECRET not in repr(raised.getrepr(chain=True))


@pytest.mark.parametrize("name", ["ssl.keystore.location", "ssl.key.pem", "ssl.crl.location"])
def test_other_forms_of_certificates_are_refused_by_name(name: str) -> None:
    with pytest.raises(InvalidArgumentError, match=name):
        ClientOptions.of({"security.protocol": "ssl", name: _SECRET}, "here:1").security()


def test_checks_of_certificates_are_on_unless_they_are_switched_off() -> None:
    usual = options(security__protocol="ssl").security().tls
    loose = options(security__protocol="ssl", enable__ssl__certificate__verification="false").security().tls
    unnamed = options(security__protocol="ssl", ssl__endpoint__identification__algorithm="none").security().tls
    found = [(tls.check_hostname, tls.verify_mode) for tls in (usual, loose, unnamed) if tls is not None]
    assert found == [(True, ssl.CERT_REQUIRED), (False, ssl.CERT_NONE), (False, ssl.CERT_REQUIRED)]


def test_secrets_are_taken_out_of_texts_and_shown_nowhere() -> None:
    given = options(sasl__password=_SECRET, ssl__key__password="other")
    assert given.without_secrets(f"wrong value {_SECRET}, other") == "wrong value ***, ***"
    assert _SECRET not in repr(given)


@pytest.mark.parametrize("value", ["", "soon", "-1", "10", "99999999999"])
def test_a_time_limit_is_a_number(value: str) -> None:
    with pytest.raises(InvalidArgumentError, match=r"transaction\.timeout\.ms"):
        assert options(transaction__timeout__ms=value).timeout_ms


def test_credentials_are_named_to_those_who_must_not_carry_them() -> None:
    """A data source leaves them behind when it travels; Spark Connect is asked for them by name."""
    assert {"sasl.password", "ssl.key.password", "ssl.key.pem"} <= {*KafkaSink("alerts", "topic").credentials}
