"""Who reads and writes the pointers of a query and works on its shards: Spark (`SparkTasks`) or this process."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from holdfast import distribution
from holdfast.backends.registry import backend_names
from holdfast.settings import PREFIX, Settings
from holdfast.snapshotter.storage.ahead import ahead
from holdfast.snapshotter.storage.object_storage import ObjectStorage
from holdfast.snapshotter.storage.opening import open_storage
from holdfast.snapshotter.storage.options import parse_storage_options
from holdfast.spark_integration.savepoints.new_query import NewQuery
from holdfast.spark_integration.savepoints.seeding import FirstState, pinned_partitions
from holdfast.spark_integration.savepoints.steps_by_spark import steps_by_spark
from holdfast.spark_integration.savepoints.tasks import ShardTask, outcomes, require_no_error, run_tasks, versions_of
from holdfast.spark_integration.spark_state.new_state import PLAIN_ROWS, NewState, PointerOperator
from holdfast.spark_integration.spark_state.operators import NotKnownError
from holdfast.spark_integration.spark_state.query_location import LoggedBatch, QueryLocation
from holdfast.spark_integration.stored_pointers import StatefulStep, configured, stored_steps

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

#: Puts the pointers of a new query's operators, by Spark's number of each, into Spark's state of it.
StateMaker = Callable[[NewQuery, Sequence[PointerOperator]], FirstState]
_PUTS_AT_ONCE = 16
_log = logging.getLogger(__name__)


class Tasks(Protocol):
    """Who reads the pointers of a query, writes those of a new one, and works on their shards."""

    @property
    def settings(self) -> Settings:
        """With the query's state directory."""
        ...

    @property
    def options(self) -> Mapping[str, object]:
        """Of the storages."""
        ...

    def versions(self) -> dict[str, str]:
        """Return the releases that take part."""
        ...

    def steps(self, location: ObjectStorage, checkpoint_location: str, batch: LoggedBatch) -> list[StatefulStep]:
        """Return the operators with state of a query, with their pointers after a micro-batch; see `stored_steps`.

        `location`: its root is the checkpoint location; `checkpoint_location`: as the user named it.
        """
        ...

    def run(self, shards: Sequence[tuple[Any, ...]], given: str, task: ShardTask, returned: str) -> Sequence[Any]:
        """Run a task for some shards; see `run_tasks`."""
        ...

    def require_known(self, location: ObjectStorage) -> None:
        """Raise `NotKnownError` if only Spark reads the pointers of a query, or makes such state as it has.

        `location`: its root is the checkpoint location.
        """
        ...

    def state_maker(self, conf: Mapping[str, str], hosts: Collection[str]) -> StateMaker:
        """Return what makes the state of a query that pins such settings and has such operators of Spark's.

        Raises `NotKnownError` if only Spark makes it.
        """
        ...


class SparkTasks:
    """A session of Spark: its executors work on the shards. See `Tasks`.

    Raises `InvalidArgumentError` if a setting is wrong, or no state directory is set.
    """

    def __init__(self, spark: SparkSession) -> None:
        self.spark = spark
        self.settings, self.options = configured(spark)

    def versions(self) -> dict[str, str]:
        """See `Tasks`."""
        return versions_of(self.spark)

    def steps(self, location: ObjectStorage, checkpoint_location: str, batch: LoggedBatch) -> list[StatefulStep]:
        """See `Tasks`; what is not known here, Spark's own reader reads."""
        try:
            return stored_steps(location, batch)
        except NotKnownError as exc:
            _log.warning("Spark reads the pointers to the query's state: %s", exc)
            return steps_by_spark(self.spark, checkpoint_location, batch.batch_id)

    def run(self, shards: Sequence[tuple[Any, ...]], given: str, task: ShardTask, returned: str) -> Sequence[Any]:
        """See `Tasks`; each shard has a task of its own."""
        return run_tasks(self.spark, shards, given, task, returned)

    def require_known(self, location: ObjectStorage) -> None:
        """See `Tasks`; Spark reads and makes its own state."""

    def state_maker(self, conf: Mapping[str, str], hosts: Collection[str]) -> StateMaker:
        """See `Tasks`; a query of Spark's makes it."""
        from holdfast.spark_integration.savepoints.stub_query import state_by_stub

        return partial(state_by_stub, self.spark, conf)


