"""A real Kafka on the loopback: one process that is broker and controller, which keeps its topics in a folder.

::

    servers         plain, everything allowed
    sasl_servers    SASL: `USER` with `PASSWORD`, by PLAIN and, once `add_scram_user` was called, by SCRAM
    tls_servers     TLS, for clients with a certificate (`tls_options`)

Users but those of the plain listener have the rights that ACLs say, and all where none speaks of a resource.

Made from Kafka's own jars; clients are Spark's connector and, in the JVM of a test's Spark, Kafka's own.
"""

from __future__ import annotations

import base64
import datetime as dt
import ipaddress
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.servers import downloads
from tests.servers.programs import Program, free_ports, wait_until

#: Who logs in; the password has the mark that suites look for where no credential may be.
USER, PASSWORD = "clara", "not-to-be-seen-by-anyone"

_STARTED = "Kafka Server started"
_JVM = [
    "-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-XX:-UsePerfData",
    "-XX:+UnlockDiagnosticVMOptions", "-XX:-BytecodeVerificationRemote", "-Djava.net.preferIPv4Stack=true",
]  # fmt: skip
_LOGGING = """<?xml version="1.0"?><Configuration status="WARN"><Appenders>
<Console name="console"><PatternLayout pattern="%d{ISO8601} %p %c{1} %m%n"/></Console></Appenders>
<Loggers><Root level="INFO"><AppenderRef ref="console"/></Root></Loggers></Configuration>"""
_SETTINGS = {
    "process.roles": "broker,controller",
    "node.id": "1",
    "controller.listener.names": "CONTROLLER",
    "inter.broker.listener.name": "PLAINTEXT",
    "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT,SASL:SASL_PLAINTEXT,TLS:SSL",
    "sasl.enabled.mechanisms": "PLAIN,SCRAM-SHA-256,SCRAM-SHA-512",
    "listener.name.sasl.plain.sasl.jaas.config": "org.apache.kafka.common.security.plain.PlainLoginModule required "
    f'user_{USER}="{PASSWORD}";',
    **{
        f"listener.name.sasl.scram-sha-{bits}.sasl.jaas.config": "org.apache.kafka.common.security.scram."
        "ScramLoginModule required;"
        for bits in (256, 512)
    },
    "listener.name.tls.ssl.client.auth": "required",
    "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
    "super.users": "User:ANONYMOUS",
    "allow.everyone.if.no.acl.found": "true",
    "auto.create.topics.enable": "false",
    # As there is one broker only.
    "offsets.topic.replication.factor": "1",
    "offsets.topic.num.partitions": "1",
    "transaction.state.log.replication.factor": "1",
    "transaction.state.log.min.isr": "1",
    "transaction.state.log.num.partitions": "1",
    # Who is killed is soon forgotten, and may register again.
    "broker.session.timeout.ms": "2000",
    "broker.heartbeat.interval.ms": "500",
    # What has taken too long is aborted soon, for the tests of that.
    "transaction.abort.timed.out.transaction.cleanup.interval.ms": "500",
    # Small, as the heap is.
    "num.network.threads": "2",
    "num.io.threads": "2",
    "log.cleaner.dedupe.buffer.size": str(4 << 20),
    "log.index.size.max.bytes": str(1 << 20),
}


