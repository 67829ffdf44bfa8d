"""The documentation site: the repository's own Markdown, and an API reference from the docstrings.

The source folder is the root of the repository, so that a link works on the site as it does in the repository.
`make docs` builds it; `make check` builds it too, without writing pages, and fails on any broken link.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import holdfast

if TYPE_CHECKING:
    from sphinx.application import Sphinx

project = "holdfast"
copyright = "the holdfast authors"  # noqa: A001  Sphinx's name for it
version = release = holdfast.__version__

root_doc = "README"
include_patterns = ["*.md", "docs/**.md", "benches/*.md", "examples/*/README.md"]
exclude_patterns = [".*", "build", "dist", "tests", "**/__pycache__", "**/src"]

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_heading_anchors = 3  # the anchors that GitHub gives to headings
default_role = "py:obj"
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # types stand in the numpy sections
napoleon_google_docstring = False
napoleon_use_ivar = True  # attributes as a list: a dataclass has them as members already
# Python as an example, or a session on the command line: what a lexer cannot read is no error of the document.
suppress_warnings = ["misc.highlighting_failure"]

html_theme = "furo"
html_title = f"holdfast {version}"
html_theme_options = {"sidebar_hide_name": False}
html_copy_source = html_show_sourcelink = False

# The pages of the sidebar by section, from the root.
SECTIONS = {
    "Begin": ["tutorial", "glossary", "faq"],
    "Write a query": ["operators", "transform-with-state", "testing", "state-schema", "migrate"],
    "Exactly-once results": ["sinks", "postgres-sink", "kafka-sink", "file-sinks"],
    "Run it": ["backends", "configuration", "deploy", "operations", "metrics", "ui", "performance"],
    "Use the state": ["lookups", "state-tables", "savepoints"],
    "Reference": ["site/api", "/FORMAT", "/CHANGELOG"],
    "Inside": [
        "/ARCHITECTURE",
        "reliability",
        "decisions/README",
        "/benches/README",
        "/benches/RESULTS",
        "/benches/PEERS",
        "/benches/SINKS",
        "/CONTRIBUTING",
    ],
    "Examples": ["/examples/parquet_backend/README"],
}
DECISIONS = "docs/decisions/README"


def add_contents(app: Sphinx, name: str, source: list[str]) -> None:
    """Append the tables of contents that Sphinx needs, and that the repository's pages do without."""
    if name == root_doc:
        for section, pages in SECTIONS.items():
            paths = "\n".join(page if page.startswith("/") else f"/docs/{page}" for page in pages)
            source[0] += f"\n```{{toctree}}\n:hidden:\n:caption: {section}\n\n{paths}\n```\n"
    elif name == DECISIONS:
        source[0] += "\n```{toctree}\n:hidden:\n:glob:\n\n0*\n```\n"


def setup(app: Sphinx) -> None:
    """Register what is above."""
    app.connect("source-read", add_contents)
