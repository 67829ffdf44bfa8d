from __future__ import annotations

import json
import os
import sys
import venv
from pathlib import Path

import pytest

from tests.spark.application import run_program

pytestmark = pytest.mark.spark


@pytest.mark.all
@pytest.mark.slow(60)
def test_a_program_in_an_environment_that_is_not_activated_is_told_what_to_set(tmp_path: Path) -> None:
    """`venv/bin/python app.py` says which Python its tasks would get, before any job; what it says to set helps.

    In `make test`: test_refused.py.
    """
    venv.create(tmp_path / "bare", with_pip=False)
    path = os.pathsep.join([str(tmp_path / "bare/bin"), os.environ["PATH"]])
    program = Path(__file__).with_name("other_python.py")
    out, _ = run_program(program, tmp_path, environment={"PATH": path})
    said, jobs, found = json.loads(out)
    assert "a different Python, which has no " in said
    assert "pandas, pyarrow, holdfast" in said
    assert f"PYSPARK_PYTHON to {sys.executable}" in said
    assert jobs == 0
    assert found == [1, 2]
