"""Transactions that workers left open: what their coordinators say of them, and how the driver ends them.

A new producer of a transactional id gets a new epoch or a new producer id. So an id with these two numbers belongs to
one attempt, and such a handle is:

    Ongoing                             prepared
    PrepareCommit, CompleteCommit       committed
    anything else, or not found         ended otherwise: aborted by us, by its time limit, or forgotten
    the id with other numbers           the same, or committed long ago and reused since
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from confluent_kafka import KafkaError

from holdfast.errors import UnavailableError
from holdfast.spark_integration.sinks.kafka import protocol
from holdfast.spark_integration.sinks.kafka.brokers import Cluster, refused
from holdfast.spark_integration.sinks.kafka.protocol import TransactionDescription
from holdfast.spark_integration.sinks.two_phase_sink import Handle

ONGOING = "Ongoing"
_EMPTY = "Empty"
_COMMITTING, _COMMITTED = "PrepareCommit", "CompleteCommit"
#: Begins the names of states in which markers are still to be written.
_ENDING = "Prepare"
#: No attempt has it, as users may set no less than a second: it marks ids that were fenced.
_FENCED_TIMEOUT_MS = 999
# So many ids of 250 characters are a request of 250 KB.
_IDS_PER_REQUEST = 1000
_RIGHT = "write transactional ids that begin with holdfast.<name of the sink>."


class PreparedTransaction(NamedTuple):
    """A handle, read: the same numbers, whoever found the transaction."""

    transactional_id: str
    producer_id: int
    epoch: int

    def handle(self) -> Handle:
        """Return the handle."""
        return self._asdict()

    def is_in(self, states: Collection[str], known: Mapping[str, TransactionDescription]) -> bool:
        """Tell whether this transaction, and not another one of its id, is in one of these states."""
        found = known.get(self.transactional_id)
        return found is not None and found.state in states and self == _identity(found)

    def is_open(self, known: Mapping[str, TransactionDescription]) -> bool:
        """Tell whether it can still be committed or aborted."""
        return self.is_in([ONGOING], known)

    def is_committed(self, known: Mapping[str, TransactionDescription]) -> bool:
        """Tell whether it has been committed, if maybe not yet in all partitions."""
        return self.is_in([_COMMITTING, _COMMITTED], known)


def with_rows(handles: Iterable[Handle]) -> list[PreparedTransaction]:
    """Read handles, but for those of attempts that wrote nothing."""
    numbers = [(str(one["transactional_id"]), int(str(one["producer_id"])), int(str(one["epoch"]))) for one in handles]
    return [PreparedTransaction(*each) for each in numbers if each[1] >= 0]


def _retriable_code(found: Sequence[TransactionDescription]) -> int:
    return next((one.code for one in found if one.code in protocol.RETRIABLE), 0)


def describe(
    cluster: Cluster, ids: Sequence[str], code_of: Callable[[Sequence[TransactionDescription]], int] = _retriable_code
) -> dict[str, TransactionDescription]:
    """Return what coordinators know, by transactional id; what they do not know is left out."""
    parts = [ids[start : start + _IDS_PER_REQUEST] for start in range(0, len(ids), _IDS_PER_REQUEST)]
    found = [one for part in parts for one in cluster.describe(part, code_of)]
    for one in found:
        if one.code not in (KafkaError.NO_ERROR, protocol.TRANSACTIONAL_ID_NOT_FOUND):
            raise refused(one.code, _RIGHT)
    return {one.transactional_id: one for one in found if not one.code}


def is_spare(cluster: Cluster, one: PreparedTransaction) -> bool:
    """Tell whether an id is as its commit has left it, so that another attempt may reuse it."""
    return one.is_in([_COMMITTED], describe(cluster, [one.transactional_id]))


def commit(cluster: Cluster, one: PreparedTransaction) -> bool:
    """Commit; return False if the transaction was aborted or lost."""
    code = cluster.ask_coordinator(one.transactional_id, protocol.end_txn(*one, commit=True), lambda answer: answer)
    if code and code not in protocol.ENDED_OTHERWISE:
        raise refused(code, "commit the transaction" if code not in protocol.UNAUTHORISED else _RIGHT)
    return not code


def ended(cluster: Cluster, ids: Sequence[str]) -> dict[str, TransactionDescription]:
    """Wait until the coordinators have written the ends of transactions into all partitions, and describe them.

    EndTxn is answered before that: as soon as the end is in the coordinator's log.
    """

    def code_of(found: Sequence[TransactionDescription]) -> int:
        under_way = any(one.state.startswith(_ENDING) for one in found)
        return KafkaError.CONCURRENT_TRANSACTIONS if under_way else _retriable_code(found)

    return describe(cluster, ids, code_of)


def fence(cluster: Cluster, transactional_id: str) -> None:
    """Abort what a transactional id has open, and let its producer never write again.

    A coordinator that has something to abort moves the epoch, begins to abort, and says "ask again". Asking again
    would begin a producer, and for a week each later start would have to find that no attempt is behind it.
    """

    def code_of(answer: int) -> int:
        if answer != KafkaError.CONCURRENT_TRANSACTIONS:
            return answer
        known = ended(cluster, [transactional_id]).get(transactional_id)
        return answer if known is not None and known.state in (ONGOING, _EMPTY) else 0

    request = protocol.init_producer_id(transactional_id, _FENCED_TIMEOUT_MS)
    code = cluster.ask_coordinator(transactional_id, request, code_of)
    if code not in (KafkaError.NO_ERROR, KafkaError.CONCURRENT_TRANSACTIONS):
        raise refused(code, _RIGHT)


def left_open(cluster: Cluster, prefix: str) -> list[PreparedTransaction]:
    """Return the open transactions of ids with a prefix, and fence producers that have not begun one."""
    ids = _listed(cluster, prefix, [ONGOING, _EMPTY])
    # What was fenced before its first message stays in this state for days.
    for name, known in describe(cluster, ids[_EMPTY]).items():
        if known.state == _EMPTY and known.timeout_ms != _FENCED_TIMEOUT_MS:
            fence(cluster, name)
    return [_identity(known) for known in describe(cluster, ids[ONGOING]).values() if known.state == ONGOING]


def fence_others(cluster: Cluster, prefix: str, batch_id: int, committed: Iterable[PreparedTransaction]) -> None:
    """End what other attempts at a committed micro-batch, or at earlier ones, have open.

    A consumer of committed messages waits at the first message of an open transaction: until its time is up, a dead
    attempt's would hide what was committed after it.
    """
    ours = {one.transactional_id for one in committed}
    for name in _listed(cluster, prefix, [ONGOING])[ONGOING]:
        batch = name.removeprefix(prefix).partition(".")[0]
        if name not in ours and batch.isdecimal() and int(batch) <= batch_id:
            fence(cluster, name)


def _listed(cluster: Cluster, prefix: str, states: Sequence[str]) -> dict[str, list[str]]:
    """Return transactional ids with a prefix, by state."""
    nodes, _ = cluster.ask_any(protocol.metadata([]))
    ids: dict[str, list[str]] = defaultdict(list)
    for node in nodes:
        code, listed = cluster.ask_node(node, protocol.list_transactions(states), lambda answer: answer[0])
        if code:
            raise refused(code, _RIGHT)
        for name, state in listed:
            if name.startswith(prefix):
                ids[state].append(name)
    return ids


def longest_timeout_ms(cluster: Cluster) -> int | None:
    """Return the brokers' limit on the length of a transaction; None if the user may not see it."""
    nodes, _ = cluster.ask_any(protocol.metadata([]))
    if not nodes:
        raise UnavailableError("the cluster reports no brokers")
    request = protocol.broker_setting(str(nodes[0].number), "transaction.max.timeout.ms")
    code, value = cluster.ask_node(nodes[0], request, lambda answer: answer[0])
    if code in protocol.UNAUTHORISED or value is None or not value.isdecimal():
        return None
    if code:
        raise refused(code, "tell its settings")
    return min(int(value), (1 << 31) - 1)


def _identity(known: TransactionDescription) -> PreparedTransaction:
    return PreparedTransaction(known.transactional_id, known.producer_id, known.epoch)
