"""An application that drains a query, and is made to be killed.

Started as a program with a folder, which holds the ``input``, and the step of the sink at which it dies, or nothing. It
leaves a file ``begun`` before it drains, and ``ended`` after that.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from holdfast import sinks
from holdfast.sinks import Handle, SinkQuery
from tests.faults.sinks.killed_at import STEPS, KilledAt
from tests.spark.application import start_spark
from tests.spark.conftest import Lab
from tests.spark.savepoints.test_drained import QUERIES, drained, writer


@dataclass(frozen=True)
class KilledAtTheLast(KilledAt):
    """A sink whose driver dies at a step of the last micro-batch, and at no other."""

    step: str = ""
    batch_id: int = 0

    def confirm(self, query: SinkQuery, batch_id: int, handles: Sequence[Handle]) -> None:
        if batch_id == self.batch_id:
            Path(self.marks).mkdir()
            for step in {*STEPS} - {self.step}:
                Path(self.marks, step).touch()
        super().confirm(query, batch_id, handles)


def main(folder: Path, step: str = "") -> None:
    spark = start_spark(folder, {"spark.holdfast.local.dir": str(folder / "own")})
    lab = Lab(spark, folder, folder / "local")
    sink = sinks.parquet("out", str(folder / "shown"))
    writer(lab, QUERIES[0], sink, "query").start().awaitTermination()
    last = max(int(path.name) for path in (folder / "query/commits").glob("[0-9]*"))
    (folder / "begun").touch()
    last_sink = KilledAtTheLast(sink, str(folder / "marks"), step=step, batch_id=last + 1) if step else sink
    drained(lab, writer(lab, QUERIES[0], last_sink, "query"))
    (folder / "ended").touch()
    spark.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