class Kafka:
    """See the module; `servers` is where clients begin."""

    def __init__(self, folder: Path, java_home: Path) -> None:
        self.folder = folder
        self._java = java_home / "bin" / "java"
        self._classes = downloads.kafka()
        ports = free_ports(4)
        self.servers, self.sasl_servers, self.tls_servers, self._controller = (f"127.0.0.1:{port}" for port in ports)
        self.settings: dict[str, str] = {}
        self.broker: Program

    def start(self) -> None:
        """Start it on what the folder holds, and return when it serves."""
        data = self.folder / "data"
        if not data.exists():
            data.mkdir()
            # What `kafka-storage format` writes.
            ids = f"cluster.id={_kafka_id()}\nnode.id=1\ndirectory.id={_kafka_id()}\n"
            (data / "meta.properties").write_text(f"version=1\n{ids}")
        listeners = f"PLAINTEXT://{self.servers},SASL://{self.sasl_servers},TLS://{self.tls_servers}"
        settings = (
            _SETTINGS
            | self._tls_settings()
            | {
                "controller.quorum.voters": f"1@{self._controller}",
                "listeners": f"{listeners},CONTROLLER://{self._controller}",
                "advertised.listeners": listeners,
                "log.dirs": str(data),
                **self.settings,
            }
        )
        properties = self.folder / "server.properties"
        properties.write_text("".join(f"{name}={value}\n" for name, value in settings.items()))
        logging = self.folder / "log4j2.xml"
        logging.write_text(_LOGGING)
        log = self.folder / "kafka.log"
        log.unlink(missing_ok=True)
        where = [f"-Dlog4j2.configurationFile={logging}", f"-Dkafka.logs.dir={self.folder}", "-cp", self._classes]
        command = [str(self._java), *_JVM, *where, "kafka.Kafka", str(properties)]
        self.broker = Program(command, log, os.environ, self.folder)
        wait_until(lambda: _STARTED in log.read_text(), lambda: [self.broker])

    def restart(self) -> None:
        """Kill it as ``kill -9`` does, and start it again."""
        self.broker.kill()
        self.start()

    def add_topic(self, partitions: int = 1, **settings: str) -> str:
        """Create a topic, and return its name once the broker shows it: the controller says "created" before that."""
        from confluent_kafka.admin import AdminClient, NewTopic

        name = f"topic-{uuid.uuid4().hex}"
        admin = AdminClient({"bootstrap.servers": self.servers})
        admin.create_topics([NewTopic(name, partitions, 1, config=settings)])[name].result(30)

        def is_shown() -> bool:
            topic = admin.list_topics(timeout=30).topics.get(name)
            return topic is not None and len(topic.partitions) == partitions

        wait_until(is_shown, lambda: [self.broker])
        return name

    def add_scram_user(self) -> None:
        """Let `USER` log in by SCRAM."""
        from confluent_kafka import admin as kafka_admin

        kinds = kafka_admin.ScramMechanism
        admin = kafka_admin.AdminClient({"bootstrap.servers": self.servers})
        for kind in (kinds.SCRAM_SHA_256, kinds.SCRAM_SHA_512):
            how = kafka_admin.ScramCredentialInfo(kind, 4096)
            wanted = kafka_admin.UserScramCredentialUpsertion(USER, how, PASSWORD.encode())
            admin.alter_user_scram_credentials([wanted])[USER].result(30)

    def sasl_options(self, mechanism: str = "PLAIN") -> dict[str, str]:
        """Return a client's options for the listener with SASL."""
        return {
            "bootstrap.servers": self.sasl_servers,
            "security.protocol": "SASL_PLAINTEXT",
            "sasl.mechanism": mechanism,
            "sasl.username": USER,
            "sasl.password": PASSWORD,
        }

    def tls_options(self) -> dict[str, str]:
        """Return a client's options for the listener with TLS."""
        return {
            "bootstrap.servers": self.tls_servers,
            "security.protocol": "SSL",
            "ssl.ca.location": str(self.folder / "authority.pem"),
            "ssl.certificate.location": str(self.folder / "certificate.pem"),
            "ssl.key.location": str(self.folder / "key.pem"),
            "ssl.key.password": PASSWORD,
        }

    def _tls_settings(self) -> dict[str, str]:
        authority, key_store = self.folder / "authority.pem", self.folder / "store.pem"
        if not authority.exists():
            certificate, key, encrypted_key = _certificate()
            authority.write_bytes(certificate)
            (self.folder / "certificate.pem").write_bytes(certificate)
            (self.folder / "key.pem").write_bytes(encrypted_key)
            key_store.write_bytes(key + certificate)
        prefix = "listener.name.tls.ssl"
        return {
            f"{prefix}.keystore.type": "PEM",
            f"{prefix}.keystore.location": str(key_store),
            f"{prefix}.truststore.type": "PEM",
            f"{prefix}.truststore.location": str(authority),
        }


def _certificate() -> tuple[bytes, bytes, bytes]:
    """Return a certificate for this machine that signs itself, its key, and the key under `PASSWORD`; all PEM."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "127.0.0.1")])
    today = dt.datetime.now(dt.UTC)
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(today - dt.timedelta(days=1))
        .not_valid_after(today + dt.timedelta(days=30))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem, pkcs8 = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    locks = (serialization.NoEncryption(), serialization.BestAvailableEncryption(PASSWORD.encode()))
    return certificate.public_bytes(pem), *(key.private_bytes(pem, pkcs8, lock) for lock in locks)


def _kafka_id() -> str:
    return base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")


@contextmanager
def kafka(folder: Path, java_home: Path) -> Iterator[Kafka]:
    """Run Kafka with its topics below `folder`."""
    server = Kafka(folder, java_home)
    server.start()
    try:
        yield server
    finally:
        server.broker.kill()
