"""What pyproject.toml cannot say: the long description is README with links that lead somewhere from PyPI.

They lead to the repository that ``project.urls.Source`` names, at the release's tag. Where none is named, links inside
the repository become plain text, and its pictures are left out.
"""

import re
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
# A link to another site or within the page stays as it is.
LINK = re.compile(r"(!?)\[([^\]]+)\]\((?!\w+:|#)([^)\s]+)\)")


def long_description() -> str:
    """Return README as PyPI shall show it."""
    # Read without tomllib, which Python 3.10 lacks: pip runs this before it says which Python it needs.
    source = re.search(r'^Source = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    (version,) = re.findall(r'^VERSION = "(.*)"$', (ROOT / "holdfast/distribution.py").read_text(), re.MULTILINE)

    def absolute(link: re.Match[str]) -> str:
        picture, text, path = link.groups()
        if source is None:
            return "" if picture else text
        return f"{picture}[{text}]({source[1]}/{'raw' if picture else 'blob'}/v{version}/{path})"

    return LINK.sub(absolute, (ROOT / "README.md").read_text())


setup(long_description=long_description(), long_description_content_type="text/markdown")
