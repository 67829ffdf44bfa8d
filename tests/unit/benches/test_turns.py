"""`--turns` sets how often everything is measured: a comparison finds little after one or two turns."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from holdfast.benches.running.directory import ResultsDirectory
from holdfast.benches.running.plan import measurements_of
from holdfast.benches.suites.measurement import Profile
from holdfast.errors import InvalidArgumentError

FACTS: dict[str, Any] = {
    "format": 1,
    "profile": "full",
    "shape": {},
    "seed": 1,
    "started": "2026-01-02T03:04:05+00:00",
    "machine": {"cpu": "a cpu", "cores": 2},
    "versions": {"holdfast": "0.1.0"},
}


def test_turns_are_those_of_every_measurement_and_minutes_grow_with_them() -> None:
    """What the listing promises is what a run takes."""
    plain, more = measurements_of(Profile()), measurements_of(Profile(), turns=5)
    for before, after in zip(plain, more, strict=True):
        if before.micro:
            assert after == before
        else:
            assert after.repeats == 5
            assert after.minutes / 5 == pytest.approx(before.minutes / before.repeats)


def test_a_directory_belongs_to_one_number_of_turns(tmp_path: Path) -> None:
    """Another number is another run; directories from before there was a choice go on."""
    with ResultsDirectory.opened(tmp_path, copy.deepcopy(FACTS) | {"turns": 5}):
        pass
    with (
        pytest.raises(InvalidArgumentError, match="turns"),
        ResultsDirectory.opened(tmp_path, FACTS | {"turns": 2}),
    ):
        pass
    stored = json.loads((tmp_path / "run.json").read_text())
    del stored["turns"]
    (tmp_path / "run.json").write_text(json.dumps(stored))
    with ResultsDirectory.opened(tmp_path, FACTS | {"turns": None}) as directory:
        assert "turns" not in directory.facts
