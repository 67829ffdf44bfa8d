"""Where Spark is already there, docs/deploy.md installs holdfast without a second one, and without what S3 needs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.packaging.building import ROOT
from tests.pages import shown

pytestmark = [pytest.mark.spark, pytest.mark.all, pytest.mark.slow(120), pytest.mark.timeout(900)]

STRUCK = ("aiobotocore", "s3fs")


def test_the_commands_of_the_guide_install_what_runs_on_a_spark_that_pip_does_not_know(
    wheel: Path, java_home: Path, tmp_path: Path
) -> None:
    """What they install, with a Spark on the path as its own scripts put it there, runs the quickstart."""
    shutil.copy2(wheel, tmp_path)
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "environment"], check=True)
    scripts, of_spark = tmp_path / "environment" / "bin", tmp_path / "spark"
    of_spark.mkdir()
    for package in ("pyspark", "py4j"):
        (of_spark / package).symlink_to(Path(sysconfig.get_path("purelib")) / package)
    here = {"PATH": f"{scripts}:/usr/bin:/bin", "JAVA_HOME": str(java_home), "SPARK_LOCAL_IP": "127.0.0.1"}
    kept = {name: value for name, value in os.environ.items() if name not in {"PYSPARK_PYTHON", "PYTHONPATH"}}

    def run(*command: str | Path, **more: str) -> str:
        done = subprocess.run(
            command, cwd=tmp_path, env=kept | here | more, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    (block,) = [code for language, code in shown("docs/deploy.md") if language == "sh" and "needed.txt" in code]
    *first, last = block.splitlines()
    for command in first:
        run("bash", "-c", command)
    needed = (tmp_path / "needed.txt").read_text().splitlines()
    assert {"pyarrow", "s3fs"} < {line.split(">")[0] for line in needed}
    assert "pyspark" not in "".join(needed)
    (tmp_path / "needed.txt").write_text("\n".join(line for line in needed if not line.startswith(STRUCK)))
    run("bash", "-c", last)
    installed = {line.split("==")[0] for line in run(scripts / "pip", "freeze").splitlines()}
    assert not installed & {"pyspark", "py4j", "botocore", *STRUCK}
    assert "|     UA|  2| 12.0|" in run(
        scripts / "python", ROOT / "examples" / "quickstart.py", PYTHONPATH=str(of_spark)
    )
