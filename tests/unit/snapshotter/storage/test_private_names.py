"""What is used of clients of storages though it is not public: each name is still there, or this says which is gone."""

from __future__ import annotations

import inspect
import re

import pytest

from holdfast.snapshotter.storage import fsspec, hdfs, s3

NAMES = [(owner, name) for module in (s3, hdfs, fsspec) for owner, names in module.PRIVATE.items() for name in names]


@pytest.mark.parametrize(("owner", "name"), NAMES, ids=lambda value: getattr(value, "__name__", value))
def test_a_private_name_is_still_there(owner: object, name: str) -> None:
    """Some stand in instances only: then whoever defines them must mention them."""
    assert hasattr(owner, name) or re.search(rf"self\.{name}\b", inspect.getsource(owner)), name  # type: ignore[arg-type]
