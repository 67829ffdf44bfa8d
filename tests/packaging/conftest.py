"""What `make dist` builds of what is checked out here, once for the tests of this folder."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.packaging.building import ROOT, build, run


@pytest.fixture(scope="session")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the sdist and the wheel, built from a copy."""
    source, dist = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    listed = run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", cwd=ROOT)
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, source / name)
    build(source, dist, "--sdist", "--wheel")
    return dist


@pytest.fixture(scope="session")
def wheel(dist: Path) -> Path:
    """Return the wheel."""
    (wheel,) = dist.glob("*.whl")
    return wheel
