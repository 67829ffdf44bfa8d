"""A real HDFS on the loopback: a NameNode and a DataNode, each a process that a test may kill, stop or start again.

::

    with hdfs(tmp_path, java_home) as server:
        open_storage(server.url + "/app", server.options())
        server.namenode.kill()
        server.start_namenode()  # on the same port and data, as after a crash
        server.wait()  # out of safe mode, and the DataNode has reported

The user of the test is the superuser, for whom no permission counts; `other_user` is one for whom they do.
"""

from __future__ import annotations

import getpass
import json
import os
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from tests.servers import downloads
from tests.servers.programs import Program, answer_of, free_ports, wait_until

_NAMENODE = "org.apache.hadoop.hdfs.server.namenode.NameNode"
_DATANODE = "org.apache.hadoop.hdfs.server.datanode.DataNode"
_JVM = [
    "-Xmx128m", "-Xss512k", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-XX:-UsePerfData",
    "-XX:+UnlockDiagnosticVMOptions", "-XX:-BytecodeVerificationRemote",
    "-Djava.net.preferIPv4Stack=true", "-Dorg.slf4j.simpleLogger.showDateTime=true",
]  # fmt: skip
_SETTINGS = {
    "dfs.replication": "1",
    # Small blocks, so that a large object of a test has several.
    "dfs.blocksize": "8m",
    # Out of safe mode as soon as the DataNode has reported.
    "dfs.namenode.safemode.min.datanodes": "1",
    "dfs.namenode.safemode.extension": "0",
    # A dead DataNode is noticed after 12 s, and not after 10 minutes.
    "dfs.heartbeat.interval": "1",
    "dfs.namenode.heartbeat.recheck-interval": "1000",
    "dfs.namenode.datanode.registration.ip-hostname-check": "false",
    # The file of a dead writer is closed after 20 s, and not after 20 minutes.
    "dfs.namenode.lease-hard-limit-sec": "20",
    "dfs.namenode.lease-recheck-interval-ms": "500",
    "dfs.namenode.handler.count": "4",
    "dfs.namenode.resource.du.reserved": "0",
    "dfs.datanode.scan.period.hours": "-1",
    "dfs.datanode.directoryscan.interval": "-1",
    # A DataNode that starts before the NameNode asks again at once; else it sleeps for 5 s.
    "ipc.client.connect.retry.interval": "50",
    "ipc.client.connect.max.retries": "600",
}
#: How old the figures may be that a daemon answers with; else it repeats those of the last 10 s.
_METRICS_PERIOD_MS = 50