@dataclass(frozen=True)
class OwnProcess:
    """A process without Spark; see `Tasks`."""

    settings: Settings
    options: Mapping[str, object]  #: As `parse_storage_options` returned them
    executor: Executor  #: Must not run the caller
    at_once: int  #: How many shards are worked on side by side: each needs memory for its rows, up to three times
    on_shard: Callable[[int], object]  #: Told how many shards are done since

    @classmethod
    def of(
        cls,
        state_dir: str,
        options: Mapping[str, str],
        executor: Executor,
        at_once: int,
        on_shard: Callable[[int], object],
    ) -> OwnProcess:
        """Return what works with a state directory; the options are values of ``spark.holdfast.storage.*``."""
        settings = Settings.parse({f"{PREFIX}state.dir": state_dir}, backend_names())
        return cls(settings, parse_storage_options(options), executor, at_once, on_shard)

    def versions(self) -> dict[str, str]:
        """Return the releases that take part: no Spark does."""
        return {"holdfast": distribution.VERSION}

    def steps(self, location: ObjectStorage, checkpoint_location: str, batch: LoggedBatch) -> list[StatefulStep]:
        """See `Tasks`; raises `NotKnownError` if only Spark reads them."""
        return stored_steps(location, batch)

    def run(self, shards: Sequence[tuple[Any, ...]], given: str, task: ShardTask, returned: str) -> Sequence[Any]:
        """Run a task for some shards, some of them side by side; raises what it raises, with the shard."""
        columns = [column.split()[0] for column in given.split(",")]
        lacking = dict.fromkeys(task.RETURNED.names)
        found: list[Mapping[str, Any]] = []
        with self._storages() as opened:
            work = partial(task.work, opened=opened)

            def done(row: tuple[Any, ...]) -> list[Mapping[str, Any]]:
                facts = dict(zip(columns, row, strict=True))
                return [{**lacking, **outcome} for outcome in outcomes(facts, work)]

            with closing(ahead(self.executor, done, shards, self.at_once)) as results:
                for rows in results:
                    require_no_error(rows)
                    found += rows
                    self.on_shard(1)
        return found

    def require_known(self, location: ObjectStorage) -> None:
        """See `Tasks`."""
        batch = QueryLocation(location).batch()
        steps = stored_steps(location, batch)
        self.state_maker(json.loads(batch.batch)["conf"], {step.host for step in steps if step.is_ours})

    def state_maker(self, conf: Mapping[str, str], hosts: Collection[str]) -> StateMaker:
        """See `Tasks`."""
        state = NewState.of(conf, pinned_partitions(conf), hosts)

        def make(new: NewQuery, operators: Sequence[PointerOperator]) -> FirstState:
            new.require()  # all before may have taken long
            puts = ahead(self.executor, lambda file: new.location.put(*file), state.files(operators), _PUTS_AT_ONCE)
            with closing(puts):
                for _ in puts:
                    pass
            return FirstState({**conf, **PLAIN_ROWS})

        return make

    @contextmanager
    def _storages(self) -> Iterator[Callable[[str], ObjectStorage]]:
        """Give a function that returns the storage at a URL, open until the context ends."""
        with ExitStack() as stack:
            storages: dict[str, ObjectStorage] = {}

            def opened(url: str) -> ObjectStorage:
                if url not in storages:  # threads that come at once open it twice: both are closed
                    storages[url] = stack.enter_context(open_storage(url, self.options))
                return storages[url]

            yield opened
