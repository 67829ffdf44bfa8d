"""A directory of results keeps what was measured: of one run only, whatever stops it or damages its files."""

from __future__ import annotations

import errno
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from holdfast.benches.report.directory import RUN
from holdfast.benches.running.carrying_out import CarryingOut
from holdfast.benches.running.directory import FAILED, ResultsDirectory
from holdfast.benches.runs.paired import Entry
from holdfast.errors import CorruptionError, HoldfastError, InvalidArgumentError, UnavailableError
from tests.unit.benches.tiny_run import FACTS, JOB, TWO, Engines, prepared


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"machine": {"cpu": "a cpu", "cores": 8}}, "machine cores: 2, 8"),
        ({"versions": {"holdfast": "0.2.0"}}, "versions holdfast: 0.1.0, 0.2.0"),
        ({"profile": "quick"}, "profile: full, quick"),
        ({"seed": 2}, "seed: 1, 2"),
        ({"disk": "/other"}, "disk: None, /other"),
    ],
)
def test_results_of_another_run_are_not_mixed_in(
    tmp_path: Path, engines: Engines, change: dict[str, Any], named: str
) -> None:
    CarryingOut(prepared(tmp_path), TWO).run()
    with pytest.raises(InvalidArgumentError, match=named) as refused:
        prepared(tmp_path, **change)
    assert "--fresh" in str(refused.value)
    assert prepared(tmp_path, fresh=True, **change).facts["plan"] == []
    assert not (tmp_path / "tiny/two.json").exists()


def test_runs_of_another_job_are_not_mixed_in(tmp_path: Path, engines: Engines) -> None:
    engines.stops_at = 1
    with pytest.raises(KeyboardInterrupt):
        CarryingOut(prepared(tmp_path), TWO).run()
    larger = replace(TWO, entries={name: Entry(of.engine, replace(JOB, rows=20)) for name, of in TWO.entries.items()})
    with pytest.raises(InvalidArgumentError, match="job rows: 10, 20"):
        CarryingOut(prepared(tmp_path), larger)


def test_a_directory_of_other_things_is_refused_and_kept(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(InvalidArgumentError, match=r"thesis\.tex"):
        prepared(tmp_path, fresh=True)
    assert (tmp_path / "thesis.tex").exists()


@pytest.mark.parametrize("fresh", [False, True])
def test_two_commands_do_not_work_on_one_directory(tmp_path: Path, fresh: bool) -> None:
    """Nor does --fresh delete what another command is at."""
    line = {"turn": 0, "label": "ours", "engine": "holdfast-memory", "job": {}, "seconds": 1.5, "run": {}}
    with ResultsDirectory.opened(tmp_path, FACTS) as directory:
        directory.add_run(TWO, line)
        with pytest.raises(InvalidArgumentError, match="another bench run"):
            prepared(tmp_path, fresh=fresh)
        assert directory.runs(TWO) == [line]


@pytest.mark.parametrize("line", ["{", "[]", '{"turn": 0}', '{"turn": "0", "label": 1}'])
def test_a_damaged_line_of_a_run_is_named_and_kept(tmp_path: Path, engines: Engines, line: str) -> None:
    """Hours of runs stand beside it: whoever sees the message decides."""
    engines.stops_at = 2
    with pytest.raises(KeyboardInterrupt):
        CarryingOut(prepared(tmp_path), TWO).run()
    file = tmp_path / "tiny/two.runs.jsonl"
    damaged = f"{line}\n{file.read_text()}"
    file.write_text(damaged)
    with pytest.raises(CorruptionError, match=r"delete its line.*two\.runs\.jsonl"):
        CarryingOut(prepared(tmp_path), TWO)
    assert file.read_text() == damaged


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("[]", "no JSON object"),
        ("{}", "required property"),
        ('{"format": 1, "plan": [{"suite": "x"}]}', "required property"),
    ],
)
def test_a_damaged_plan_is_named_and_kept(tmp_path: Path, content: str, said: str) -> None:
    (tmp_path / RUN).write_text(content)
    with pytest.raises(HoldfastError, match=said):
        prepared(tmp_path)
    assert (tmp_path / RUN).read_text() == content


def test_a_command_that_was_killed_before_its_plan_stood_leaves_no_stranger(tmp_path: Path) -> None:
    (tmp_path / f".{RUN}.new").write_text('{"form')
    assert prepared(tmp_path).facts["plan"] == []


def test_a_disk_that_is_full_loses_nothing_and_says_so(
    tmp_path: Path, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan that was there stays whole, and the runs before it count."""
    directory = prepared(tmp_path)
    engines.stops_at = 2
    with pytest.raises(KeyboardInterrupt):
        CarryingOut(directory, TWO).run()
    before = (tmp_path / RUN).read_text()

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as context:
        context.setattr(Path, "write_text", full)
        with pytest.raises(UnavailableError, match="the same command continues"):
            directory.set_state(TWO, FAILED)
    assert (tmp_path / RUN).read_text() == before
    engines.stops_at = None
    CarryingOut(prepared(tmp_path), TWO).run()
    assert len(engines.ran) == 4


@pytest.mark.parametrize("damage", [Path.unlink, lambda file: file.write_text("{")])
def test_what_is_done_has_a_document(tmp_path: Path, damage: Callable[[Path], object]) -> None:
    """A document that was deleted or cut off is measured again."""
    directory = prepared(tmp_path)
    directory.set_state(TWO, "done")
    directory.write_document(TWO, {}, whole=True)
    assert directory.is_done(TWO)
    damage(directory.document_file(TWO))
    assert not directory.is_done(TWO)
