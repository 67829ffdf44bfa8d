"""Sources of every kind that say the same: the numbers from 0 on, in steps of ten."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition

from holdfast.examples.stateful import sessions
from tests.input_files import add_file
from tests.servers import downloads
from tests.servers.kafka import Kafka

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

STEP = 10
_DELETED = "org.apache.kafka.clients.admin.RecordsToDelete"
NAMED = {
    "spark.sql.streaming.queryEvolution.enableSourceEvolution": "true",
    # Spark 4.2 needs to be told, later ones do so by themselves.
    "spark.sql.streaming.offsetLog.formatVersion": "2",
}
USERS = 7
# It clicks once, so that a timer is all that its shard is called for.
QUIET = 18


def numbers_of(step: int) -> range:
    return range(step * STEP, (step + 1) * STEP)


def clicks(numbers: DataFrame) -> DataFrame:
    """Return clicks five minutes apart, each eleventh three hours late, of seven users and one who clicks once."""
    late = "if(v % 11 = 0, 10800, 0)"
    user = f"if(v = {QUIET}, 'quiet', concat('user ', v % {USERS}))"
    return numbers.selectExpr(f"{user} as user", f"timestamp_seconds(1700000000 + v * 300 - {late}) as at")


def open_sessions(numbers: DataFrame) -> DataFrame:
    return sessions.vectorised_sessions(clicks(numbers))


class Source(ABC):
    """A source in a folder of its own."""

    #: That a session needs to read it.
    settings: Mapping[str, str] = {}

    def __init__(self, spark: SparkSession, folder: Path) -> None:
        self.spark = spark
        self.folder = folder
        folder.mkdir()

    @abstractmethod
    def feed(self, step: int) -> None:
        """Let the numbers of a step come."""

    @abstractmethod
    def numbers(self) -> DataFrame:
        """Return the stream, a column ``v``."""


class Files(Source):
    """A Parquet file for each step."""

    def feed(self, step: int) -> None:
        add_file(self.folder, step, pa.table({"v": numbers_of(step)}))

    def numbers(self) -> DataFrame:
        return self._from(self.spark.readStream)

    def _from(self, reader: Any) -> DataFrame:
        files: DataFrame = reader.schema("v long").option("maxFilesPerTrigger", 1).parquet(str(self.folder))
        return files


class Rate(Source):
    """Spark's rate-micro-batch: a step in each micro-batch, for ever."""

    def feed(self, step: int) -> None:
        pass

    def numbers(self) -> DataFrame:
        rate = self.spark.readStream.format("rate-micro-batch").option("rowsPerBatch", STEP).load()
        return rate.selectExpr("value as v")


class _Reader(DataSourceStreamReader):
    def __init__(self, options: Mapping[str, str]) -> None:
        self._fed = Path(options["path"])

    def initialOffset(self) -> dict[str, Any]:
        return {"at": {"next number": 0}}

    def latestOffset(self, *_: Any) -> dict[str, Any]:
        return {"at": {"next number": int(self._fed.read_text())}}

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        first, last = (offset["at"]["next number"] for offset in (start, end))
        return [InputPartition((first + odd, last)) for odd in (0, 1)]

    def read(self, partition: InputPartition) -> Iterator[tuple[int]]:
        first, last = partition.value
        return ((number,) for number in range(first, last, 2))

    def commit(self, end: dict[str, Any]) -> None:
        pass


class _Numbers(DataSource):
    @classmethod
    def name(cls) -> str:
        return "numbers"

    def schema(self) -> str:
        return "v long"

    def streamReader(self, schema: Any) -> _Reader:
        return _Reader(self.options)


class Reader(Source):
    """A source in Python, with offsets of its own."""

    def feed(self, step: int) -> None:
        (self.folder / "fed").write_text(str(numbers_of(step).stop))

    def numbers(self) -> DataFrame:
        self.spark.dataSource.register(_Numbers)
        return self.spark.readStream.format("numbers").load(str(self.folder / "fed"))


