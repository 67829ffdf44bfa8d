"""On PyPI, `holdfast` is another project: whoever has both is told, and what to do works."""

from __future__ import annotations

from pathlib import Path
from zipfile import ZipFile

import pytest

from tests.packaging.building import installed, pip, run, started

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

RECORD = "holdfast-0.5.1.dist-info"


@pytest.fixture
def namesake(tmp_path: Path) -> Path:
    """Return a wheel with the name and the module that the other project's has."""
    wheel = tmp_path / "holdfast-0.5.1-py3-none-any.whl"
    with ZipFile(wheel, "w") as archive:
        archive.writestr("holdfast/__init__.py", '"""Another project."""\n')
        archive.writestr(f"{RECORD}/METADATA", "Metadata-Version: 2.1\nName: holdfast\nVersion: 0.5.1\n")
        archive.writestr(f"{RECORD}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{RECORD}/RECORD", f"holdfast/__init__.py,,\n{RECORD}/METADATA,,\n{RECORD}/WHEEL,,\n")
    return wheel


def test_a_namesake_that_replaced_the_package_is_an_error_that_names_it(
    wheel: Path, namesake: Path, tmp_path: Path
) -> None:
    """Without it: `module 'holdfast' has no attribute 'stream'`, or an import error inside the command line."""
    python = installed(wheel, tmp_path / "environment")
    pip(python, "install", namesake)
    told = started(python.parent / "holdfast", "--version", cwd=tmp_path)
    assert told.returncode == 2
    assert "holdfast: `import holdfast` gives another project's package, not holdfast-spark" in told.stderr
    assert "Traceback" not in told.stderr
    told = started(python, "-c", "from holdfast.spark_integration.stream import stream; stream(None)", cwd=tmp_path)
    assert "ConflictError: `import holdfast` gives another project's package" in told.stderr
    # What the message says to do.
    pip(python, "uninstall", "holdfast")
    pip(python, "install", "--force-reinstall", "--no-deps", wheel)
    assert started(python.parent / "holdfast", "--version", cwd=tmp_path).stderr == ""
    assert "stream" in run(python, "-c", "import holdfast; print(holdfast.stream)", cwd=tmp_path)


def test_a_namesake_that_was_there_before_is_a_warning(wheel: Path, namesake: Path, tmp_path: Path) -> None:
    """All works, until the other one is upgraded or removed; one warning in a process."""
    python = installed(namesake, tmp_path / "environment")
    pip(python, "install", "--no-deps", wheel)
    told = started(python.parent / "holdfast", "--version", cwd=tmp_path)
    assert told.returncode == 0
    assert told.stderr.count("UserWarning: holdfast 0.5.1, another project, is installed in the folder of") == 1
