"""What all Sparks of a test run share: ``tests/spark-conf``, and their classes as the JVM lays them out, in a file.

::

    build/spark-classes-0123456789abcdef/    by the Java and the jars that made it, which are the only ones it fits
        classes.jsa                          Java's archive of the classes that a query loads
        spark-defaults.conf                  what is in tests/spark-conf, and where the archive and the jar are
    build/spark-classes-0123456789abcdef.jar tests/spark-conf/LocalFiles.java, compiled

With the archive the JVM of a query takes 10 seconds of CPU time instead of 14. One that cannot use it goes on without,
and says nothing. The jar spares twelve processes in a micro-batch. Java wants no folder of files on the class path for
that, so Spark is told of the settings by the arguments of spark-submit, which every process of a run inherits, and not
by SPARK_CONF_DIR. Spark 4.0 gets a copy of the settings: a class that they name had another package there.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pyspark

_ROOT = Path(__file__).parents[1]
_DEFAULTS = _ROOT / "tests" / "spark-conf" / "spark-defaults.conf"
_STREAMING, _SINCE_41 = "org.apache.spark.sql.execution.streaming", ".checkpointing"
# The package of what writes the files of Spark's checkpoint.
FILE_MANAGERS = _STREAMING if pyspark.__version__.startswith("4.0.") else _STREAMING + _SINCE_41
_LOCAL_FILES = _DEFAULTS.with_name("LocalFiles.java")
_JARS = Path(pyspark.__file__).parent / "jars"
_DRIVER, _EXECUTOR = "spark.driver.extraJavaOptions ", "spark.executor.extraJavaOptions "
_QUIET = "-Xlog:cds=off -Xlog:cds+dynamic=off"


def use_defaults(file: Path = _DEFAULTS) -> None:
    """Let the Sparks that this process and those below it start have the settings in a file."""
    if file == _DEFAULTS and FILE_MANAGERS == _STREAMING:
        file = _written(_ROOT / "build" / f"spark-{pyspark.__version__}.conf")
    os.environ.pop("SPARK_CONF_DIR", None)
    os.environ["PYSPARK_SUBMIT_ARGS"] = f"--properties-file {shlex.quote(str(file))} pyspark-shell"


def java_options() -> str:
    """Return what an executor's JVM is given, for Spark's daemons, which read no such settings."""
    _, file, _ = shlex.split(os.environ["PYSPARK_SUBMIT_ARGS"])
    (line,) = (line for line in Path(file).read_text().splitlines() if line.startswith(_EXECUTOR))
    return line.removeprefix(_EXECUTOR).strip()


def use_archive() -> bool:
    """Let them have the archive too; tell whether they have.

    Where it is not there, it is made, by one process; others go on without it meanwhile, and may ask again.
    """
    from holdfast.spark_integration.java import ensure_java

    java = ensure_java()
    folder = _ROOT / "build" / f"spark-classes-{_key(java)}"
    if not folder.is_dir():
        folder.parent.mkdir(exist_ok=True)
        with open(folder.with_suffix(".lock"), "w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            if not folder.is_dir():
                _make(folder, java)
    use_defaults(folder / _DEFAULTS.name)
    return True


def _key(java_home: Path) -> str:
    """Tell this Java, these jars and these settings from others."""
    release = java_home / "release"
    java = release.read_text() if release.is_file() else ""
    ours = _DEFAULTS.read_text() + _LOCAL_FILES.read_text()
    facts = (java_home.resolve(), java, _JARS, _JARS.stat().st_mtime_ns, pyspark.__version__, ours)
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]


def _make(folder: Path, java_home: Path) -> None:
    """Compile what Spark shall have, and run a small query, at whose end its JVM writes the archive."""
    partial = folder.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    (partial / "work" / "input").mkdir(parents=True)
    # An archive wants the jars where they were.
    jar = folder.with_suffix(".jar")
    _compile(jar, partial / "classes", java_home)
    archive = partial / "classes.jsa"
    use_defaults(_written(partial / "making.conf", f"-XX:ArchiveClassesAtExit={archive}", (_DRIVER,), jar))
    pq.write_table(pa.table({"key": ["a", "b"], "v": [1, 2]}), partial / "work" / "input" / "0.parquet")
    program = _ROOT / "tests" / "spark" / "local_query.py"
    # Its end is that of its JVM, which holds the pipes.
    command = [sys.executable, str(program), str(partial / "work"), "memory"]
    environment = {**os.environ, "PYTHONPATH": str(_ROOT)}
    done = subprocess.run(command, cwd=partial, env=environment, capture_output=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the query whose classes are kept failed: {done.stderr[-5000:].decode()}")
    # What is left may be a folder that the state server, which ends with its executor, has just removed itself.
    shutil.rmtree(partial / "work", ignore_errors=True)
    _written(partial / _DEFAULTS.name, f"-XX:SharedArchiveFile={folder / archive.name}", jar=jar)
    partial.rename(folder)


def _compile(jar: Path, folder: Path, java_home: Path) -> None:
    """Make a jar of LocalFiles.java with the compiler that Spark has for its own: a runtime has none."""
    jars = os.pathsep.join(map(str, _JARS.glob("*.jar")))
    compiler = "org.codehaus.commons.compiler.samples.CompilerDemo"
    folder.mkdir()
    command = [str(java_home / "bin" / "java"), "-XX:TieredStopAtLevel=1", "-cp", jars, compiler]
    done = subprocess.run(
        [*command, "-d", str(folder), "-classpath", jars, str(_LOCAL_FILES)], capture_output=True, check=False
    )
    classes = list(folder.glob("*.class"))
    # It says what is wrong, but ends with 0.
    if done.returncode or not classes:
        raise RuntimeError(f"{_LOCAL_FILES} was not compiled: {(done.stdout + done.stderr)[-5000:].decode()}")
    with zipfile.ZipFile(jar, "w") as archive:
        for file in classes:
            archive.write(file, file.name)


def _written(
    file: Path, option: str = "", lines_of: tuple[str, ...] = (_DRIVER, _EXECUTOR), jar: Path | None = None
) -> Path:
    """Write the settings with a further option for the JVMs, our jar if any, and names as this Spark knows them."""
    text = _DEFAULTS.read_text().replace(_STREAMING + _SINCE_41, FILE_MANAGERS)
    further = f" {_QUIET} {option}" if option else ""
    lines = [line + further if line.startswith(lines_of) else line for line in text.splitlines()]
    assert all(any(line.startswith(wanted) for line in lines) for wanted in lines_of)
    if jar is not None:
        lines += [f"spark.{process}.extraClassPath {jar}" for process in ("driver", "executor")]
        lines.append(f"spark.hadoop.fs.file.impl {_LOCAL_FILES.stem}")
    file.parent.mkdir(exist_ok=True)
    partial = file.with_suffix(f".{os.getpid()}")
    partial.write_text("\n".join([*lines, ""]))
    return partial.replace(file)


if __name__ == "__main__":
    use_archive()
