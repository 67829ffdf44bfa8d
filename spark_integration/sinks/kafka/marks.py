"""The mark: which query writes under a sink's name, and its newest micro-batch that is wholly visible.

::

    consumer group   holdfast.<sink>     topic, partition 0
    offset           number of the micro-batch + 1; 0 if the query has begun and committed nothing
    metadata         the ids of the query and of the topic

The driver commits this offset after a micro-batch: the mark may be one behind, never ahead. An overtaken driver may
write it late, and so turn it back: a start takes what was shown before the last decision for shown. Nobody is a member
of the group. A broker drops such offsets after a week, but not where a commit says how long to keep it, as OffsetCommit
could until version 4. With its topic the mark goes, too, though some moments later: until then the topic's id tells.
Brokers that are upgraded from before 2.8 have no ids, all zeros, until `inter.broker.protocol.version` is raised.
"""

from __future__ import annotations

from holdfast.errors import StateLostError
from holdfast.spark_integration.sinks.kafka.wire import error_codes, requests
from holdfast.spark_integration.sinks.kafka.wire.cluster import Cluster, refused
from holdfast.spark_integration.sinks.kafka.wire.requests import Mark
from holdfast.spark_integration.sinks.two_phase_sink import SinkQuery, another_query

_NO_ID = "0" * 32


class Marks:
    """The mark of one sink at one topic."""

    def __init__(self, cluster: Cluster, sink: str, topic: str) -> None:
        self._cluster, self._sink, self._topic = cluster, sink, topic
        self._group = f"holdfast.{sink}"
        self._known_id: str | None = None

    def claim(self, query: SinkQuery) -> int:
        """Make the query the one that writes here; return its newest micro-batch, -1 if there is none.

        Raises `ConflictError` if another query writes here, which this one does not replace; `StateLostError` if there
        is no mark of a query that has decided micro-batches.
        """
        mark, was_shown = self._read(), -1 if query.was_shown is None else query.was_shown
        if mark is None and query.was_shown is not None:
            # A new one would show none, and be taken for one behind the first micro-batch, whose messages are gone.
            raise self._gone()
        if mark is not None and mark.text == query.query_id:
            return max(mark.offset - 1, was_shown)
        if mark is not None and mark.text != query.replaces:
            raise another_query(query, mark.text)
        self._write(query, 0)
        return was_shown

    def require(self, query: SinkQuery, batch_id: int) -> bool:
        """Check that a mark still exists, of any query: it vanishes with its topic.

        Raises `StateLostError` if there is none.

        Returns
        -------
        bool
            Whether this query's micro-batch was wholly visible once.
        """
        mark = self._read()
        if mark is None:
            raise self._gone(batch=batch_id)
        return mark.text == query.query_id and mark.offset > batch_id

    def put(self, query: SinkQuery, batch_id: int) -> None:
        """Show a micro-batch, unless the query has been replaced meanwhile, or a later one is shown."""
        mark = self._read()
        if mark is not None and mark.text == query.query_id and mark.offset <= batch_id:
            self._write(query, batch_id + 1)

    def _gone(self, **facts: object) -> StateLostError:
        return StateLostError(
            "the topic does not have the sink's mark: it is another topic than before, or was deleted, and perhaps "
            "recreated, so results are gone from it; or somebody deleted the consumer group. Name the topic of before, "
            "or give the sink another name to start afresh",
            sink=self._sink,
            topic=self._topic,
            group=self._group,
            **facts,
        )

    def _read(self) -> Mark | None:
        request = requests.fetch_marks(self._group)
        code, marks = self._cluster.ask_coordinator(self._group, request, lambda answer: answer[0], group=True)
        if code:
            raise refused(code, f"read the consumer group {self._group}")
        for mark in marks:
            query_id, _, topic_id = mark.text.partition(" ")
            if mark.topic == self._topic and mark.offset >= 0 and _may_be_same(topic_id, self._topic_id()):
                return Mark(mark.topic, mark.offset, query_id)
        return None

    def _write(self, query: SinkQuery, offset: int) -> None:
        mark = Mark(self._topic, offset, f"{query.query_id} {self._topic_id()}")
        request = requests.commit_mark(self._group, mark)
        code = self._cluster.ask_coordinator(self._group, request, lambda answer: answer, group=True)
        if code:
            raise refused(code, f"keep an offset of the consumer group {self._group} at the topic {self._topic}")

    def _topic_id(self) -> str:
        """Return the id of the topic; of one that is gone, none that a mark has."""
        if self._known_id is None:
            request = requests.metadata([self._topic])
            _, topics = self._cluster.ask_any(request, lambda answer: max((one.code for one in answer[1]), default=0))
            code = next((one.code for one in topics), error_codes.UNKNOWN_TOPIC_OR_PARTITION)
            if code not in (0, error_codes.UNKNOWN_TOPIC_OR_PARTITION):
                raise refused(code, "see the topic", topic=self._topic)
            self._known_id = "gone" if code else topics[0].topic_id
        return self._known_id


def _may_be_same(one: str, other: str) -> bool:
    return one == other or _NO_ID in (one, other)