class Two(Source):
    """Files, and a source in Python whose numbers go on where those of files will never be."""

    def __init__(self, spark: SparkSession, folder: Path) -> None:
        super().__init__(spark, folder)
        self.sources = [Files(spark, folder / "files"), Reader(spark, folder / "reader")]

    def feed(self, step: int) -> None:
        for source in self.sources:
            source.feed(step)

    def numbers(self) -> DataFrame:
        files, reader = (source.numbers() for source in self.sources)
        return files.union(reader)


class Named(Source):
    """Two sources of files with names; each start of a query has them in another order."""

    settings = NAMED

    def __init__(self, spark: SparkSession, folder: Path) -> None:
        super().__init__(spark, folder)
        self.sources = {name: Files(spark, folder / name) for name in ("left", "right")}

    def feed(self, step: int) -> None:
        # Of one more files than of the other, so that their positions differ.
        self.sources["left"].feed(step)
        if step % 2:
            self.sources["right"].feed(step)

    def numbers(self) -> DataFrame:
        reader: Any = self.spark.readStream
        frames = [source._from(reader.name(name)) for name, source in self.sources.items()]
        self.sources = dict(reversed(self.sources.items()))
        return frames[0].union(frames[1])


class Twice(Source):
    """Two sources of files, the first of which is read before and after the other one."""

    def __init__(self, spark: SparkSession, folder: Path) -> None:
        super().__init__(spark, folder)
        self.sources = [Files(spark, folder / name) for name in ("left", "right")]

    def feed(self, step: int) -> None:
        self.sources[0].feed(step)
        if step % 2:
            self.sources[1].feed(step)

    def numbers(self) -> DataFrame:
        left, right = (source.numbers() for source in self.sources)
        return left.union(right).union(left)


class Topic(Source):
    """A topic of Kafka with three partitions, and one more from the third step on."""

    def __init__(self, spark: SparkSession, folder: Path, kafka: Kafka) -> None:
        super().__init__(spark, folder)
        self.options = {"kafka.bootstrap.servers": kafka.servers}
        self.topic = "numbers"
        for jar in downloads.spark_kafka():
            spark.sql(f"ADD JAR '{jar}'")
        self.java = spark._jvm
        # Where the jars are: what Python calls looks there for classes.
        self.thread = self.java.java.lang.Thread.currentThread()
        self.loader_before = self.thread.getContextClassLoader()
        self.thread.setContextClassLoader(spark._jsparkSession.sharedState().jarClassLoader())
        self.clients = self.java.org.apache.kafka.clients.admin
        settings = self.java.java.util.Properties()
        settings.put("bootstrap.servers", kafka.servers)
        self.admin = self.clients.AdminClient.create(settings)
        nothing, three = self.java.java.util.Optional.empty(), self.java.java.util.Optional.of(3)
        self._done(self.admin.createTopics([self.clients.NewTopic(self.topic, three, nothing)]))

    def feed(self, step: int) -> None:
        if step == 2:
            self._done(self.admin.createPartitions({self.topic: self.clients.NewPartitions.increaseTo(4)}))
        partitions = 3 if step < 2 else 4
        found = [(str(v), v % partitions) for v in numbers_of(step)]
        rows = self.spark.createDataFrame(found, "value string, partition int")
        rows.write.format("kafka").options(**self.options).option("topic", self.topic).save()

    def numbers(self, **options: str) -> DataFrame:
        reader = self.spark.readStream.format("kafka").options(**self.options, **options)
        reader = reader.option("subscribe", self.topic).option("startingOffsets", "earliest")
        return reader.option("maxOffsetsPerTrigger", STEP).load().selectExpr("cast(cast(value as string) as long) as v")

    def forget(self, partition: int, before: int) -> None:
        """Delete the first records of a partition, as retention does."""
        where = self.java.org.apache.kafka.common.TopicPartition(self.topic, partition)
        kind = self.java.java.lang.Class.forName(_DELETED, True, self.thread.getContextClassLoader())
        (make,) = (m for m in kind.getMethods() if m.getName() == "beforeOffset" and m.getParameterCount())
        arguments = self.spark.sparkContext._gateway.new_array(self.java.java.lang.Object, 1)
        arguments[0] = before
        self._done(self.admin.deleteRecords({where: make.invoke(None, arguments)}))

    def close(self) -> None:
        self.admin.close()
        self.thread.setContextClassLoader(self.loader_before)

    def _done(self, result: Any) -> None:
        result.all().get()
