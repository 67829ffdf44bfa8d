"""A real Kafka on the loopback: one process that is broker and controller, which keeps its topics in a folder.

Made from Kafka's own jars; clients are Spark's connector and, in the JVM of a test's Spark, Kafka's own.
"""

from __future__ import annotations

import base64
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.servers import downloads
from tests.servers.programs import Program, free_ports, wait_until

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
    "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT",
    "auto.create.topics.enable": "false",
    # As there is one broker only.
    "offsets.topic.replication.factor": "1",
    "offsets.topic.num.partitions": "1",
    "transaction.state.log.replication.factor": "1",
    "transaction.state.log.min.isr": "1",
    "transaction.state.log.num.partitions": "1",
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
        self._port, self._controller_port = free_ports(2)
        self.servers = f"127.0.0.1:{self._port}"
        self.broker: Program

    def start(self) -> None:
        """Start it on what the folder holds, and return when it serves."""
        data = self.folder / "data"
        if not data.exists():
            data.mkdir()
            # What `kafka-storage format` writes.
            ids = f"cluster.id={_kafka_id()}\nnode.id=1\ndirectory.id={_kafka_id()}\n"
            (data / "meta.properties").write_text(f"version=1\n{ids}")
        settings = _SETTINGS | {
            "controller.quorum.voters": f"1@127.0.0.1:{self._controller_port}",
            "listeners": f"PLAINTEXT://{self.servers},CONTROLLER://127.0.0.1:{self._controller_port}",
            "advertised.listeners": f"PLAINTEXT://{self.servers}",
            "log.dirs": str(data),
        }
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
