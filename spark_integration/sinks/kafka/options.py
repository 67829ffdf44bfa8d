"""Connection options in librdkafka's names, for its producer and for the sink's own requests.

Options come from the query, never from the sink: they may contain credentials, which no error, log or repr shows.
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from holdfast.errors import InvalidArgumentError
from holdfast.spark_integration.sinks.kafka.brokers import MECHANISMS, Cluster, Login, Security

SERVERS = "bootstrap.servers"
TIMEOUT = "transaction.timeout.ms"

#: Options that Spark Connect returns only by name.
CREDENTIALS = (
    *("sasl.username", "sasl.password", "sasl.oauthbearer.client.secret", "sasl.oauthbearer.config"),
    *("ssl.key.password", "ssl.key.pem", "ssl.keystore.password"),
)

#: Options that exactly-once delivery depends on: the user must not set them.
_OURS = (
    *("transactional.id", "enable.idempotence", "acks", "request.required.acks", "enable.gapless.guarantee"),
    "delivery.report.only.error",
)
#: Like options that end with ``_cb``, these take Python objects.
_NO_TEXT = ("logger", "on_delivery", "default.topic.config")
_DEFAULTS: Mapping[str, str | int | bool] = {
    # The key-based partitioner of Kafka's Java client, which Spark's sink uses.
    "partitioner": "murmur2_random",
    # Otherwise a new producer waits 50 or 500 ms before its second connection: docs/decisions/0040-kafka-sink.md.
    "enable.sparse.connections": False,
    # Reconnect to a restarted broker quickly: the default is 10 s.
    "reconnect.backoff.max.ms": 1000,
    "enable.idempotence": True,
    # Do not report successes: each costs a Python call.
    "delivery.report.only.error": True,
}
_SECRET = ("password", "secret", "key.pem", "username", "oauthbearer.config", "jaas", "token")
_UNREADABLE = ("ssl.keystore.location", "ssl.key.pem", "ssl.certificate.pem", "ssl.crl.location", "ssl.engine.location")


@dataclass(frozen=True)
class ClientOptions:
    """The options with which one query's sink connects to Kafka."""

    values: Mapping[str, str] = field(repr=False)  #: librdkafka's options, including ``bootstrap.servers``

    @classmethod
    def of(cls, options: Mapping[str, str], servers: str | None) -> ClientOptions:
        """Check the user's options, which override `servers`. Raises `InvalidArgumentError` for a forbidden option."""
        for name in _OURS:
            if name in options:
                raise InvalidArgumentError("the Kafka sink sets this option itself; remove it", option=name)
        for name in options:
            if name.endswith("_cb") or name in _NO_TEXT:
                raise InvalidArgumentError(
                    "this option of librdkafka takes a Python object, but settings are text; remove it", option=name
                )
        values = {SERVERS: servers, **options} if servers else dict(options)
        if not values.get(SERVERS, "").strip(", "):
            raise InvalidArgumentError(
                "no brokers are given: pass servers to sinks.kafka, or set spark.holdfast.sink.<name>.bootstrap.servers"
            )
        return cls(values)

    @property
    def timeout_ms(self) -> int | None:
        """The user's transaction timeout; None if not set."""
        value = self.values.get(TIMEOUT)
        if value is None:
            return None
        if not value.isdecimal() or not 1000 <= int(value) < 1 << 31:
            raise InvalidArgumentError(
                "transaction.timeout.ms must be a number of milliseconds, at least 1000", value=value
            )
        return int(value)

    def for_producer(self, transactional_id: str, timeout_ms: int) -> dict[str, object]:
        """Return the configuration for librdkafka's producer."""
        return {**_DEFAULTS, **self.values, "transactional.id": transactional_id, TIMEOUT: timeout_ms}

    def servers(self) -> list[tuple[str, int]]:
        return [_address(part) for part in self.values[SERVERS].split(",") if part.strip()]

    def security(self) -> Security:
        """Return the security of the sink's own connections. Raises `InvalidArgumentError` if unsupported."""
        protocol = self.values.get("security.protocol", "plaintext").lower()
        if protocol not in ("plaintext", "ssl", "sasl_plaintext", "sasl_ssl"):
            raise InvalidArgumentError("security.protocol must be plaintext, ssl, sasl_plaintext or sasl_ssl")
        tls = self._tls() if protocol.endswith("ssl") else None
        return Security(tls, self._login() if protocol.startswith("sasl") else None)

    def cluster(self, patience_ms: int) -> Cluster:
        return Cluster(self.servers(), self.security(), patience_ms=patience_ms)

    def without_secrets(self, text: str) -> str:
        """Redact the values of possibly secret options in a librdkafka message."""
        for name, value in self.values.items():
            if value and any(word in name for word in _SECRET):
                text = text.replace(value, "***")
        return text

    def _login(self) -> Login:
        mechanism = (self.values.get("sasl.mechanism") or self.values.get("sasl.mechanisms") or "GSSAPI").upper()
        if mechanism not in MECHANISMS:
            raise InvalidArgumentError(
                f"the Kafka sink supports {', '.join(MECHANISMS)}; choose one with sasl.mechanism",
                mechanism=mechanism,
            )
        user, password = self.values.get("sasl.username"), self.values.get("sasl.password")
        if not user or not password:
            raise InvalidArgumentError("this SASL mechanism needs sasl.username and sasl.password", mechanism=mechanism)
        return Login(mechanism, user, password)

    def _tls(self) -> ssl.SSLContext:
        for name in _UNREADABLE:
            if name in self.values:
                raise InvalidArgumentError(
                    "the Kafka sink takes certificates as files in PEM: ssl.ca.location, ssl.certificate.location and "
                    "ssl.key.location",
                    option=name,
                )
        authority = self.values.get("ssl.ca.location")
        certificate, key = self.values.get("ssl.certificate.location"), self.values.get("ssl.key.location")
        try:
            tls = ssl.create_default_context(cadata=self.values.get("ssl.ca.pem"))
            if authority and authority != "probe":
                folder = Path(authority).is_dir()
                tls.load_verify_locations(None if folder else authority, authority if folder else None)
            if certificate:
                tls.load_cert_chain(certificate, key, self.values.get("ssl.key.password", ""))
            if "ssl.cipher.suites" in self.values:
                tls.set_ciphers(self.values["ssl.cipher.suites"])
        except (OSError, ValueError):
            # Not chained to the cause, which may quote a PEM's contents.
            raise InvalidArgumentError(
                "the certificates cannot be read; check ssl.ca.location, ssl.certificate.location, ssl.key.location "
                "and ssl.key.password"
            ) from None
        if self.values.get("ssl.endpoint.identification.algorithm", "https").lower() == "none":
            tls.check_hostname = False
        if self.values.get("enable.ssl.certificate.verification", "true").lower() == "false":
            tls.check_hostname = False
            tls.verify_mode = ssl.CERT_NONE
        return tls


def _address(text: str) -> tuple[str, int]:
    place = text.strip().rpartition("://")[2]
    host, colon, port = place.rpartition(":")
    if not colon or place.endswith("]"):
        host, port = place, "9092"
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise InvalidArgumentError("bootstrap.servers must be a list of host:port, separated by commas")
    return host.strip("[]"), int(port)
