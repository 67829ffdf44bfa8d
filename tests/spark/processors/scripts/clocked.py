"""A streaming query whose clock the test sets: each tick is one micro-batch, at the time that the test says.

Spark takes batch timestamps from the clock of the query's trigger, which its own tests set in the same way. The way
there is not public, and its parameters differ between versions of Spark, so they are found by their types.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyspark.sql.streaming import StreamingQuery

from tests.spark.processors.scripts.script import INPUT, OUTPUT, Played, Script, Scripted, now_ms

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from tests.spark.answers import Batches
    from tests.spark.parity.engines import Trial
    from tests.spark.processors.engines import ProcessorEngine

_LIMIT_S = 120


class ClockedQuery:
    """A query in append mode that stands still between ticks; its sink is Spark's in memory."""

    def __init__(self, frame: DataFrame, checkpoint: Path, now_ms: int) -> None:
        session = frame.sparkSession
        self._jvm: Any = session._jvm
        self._commits = checkpoint / "commits"
        self._next = 1 + max((int(file.name) for file in self._commits.glob("[0-9]*")), default=-1)
        self._sink = self._jvm.org.apache.spark.sql.execution.streaming.sources.MemorySink()
        self._clock = self._jvm.org.apache.spark.util.ManualClock(now_ms)
        manager = session._jsparkSession.streams()
        started = manager.startQuery(*self._arguments(manager, frame, checkpoint))
        self.query = StreamingQuery(started)

    def _arguments(self, manager: Any, frame: DataFrame, checkpoint: Path) -> list[Any]:
        streaming = self._jvm.org.apache.spark.sql.streaming
        [start] = [m for m in manager.getClass().getMethods() if m.getName() == "startQuery"]
        types = [parameter.getSimpleName() for parameter in start.getParameterTypes()]
        option = self._jvm.scala.Option
        by_type = {
            "Dataset": frame._jdf,
            "Map": self._jvm.PythonUtils.toScalaMap({}),
            "Table": self._sink,
            "OutputMode": streaming.OutputMode.Append(),
            "Trigger": streaming.Trigger.ProcessingTime(1),
            "Clock": self._clock,
            # Neither a temporary checkpoint, nor one that must be new.
            "boolean": None,
            "Option": option.empty(),
        }
        arguments = [by_type[name] for name in types]
        no_temporary, recover = (at for at, name in enumerate(types) if name == "boolean")
        arguments[no_temporary], arguments[recover] = False, True
        # The options before the frame are names, and last the checkpoint.
        arguments[types.index("Dataset") - 1] = option.apply(str(checkpoint))
        return arguments

    def micro_batch(self) -> list[tuple[Any, ...]]:
        """Wait until the micro-batch has been committed, and return its rows, which are texts."""
        done, end = self._commits / str(self._next), time.monotonic() + _LIMIT_S
        while not done.exists():
            if not self.query.isActive:
                self.query.awaitTermination()
            assert time.monotonic() < end, f"no micro-batch {self._next}: {self.query.status}"
            time.sleep(0.01)
        rows = self._jvm.scala.jdk.javaapi.CollectionConverters.asJava(self._sink.dataSinceBatch(self._next - 1))
        self._next += 1
        return [tuple(row.getString(at) for at in range(row.size())) for row in rows]

    def tick(self, now_ms: int) -> list[tuple[Any, ...]]:
        """Set the clock, and return the rows of the micro-batch that runs then."""
        self._clock.setTime(now_ms)
        return self.micro_batch()


def play_script(script: Script, engine: ProcessorEngine, on: Trial) -> Played:
    """Play a script, with a restart in its middle."""
    found = Played()
    for number, rows in enumerate(on.answer(lambda: _micro_batches(script, engine, on))):
        found.add(number, rows)
    return found


def _micro_batches(script: Script, engine: ProcessorEngine, on: Trial) -> Batches:
    found = []
    middle = script.micro_batches // 2
    for first, end in ((0, middle), (middle, script.micro_batches)):
        on.feed(script.rows(first))
        processor = Scripted(engine.api, script.on_timer(), script.ttl_ms)
        source = on.source(INPUT, delay="0 seconds" if script.watermark else None)
        frame = engine.transform(source, ["key"], processor, OUTPUT, "append", script.time_mode)
        query = ClockedQuery(frame, on.folder / "query", now_ms(first))
        try:
            found.append(query.micro_batch())
            for number in range(first + 1, end):
                if number < script.micro_batches - 1 or script.time_mode == "None":
                    on.feed(script.rows(number))
                found.append(query.tick(now_ms(number)))
        finally:
            query.query.stop()
    return found
