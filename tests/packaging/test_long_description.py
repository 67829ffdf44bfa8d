"""What PyPI shows of a release is README, with links that lead somewhere."""

from __future__ import annotations

import re
import shutil
import sys
from email.message import Message
from email.parser import Parser
from pathlib import Path
from zipfile import ZipFile

import pytest
from readme_renderer.markdown import render

from holdfast.distribution import VERSION
from tests.packaging.building import ROOT, SCRIPTS, build, run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

NEEDED = ("pyproject.toml", "setup.py", "README.md", "LICENSE", "NOTICE", "holdfast/distribution.py")
SOURCE = "https://example.org/holdfast"


def metadata(source: Path, *, published: bool) -> Message:
    """Return the metadata of a distribution built from the files that decide it."""
    for name in NEEDED:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, source / name)
    project = (source / "pyproject.toml").read_text()
    # One package: the others would only take time.
    project = re.sub(r"(?s)^packages = \[.*?^\]", 'packages = ["holdfast"]', project, flags=re.MULTILINE)
    if published:
        project = project.replace("[project.urls]\n", f'[project.urls]\nSource = "{SOURCE}"\n')
    (source / "pyproject.toml").write_text(project)
    build(source, source / "dist", "--wheel")
    (wheel,) = (source / "dist").glob("*.whl")
    run(SCRIPTS / "twine", "check", "--strict", wheel, cwd=source)
    with ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith("/METADATA")]
        return Parser().parsestr(archive.read(name).decode())


@pytest.mark.parametrize("published", [True, False])
def test_the_long_description_renders_and_its_links_lead_somewhere(published: bool, tmp_path: Path) -> None:
    """PyPI has none of the repository's files: a link to one leads to the repository, or is none."""
    found = metadata(tmp_path, published=published)
    assert (found["Name"], found["Version"]) == ("holdfast-spark", VERSION)
    page = render(str(found.get_payload()))
    assert page is not None
    assert page.count("<table>") == len(re.findall(r"^\|---", (ROOT / "README.md").read_text(), re.MULTILINE))
    links = re.findall(r'(?:href|src)="([^"#]+)', page)
    assert [link for link in links if not link.startswith("https://")] == []
    ours = {link for link in links if link.startswith(SOURCE)}
    assert (f"{SOURCE}/blob/v{VERSION}/docs/deploy.md" in ours) == published
    assert (f"{SOURCE}/raw/v{VERSION}/docs/throughput.svg" in ours) == published
    for link in ours:
        assert (ROOT / link.split(f"/v{VERSION}/")[1]).exists(), link


def test_a_python_that_is_too_old_gets_as_far_as_its_version() -> None:
    """pip builds the metadata before it compares versions: Python 3.10, which has no tomllib, got a traceback."""
    program = (
        "import runpy, sys, setuptools.compat.py310\n"
        "sys.modules['tomllib'] = None\n"
        "sys.argv = ['setup.py', '--name']\n"
        "runpy.run_path('setup.py', run_name='__main__')"
    )
    assert run(sys.executable, "-W", "ignore", "-c", program, cwd=ROOT).split()[-1] == "holdfast-spark"
