"""A directory of results: what is read, what is missing, and how damaged and hostile files are refused."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast.benches.report.directory import read
from holdfast.errors import CorruptionError, NotFoundError
from tests.unit.benches import sample_results

JOB_A = {("jobs", "job-a"): sample_results.job_a(1)}
Change = Callable[[Any], object]


def changed(folder: Path, file: str, change: Change) -> Path:
    """Return a directory in which one file was changed."""
    sample_results.write(folder, copy.deepcopy(JOB_A))
    found = json.loads((folder / file).read_text())
    change(found)
    (folder / file).write_text(json.dumps(found))
    return folder


def test_what_was_measured_and_what_not(tmp_path: Path) -> None:
    """Failed, left out and unfinished measurements are gaps with a reason; what there is can still be read."""
    documents = sample_results.full()
    folder = sample_results.write(tmp_path, documents)
    (folder / "growth" / "executors.runs.jsonl").write_text('{"turn": 0}\n{"turn": 1}\n')
    (folder / "jobs" / "by-key-pandas.json").unlink()
    results = read(folder)
    assert [(q.suite, q.name) for q, _ in results.measured] == [key for key in documents if key[1] != "by-key-pandas"]
    assert {(q.name, q.state, q.reason) for q in results.missing} == {
        ("by-key-pandas", "done", "its results are not in jobs/by-key-pandas.json"),
        ("q5", "failed", "a run of nexmark-rocksdb failed: no space left"),
        ("quix", "left out", "Quix Streams has no wheels for this Python"),
        ("executors", "to do", "stopped after 2 runs"),
    }


def test_a_measurement_that_failed_in_part_is_shown_and_said(tmp_path: Path) -> None:
    """Entries that had their turns count, and nobody takes them for all."""

    def fail(run: Any) -> None:
        run["plan"][0] |= {"state": "failed", "reason": "a run of floor failed"}

    results = read(changed(tmp_path, "run.json", fail))
    assert [q.name for q, _ in results.measured] == ["job-a"]
    assert "a run of floor failed; measured in part" in {q.reason for q in results.missing}


def test_a_directory_without_results_is_none(tmp_path: Path) -> None:
    """The message names what is missing, and what to give."""
    with pytest.raises(NotFoundError, match=r"holdfast bench run wrote, missing=.*run\.json"):
        read(tmp_path)


@pytest.mark.parametrize(
    ("text", "because"),
    [
        ("", "Expecting value"),
        ('{"format": 1', "delimiter"),
        ("[" * 100_000, "nest|recursion|depth"),
        (f'{{"format": {"[" * 30}{"]" * 30}}}', "nested more than 20 deep"),
        ("[]", "no JSON object"),
        ('{"format": NaN}', "finite number, found=NaN"),
        ("\udcff", "decode|utf"),
    ],
)
def test_a_file_that_is_no_json_of_ours_is_named(tmp_path: Path, text: str, because: str) -> None:
    """Damage is an error that names the file, in bounded time and memory."""
    (tmp_path / "run.json").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(CorruptionError, match=r"(?s)run\.json.*" + f"({because})"):
        read(tmp_path)


@pytest.mark.parametrize(
    ("change", "place"),
    [
        (lambda run: run.update(format=2), r"\$\.format"),
        (lambda run: run.pop("plan"), "'plan' is a required property"),
        (lambda run: run["plan"][0].update(suite="../../etc"), r"\$\.plan\[0\]\.suite"),
        (lambda run: run["plan"][0].update(name="a/b"), r"\$\.plan\[0\]\.name"),
        (lambda run: run["plan"][0].update(name=".."), r"\$\.plan\[0\]\.name"),
        (lambda run: run["plan"][0].update(state="lost"), r"\$\.plan\[0\]\.state"),
        (lambda run: run["plan"][0].update(question="a\nb"), r"\$\.plan\[0\]\.question"),
        (lambda run: run.update(machine={"cpu": {"deep": 1}}), r"\$\.machine\.cpu"),
        (lambda run: run["plan"].append(run["plan"][0]), "a question twice"),
    ],
)
def test_a_plan_that_cannot_be_is_refused(tmp_path: Path, change: Change, place: str) -> None:
    """A name is no way out of the directory, and each place that is wrong is named."""
    with pytest.raises(CorruptionError, match=place):
        read(changed(tmp_path, "run.json", change))


def runs(document: Any) -> Any:
    return document["engines"]["floor"]["runs"]


@pytest.mark.parametrize(
    ("change", "place"),
    [
        (lambda d: d.pop("engines"), "'engines' is a required property"),
        (lambda d: d.update(engines={}), r"\$\.engines"),
        (lambda d: runs(d).clear(), r"\$\.engines\.floor\.runs"),
        (lambda d: runs(d)[0].update(batch_ms=["1"]), r"batch_ms\[0\]"),
        (lambda d: runs(d)[0]["batch_ms"].__setitem__(3, -1), r"batch_ms\[3\]"),
        (lambda d: runs(d)[0]["batch_ms"].__setitem__(3, 1e300), r"batch_ms\[3\]"),
        (lambda d: runs(d)[0]["batch_ms"].pop(), "fewer micro-batches than its job"),
        (lambda d: runs(d)[0].update(batch_ms=[0] * 8), "took no time"),
        (lambda d: runs(d)[0].update(rows_per_second=0), "rows_per_second"),
        (lambda d: d["settings"]["jobs"]["floor"].update(rows=""), r"\$\.settings\.jobs\.floor\.rows"),
        (lambda d: runs(d)[0].update(cpu={"jvm": 1}), "'wall' is a required property"),
        (lambda d: runs(d)[0].update(memory={"jvm": {"rss": 1}}), "'pss' is a required property"),
        (lambda d: d["settings"]["jobs"].pop("floor"), "'floor' has no settings"),
        (lambda d: d["settings"]["jobs"]["floor"].update(name="job-z"), "KeyError"),
        (lambda d: d["settings"]["jobs"]["floor"].update(turbo=True), "turbo"),
        (lambda d: d["settings"]["jobs"]["floor"].update(warmup=99), "warm-up"),
        (lambda d: d["state_bytes"].pop("floor"), "'floor' has no settings or no state_bytes"),
        (lambda d: d["machine"].update(cores=0), r"\$\.machine\.cores"),
        (lambda d: d.update(targets=[{"what": "x"}]), r"\$\.targets\[0\]"),
        (lambda d: d.update(equality={"rows": 1, "equal": "yes"}), r"\$\.equality"),
        (lambda d: d["engines"].update({"a\u0000b": d["engines"]["floor"]}), r"\$\.engines"),
    ],
)
def test_a_document_that_cannot_be_is_refused(tmp_path: Path, change: Change, place: str) -> None:
    """Nothing is drawn of figures that contradict themselves: file and place are named."""
    with pytest.raises(CorruptionError, match=rf"(?s)job-a\.json.*{place}"):
        read(changed(tmp_path, "jobs/job-a.json", change))


def test_a_huge_file_is_not_loaded(tmp_path: Path) -> None:
    """A sparse file of a gigabyte costs nothing."""
    sample_results.write(tmp_path, JOB_A)
    with (tmp_path / "jobs" / "job-a.json").open("wb") as file:
        file.truncate(1 << 30)
    with pytest.raises(CorruptionError, match="larger than"):
        read(tmp_path)