class Hdfs:
    """See the module; `folder` keeps everything over restarts."""

    def __init__(self, folder: Path, java_home: Path) -> None:
        self.folder = folder
        self._java = java_home / "bin" / "java"
        self._classes = downloads.hadoop()
        self._port, self._http_port = free_ports(2)
        self._datanode_address = self._datanode_web = ""
        self.address = ("127.0.0.1", self._port)
        self.url = f"hdfs://127.0.0.1:{self._port}"
        self.namenode: Program
        self.datanode: Program
        self._running: list[Program] = []
        # The daemons refuse to start without these folders on their class path; empty ones will do.
        for name in ("hdfs", "datanode", "static"):
            (folder / "web" / "webapps" / name).mkdir(parents=True)

    def options(self, **more: object) -> dict[str, object]:
        """Return options for `open_storage`, with pauses and time-outs that suit a test."""
        settings = {"failover": {"max": {"attempts": "3"}}, "socket-timeout": "3000"}
        return {"dfs": {"client": settings}, **more}

    def start(self) -> None:
        """Format the file system, and start both."""
        program = self._run("format", _NAMENODE, "-format", "-force", "-nonInteractive")
        assert program.wait(120) == 0, program.log.read_text()[-2000:]
        self.start_namenode()
        self.start_datanode()
        self.wait()

    def start_namenode(self) -> None:
        self.namenode = self._run("namenode", _NAMENODE)

    def start_datanode(self) -> None:
        # New ports, so that `wait` tells the new process from the dead one, which the NameNode believes alive.
        data, ipc, http_port = (f"127.0.0.1:{port}" for port in free_ports(3))
        self._datanode_address, self._datanode_web = data, http_port
        settings = {
            "dfs.datanode.data.dir": f"file://{self.folder}/data",
            "dfs.datanode.address": data,
            "dfs.datanode.ipc.address": ipc,
            "dfs.datanode.http.address": http_port,
        }
        self.datanode = self._run("datanode", _DATANODE, settings=settings)

    def wait(self) -> None:
        """Return when the NameNode has left safe mode and knows the DataNode."""
        wait_until(self._is_ready, lambda: [self.namenode, self.datanode])

    def revive(self) -> None:
        """Let go on what is stopped, and start what is dead; return when all serves."""
        for program, start in ((self.namenode, self.start_namenode), (self.datanode, self.start_datanode)):
            if program.is_running():
                program.signal(signal.SIGCONT)
            else:
                start()
        self.wait()

    def stop(self) -> None:
        for program in self._running:
            program.kill()

    @contextmanager
    def other_user(self) -> Iterator[None]:
        """Make the clients that are opened inside those of a user without privileges."""
        before = os.environ.get("HADOOP_USER_NAME")
        os.environ["HADOOP_USER_NAME"] = "somebody"
        try:
            yield
        finally:
            del os.environ["HADOOP_USER_NAME"]
            if before is not None:
                os.environ["HADOOP_USER_NAME"] = before

    def client(self) -> Any:
        """Return a plain client, for looking behind the storage's back."""
        import hdfs_native

        return hdfs_native.Client(self.url)

    def files(self, path: str) -> dict[str, int]:
        """Return every file below a path, unfinished ones too, with its size."""
        try:
            return {s.path: s.length for s in self.client().list_status(path, True) if not s.isdir}
        except FileNotFoundError:
            return {}

    def bytes_read(self) -> int:
        """Return how many bytes the DataNode has sent since it was started, all up to this call."""
        time.sleep(2 * _METRICS_PERIOD_MS / 1000)
        answer = answer_of(f"http://{self._datanode_web}/jmx?qry=Hadoop:service=DataNode,name=DataNodeActivity-*")
        assert answer is not None
        return int(json.loads(answer)["beans"][0]["BytesRead"])

    def _run(self, name: str, main: str, *arguments: str, settings: Mapping[str, str] | None = None) -> Program:
        own = {
            "fs.defaultFS": self.url,
            "dfs.namenode.name.dir": f"file://{self.folder}/names",
            "dfs.namenode.http-address": f"127.0.0.1:{self._http_port}",
        }
        where = self.folder / "settings" / name
        where.mkdir(parents=True, exist_ok=True)
        properties = "".join(
            f"<property><name>{escape(key)}</name><value>{escape(value)}</value></property>\n"
            for key, value in {**_SETTINGS, **own, **(settings or {})}.items()
        )
        (where / "hdfs-site.xml").write_text(f"<configuration>\n{properties}</configuration>\n")
        (where / "hadoop-metrics2.properties").write_text(f"*.periodMillis={_METRICS_PERIOD_MS}\n")
        classes = f"{where}:{self.folder}/web:{self._classes}"
        command = [str(self._java), *_JVM, "-cp", classes, main, *arguments]
        environment = {**os.environ, "HADOOP_USER_NAME": getpass.getuser()}
        self._running.append(Program(command, self.folder / f"{name}.log", environment, self.folder))
        return self._running[-1]

    def _is_ready(self) -> bool:
        if self._bean("FSNamesystemState").get("FSState") != "Operational":
            return False
        live = json.loads(self._bean("NameNodeInfo").get("LiveNodes", "{}"))
        return self._datanode_address in {node["xferaddr"] for node in live.values()}

    def _bean(self, name: str) -> dict[str, Any]:
        """Return what the NameNode tells of itself; nothing while it starts."""
        answer = answer_of(f"http://127.0.0.1:{self._http_port}/jmx?qry=Hadoop:service=NameNode,name={name}")
        beans = json.loads(answer)["beans"] if answer else []
        return dict(beans[0]) if beans else {}


@contextmanager
def hdfs(folder: Path, java_home: Path) -> Iterator[Hdfs]:
    """Run HDFS with its data below `folder`."""
    server = Hdfs(folder, java_home)
    try:
        server.start()
        yield server
    finally:
        server.stop()
