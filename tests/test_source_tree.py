"""What reads the source for the house rules reads it right: a rule that sees nothing forbids nothing."""

from __future__ import annotations

import ast

import pytest

from tests import source_tree


@pytest.mark.parametrize(
    ("path", "source", "expected"),
    [
        ("mvcc/store.py", "from ..backends import base", "holdfast.backends.base"),
        ("mvcc/store.py", "from . import transaction", "holdfast.mvcc.transaction"),
        ("mvcc/__init__.py", "from .store import x", "holdfast.mvcc.store.x"),
        (
            "mvcc/store.py",
            "def f():\n    import holdfast.snapshotter.storage.object_storage as s",
            "holdfast.snapshotter.storage.object_storage",
        ),
    ],
)
def test_all_imports_are_read(path: str, source: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_tree, "tree", lambda _: ast.parse(source))
    assert [name for _, name in source_tree.imports(path)] == [expected]


def test_the_reader_of_calls_resolves_imported_names(monkeypatch: pytest.MonkeyPatch) -> None:
    # The last two are attributes of something else, here without an import of time.
    source = (
        "from time import sleep as nap\nimport datetime as dt\n"
        "nap(1)\ndt.datetime.now()\nself.time.sleep(2)\ntime.sleep(1)"
    )
    monkeypatch.setattr(source_tree, "tree", lambda _: ast.parse(source))
    used = [
        name for _, name in source_tree.calls("x.py") if name.startswith("time.") or name == "datetime.datetime.now"
    ]
    assert sorted(used) == ["datetime.datetime.now", "time.sleep"]
