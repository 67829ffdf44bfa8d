"""What a clone refuses before it copies anything; that it is one, the Spark tests show."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from holdfast.errors import ConflictError
from holdfast.snapshotter.storage.opening import open_storage
from holdfast.spark_integration.copies import cloning
from holdfast.spark_integration.savepoints import tasks
from holdfast.spark_integration.spark_state.pointers import StatefulStep


def test_the_originals_state_directory_is_refused_though_no_operator_has_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both queries would begin their operators there under the original's id."""
    with open_storage(str(tmp_path / "query")) as location:
        location.put("metadata", b'{"id":"5d1f"}')
        location.put("offsets/0", b'v1\n{"conf":{}}\n-')
        location.put("commits/0", b'v1\n{"nextBatchWatermarkMs":0}')
    step = StatefulStep(0, "applyInPandasWithState", True, False, {})
    monkeypatch.setattr(tasks, "stored_steps", lambda *_: [step])
    durable = tmp_path / "durable"
    spark: Any = SimpleNamespace(conf=SimpleNamespace(getAll={"spark.holdfast.state.dir": str(durable)}))
    with pytest.raises(ConflictError, match="this one is the original's"):
        cloning.clone(spark, tmp_path / "query", tmp_path / "clone", to_state_dir=f"{durable}/")
    assert not [path for folder in ("clone", "durable") for path in (tmp_path / folder).rglob("*") if path.is_file()]
    cloning.clone(spark, tmp_path / "query", tmp_path / "clone", to_state_dir=tmp_path / "green")
    assert (tmp_path / "clone/metadata").is_file()
