"""The contract of a sink: a correct sink passes it, and each kind of broken one fails the test that is for it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from holdfast import clock
from holdfast.errors import ConflictError, HoldfastError, SchemaMismatchError, StateLostError
from holdfast.examples.sinks.csv_folder import CsvFolder, read
from holdfast.spark_integration.sinks.two_phase_sink import (
    Handle,
    SinkAttempt,
    SinkQuery,
    SinkTransaction,
    TwoPhaseSink,
)
from holdfast.testing import SECRET, SinkContract
from tests.contract.conftest import SampledContract
from tests.tiers import cases

pytestmark = pytest.mark.slow(30)


class CsvContract(SinkContract):
    @pytest.fixture
    def sink(self, tmp_path: Path) -> TwoPhaseSink:
        return CsvFolder(str(tmp_path / "made" / "folder"))

    @pytest.fixture
    def options(self) -> Mapping[str, str]:
        return {"password": f"{SECRET}-1"}

    def shown(self, sink: TwoPhaseSink) -> pa.Table:
        return read(sink.folder, self.schema())  # type: ignore[attr-defined]


class TestCsvFolder(SampledContract, CsvContract):
    """See `CsvContract`."""


class ShownTooEarly(CsvFolder):
    """Lists each part when it is prepared."""

    def begin(self, attempt: SinkAttempt, schema: pa.Schema) -> SinkTransaction:
        return _Wrapped(super().begin(attempt, schema), lambda handle: self.commit(attempt.query, 0, [handle]))


class GoneWithTheWorker(CsvFolder):
    """Keeps the part in the worker's memory."""

    def begin(self, attempt: SinkAttempt, schema: pa.Schema) -> SinkTransaction:
        return _Wrapped(super().begin(attempt, schema), lambda handle: self.abort(attempt.query, [handle]))


class CommitsTwice(CsvFolder):
    """Makes a list of its own for each commit."""

    def commit(self, query: SinkQuery, batch_id: int, handles: Sequence[Handle]) -> None:
        names = [path.name for path in Path(self.folder).glob("list-*")]
        super().commit(query, len(names), handles)


class TakesLossForSuccess(CsvFolder):
    """Believes that what is gone was committed."""

    def commit(self, query: SinkQuery, batch_id: int, handles: Sequence[Handle]) -> None:
        super().commit(query, batch_id, [h for h in handles if Path(self.folder, str(h["file"])).exists()])


class AbortsOnce(CsvFolder):
    """Raises for what is gone already."""

    def abort(self, query: SinkQuery, handles: Sequence[Handle]) -> None:
        for handle in handles:
            Path(self.folder, str(handle["file"])).unlink()


class ForgetsLeftovers(CsvFolder):
    """Knows only what the driver knows: nothing, at a start."""

    def leftovers(self, query: SinkQuery) -> Sequence[Handle]:
        return []


class RenamesLeftovers(CsvFolder):
    """Names what it finds in another way than when it was prepared."""

    def leftovers(self, query: SinkQuery) -> Sequence[Handle]:
        return [{**handle, "found": True} for handle in super().leftovers(query)]


class EndsWhatIsCommitted(CsvFolder):
    """Takes all parts for leftovers."""

    def leftovers(self, query: SinkQuery) -> Sequence[Handle]:
        return [{"file": path.name} for path in Path(self.folder).glob("part-*")]


class OneFileAPartition(CsvFolder):
    """Two attempts write the same file."""

    def begin(self, attempt: SinkAttempt, schema: pa.Schema) -> SinkTransaction:
        same = f"{attempt.batch_id}-{attempt.partition}"
        Path(self.folder, f"part-{attempt.query.query_id}-{same}.csv").unlink(missing_ok=True)
        return super().begin(SinkAttempt(attempt.query, attempt.batch_id, attempt.partition, same), schema)


class NeverLooks(CsvFolder):
    def confirm(self, query: SinkQuery, batch_id: int, handles: Sequence[Handle]) -> None:
        pass


class LetsAnybodyIn(CsvFolder):
    def open(self, query: SinkQuery, schema: pa.Schema) -> int | None:
        try:
            return super().open(query, schema)
        except ConflictError:
            return -1


class TakesAnyColumns(CsvFolder):
    def open(self, query: SinkQuery, schema: pa.Schema) -> int | None:
        try:
            return super().open(query, schema)
        except SchemaMismatchError:
            return -1


class ForgetsItsMark(CsvFolder):
    def open(self, query: SinkQuery, schema: pa.Schema) -> int | None:
        super().open(query, schema)
        return -1


