"""What the documents say can be followed: code, commands, settings and names in them exist.

`tests/test_shown_code.py` and `tests/spark/queries/test_documents.py` run the code that shows a result; `make check`
follows the links.
"""

from __future__ import annotations

import ast
import importlib
import re
from dataclasses import fields

import click
import pytest

import holdfast
from holdfast.backends.registry import backend_names, find_backend
from holdfast.cli import group
from holdfast.errors import InvalidArgumentError
from holdfast.settings import SINK_PREFIX, STORAGE_PREFIX, Settings
from tests.pages import FENCE, ROOT, blocks, text

WIDTH = 120
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for pattern in ("*.md", "docs/**/*.md", "benches/**/*.md", "examples/*/*.md")
    for path in ROOT.glob(pattern)
)
LINK = re.compile(r"\]\([^)]*\)|https?://\S+")


def test_the_pages_are_found() -> None:
    assert {"README.md", "docs/deploy.md", "docs/decisions/README.md", "benches/RESULTS.md"} <= set(PAGES)


@pytest.mark.parametrize("page", PAGES)
def test_prose_is_wrapped(page: str) -> None:
    """A diff of a page shows what changed, not whole paragraphs. Tables, code, commands and links may be longer."""
    prose = FENCE.sub("", text(page)).splitlines()
    long = [line for line in prose if len(LINK.sub("]()", line)) > WIDTH and not line.lstrip().startswith(("|", "`"))]
    assert not long


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")])
def test_code_compiles_and_imports_what_exists(page: str) -> None:
    """A module that is moved or a name that is dropped is noticed where it is shown."""
    for code in blocks(page, "python"):
        for node in ast.walk(ast.parse(code)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("holdfast"):
                module = importlib.import_module(node.module or "")
                for alias in node.names:
                    # A module or a name in one.
                    assert hasattr(module, alias.name) or importlib.import_module(f"{module.__name__}.{alias.name}")
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "holdfast":
                assert node.attr in holdfast.__all__


@pytest.mark.parametrize("page", PAGES)
def test_commands_exist(page: str) -> None:
    targets = set(re.findall(r"^([a-z0-9-]+):", text_of_makefile(), re.MULTILINE))
    shown = "\n".join([*(code for _, code in FENCE.findall(text(page))), *re.findall(r"`([^`\n]+)`", text(page))])
    assert set(re.findall(r"^ *make ([a-z0-9-]+)", shown, re.MULTILINE)) <= targets
    assert set(re.findall(r"^ *holdfast ([a-z]+)", shown, re.MULTILINE)) <= set(
        group.list_commands(click.Context(group))
    )


@pytest.mark.parametrize("path", [*PAGES, "pyproject.toml", "examples/parquet_backend/pyproject.toml"])
def test_nobody_is_sent_to_the_namesake(path: str) -> None:
    """`holdfast` on PyPI is another project: what is installed by name is holdfast-spark."""
    by_name = r"pip install (?:[^`\n]* )?'?holdfast(?![\w/*-]).*"
    assert not re.findall(by_name, text(path)) + re.findall(r'"holdfast *[\[<>=!~].*', text(path))


def text_of_makefile() -> str:
    return (ROOT / "Makefile").read_text()


@pytest.mark.parametrize("page", PAGES)
def test_settings_exist(page: str) -> None:
    plug_in = "parquet"  # the example's own
    for key in set(re.findall(r"`(spark\.holdfast\.[\w.]*\w)[`=]", text(page))):
        name = key.removeprefix("spark.holdfast.")
        head, _, option = name.partition(".")
        if key.startswith((STORAGE_PREFIX, SINK_PREFIX)) or head == plug_in or name in {"storage", "snapshot", "sink"}:
            continue
        if name in {f.metadata["key"] for f in fields(Settings) if f.metadata}:
            continue
        assert head in backend_names(), key
        with pytest.raises(InvalidArgumentError) as failure:
            find_backend(head).parse_options(head, {"zzzzzzzz": "1"})
        assert f"{key}" in str(failure.value), f"{key} is no option: {option}"


def test_every_setting_is_described() -> None:
    table = text("docs/configuration.md")
    assert not [
        f.metadata["key"]
        for f in fields(Settings)
        if f.metadata and f"| `spark.holdfast.{f.metadata['key']}` |" not in table
    ]


def test_the_api_reference_has_every_public_name() -> None:
    reference = text("docs/site/api.md")
    errors = {name for name, module in holdfast._EXPORTS.items() if module == "holdfast.errors"}
    assert "automodule:: holdfast.errors" in reference
    assert not [name for name in set(holdfast.__all__) - errors if f":: holdfast.{name}\n" not in reference]


def test_every_decision_is_listed() -> None:
    notes = {path.name for path in (ROOT / "docs/decisions").glob("0*.md")}
    assert set(re.findall(r"\]\((0[\w-]+\.md)\)", text("docs/decisions/README.md"))) == notes


def test_decisions_can_be_read_in_an_hour() -> None:
    """A decision amends the note of its subject: a note for each would bury what somebody still wonders about."""
    notes = list((ROOT / "docs/decisions").glob("*.md"))
    assert len(notes) <= 26
    assert sum(len(note.read_text().split()) for note in notes) <= 12_000


def test_the_pages_do_not_grow_back() -> None:
    """Whoever adds a paragraph first finds the one that says the same."""
    folders = [*(ROOT / "docs").rglob("*.md"), *(ROOT / "benches").rglob("*.md")]
    pages = [page for page in folders if page.parent != ROOT / "docs/decisions"]
    top = [ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "ARCHITECTURE", "CHANGELOG")]
    assert sum(len(page.read_text().split()) for page in [*pages, *top]) <= 34_900


MENTION = re.compile(r"[Dd]ecisions?[/ \n]+(0\d{3})\b")


def test_every_decision_that_is_named_exists() -> None:
    """`make check` follows links; this follows docstrings, comments and configuration."""
    notes = {path.name[:4] for path in (ROOT / "docs/decisions").glob("0*.md")}
    folders = [
        "backends",
        "benches",
        "docs",
        "examples",
        "holdfast",
        "mvcc",
        "snapshotter",
        "spark_integration",
        "tests",
    ]
    files = [path for folder in folders for kind in ("*.py", "*.md") for path in (ROOT / folder).rglob(kind)]
    files += [*ROOT.glob("*.md"), ROOT / "pyproject.toml"]
    assert not {
        f"{path.relative_to(ROOT)}: {number}"
        for path in files
        for number in MENTION.findall(path.read_text())
        if number not in notes
    }