class TakesAnyFolder(CsvFolder):
    """Begins wherever it is sent, whatever was decided elsewhere."""

    def open(self, query: SinkQuery, schema: pa.Schema) -> int | None:
        return super().open(replace(query, was_shown=None), schema)


class HidesWhatItHasShown(CsvFolder):
    """Takes its lists away before it decides on more, as if the next one would name all parts."""

    def confirm(self, query: SinkQuery, batch_id: int, handles: Sequence[Handle]) -> None:
        super().confirm(query, batch_id, handles)
        for path in Path(self.folder).glob("list-*"):
            path.unlink()


class TellsItsPassword(CsvFolder):
    """Puts the query's options into the error."""

    def commit(self, query: SinkQuery, batch_id: int, handles: Sequence[Handle]) -> None:
        try:
            super().commit(query, batch_id, handles)
        except StateLostError as exc:
            raise StateLostError("lost", options=query.options) from exc


class KeepsItsPassword(CsvFolder):
    """Puts the query's options into handles."""

    def begin(self, attempt: SinkAttempt, schema: pa.Schema) -> SinkTransaction:
        return _Wrapped(super().begin(attempt, schema), lambda _: None, attempt.query.options)


@dataclass
class _Wrapped(SinkTransaction):
    inner: SinkTransaction
    prepared: Any
    more: Mapping[str, str] | None = None

    def write(self, rows: pa.RecordBatch) -> None:
        self.inner.write(rows)

    def prepare(self) -> Handle:
        handle = self.inner.prepare()
        self.prepared(handle)
        return {**handle, **(self.more or {})}

    def abort(self) -> None:
        self.inner.abort()


#: Sinks that break a promise, the test that finds it, and what that says.
BROKEN = [
    (ShownTooEarly, "test_invisible_until_committed_and_then_whole", r"== \[\]\s+Left contains 120 more"),
    (GoneWithTheWorker, "test_prepared_survives_worker_driver_and_server", "files just written are gone"),
    (CommitsTwice, "test_idempotent_commit", "Left contains 240 more"),
    (TakesLossForSuccess, "test_final_commit_after_abort_raises", "DID NOT RAISE .*StateLostError"),
    (AbortsOnce, "test_idempotent_abort", "No such file or directory.*part-"),
    (ForgetsLeftovers, "test_found_though_the_handle_never_arrived", "leftovers must return equal handles"),
    (ForgetsLeftovers, "test_found_by_the_query_that_replaces_the_dead_one", "DID NOT RAISE .*StateLostError"),
    (RenamesLeftovers, "test_found_though_the_handle_never_arrived", "leftovers must return equal handles"),
    (EndsWhatIsCommitted, "test_found_though_the_handle_never_arrived", "Failed to open local file .*part-"),
    (OneFileAPartition, "test_apart_two_attempts_at_once[0]", "row 0 of attempt 1.* != .*row 0 of attempt 0"),
    (NeverLooks, "test_prepared_is_confirmed_and_a_missing_one_noticed", "DID NOT RAISE .*UnavailableError"),
    (LetsAnybodyIn, "test_another_query_needs_consent", "DID NOT RAISE .*ConflictError"),
    (
        TakesAnyColumns,
        "test_other_columns_are_refused_before_anything_is_written",
        "DID NOT RAISE .*SchemaMismatchError",
    ),
    (ForgetsItsMark, "test_the_newest_micro_batch_is_remembered_or_never", "assert -1 == 0"),
    (TakesAnyFolder, "test_final_open_of_another_target_raises", "an unknown target must be refused"),
    (HidesWhatItHasShown, "test_idempotent_commit_of_a_killed_driver[0]", "what was committed before stays visible"),
    (TellsItsPassword, "test_final_commit_after_abort_raises", r"lost, options=.*\nassert not \[.not-to-be-seen"),
    (KeepsItsPassword, "test_silent_about_credentials", r"password.*\nassert not \[.not-to-be-seen"),
]


@pytest.mark.parametrize(
    ("broken", "test", "why"),
    cases([pytest.param(*case, id=f"{case[0].__name__}-{case[1]}") for case in BROKEN], quick=4),
)
def test_a_broken_sink_fails_its_test(broken: type[CsvFolder], test: str, why: str, tmp_path: Path) -> None:
    """A contract is worth what it finds: each of these sinks breaks one promise."""
    contract = CsvContract()
    contract.query = SinkQuery("csv", clock.new_uuid(), options={"password": f"{SECRET}-1"})
    name, *arguments = re.findall(r"\w+", test)
    with pytest.raises((AssertionError, HoldfastError, OSError, pytest.fail.Exception), match=why):
        getattr(contract, name)(broken(str(tmp_path / "folder")), *map(int, arguments))
