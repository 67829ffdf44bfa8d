"""The driver's side: transactions that workers left open, by what their coordinators say of them.

Who takes up a transactional id moves its epoch, or is given a new producer id. So an id with these two numbers belongs
to one attempt, and such a handle is:

    Ongoing                             prepared
    PrepareCommit, CompleteCommit       committed
    anything else, or not found         ended otherwise: aborted by us, by its time limit, or forgotten
    the id with other numbers           the same, or committed long ago and taken up since
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from holdfast.errors import UnavailableError
from holdfast.spark_integration.sinks.kafka.wire import error_codes, requests
from holdfast.spark_integration.sinks.kafka.wire.cluster import Cluster, refused
from holdfast.spark_integration.sinks.kafka.wire.requests import Transaction
from holdfast.spark_integration.sinks.two_phase_sink import Handle

ONGOING = "Ongoing"
_EMPTY = "Empty"
_COMMITTED = ("PrepareCommit", "CompleteCommit")
#: Begins the names of states in which markers are still to be written.
_ENDING = "Prepare"
#: No attempt has it, as users may set no less than a second: it marks ids that were fenced.
_FENCED_TIMEOUT_MS = 999
# So many ids of 250 characters are a request of 250 KB.
_IDS_PER_REQUEST = 1000
_RIGHT = "write transactional ids that begin with holdfast.<name of the sink>."


class Prepared(NamedTuple):
    """A handle, read."""

    transactional_id: str
    producer_id: int
    epoch: int

    def handle(self) -> Handle:
        """Return it as the driver stores it: the same text, whoever found the transaction."""
        return self._asdict()

    def is_open(self, known: Transaction | None) -> bool:
        """Tell whether it waits for its end."""
        return known is not None and known.state == ONGOING and self == _identity(known)

    def is_committed(self, known: Transaction | None) -> bool:
        """Tell whether it has been committed, if maybe not yet in all partitions."""
        return known is not None and known.state in _COMMITTED and self == _identity(known)


def with_rows(handles: Iterable[Handle]) -> list[Prepared]:
    """Read handles, but for those of attempts that wrote nothing."""
    found = [
        Prepared(str(one["transactional_id"]), int(str(one["producer_id"])), int(str(one["epoch"]))) for one in handles
    ]
    return [one for one in found if one.producer_id >= 0]


def _code(found: Sequence[Transaction]) -> int:
    return next((one.code for one in found if one.code in error_codes.RETRIABLE), 0)


def describe(
    cluster: Cluster, ids: Sequence[str], code_of: Callable[[Sequence[Transaction]], int] = _code
) -> dict[str, Transaction]:
    """Return what coordinators know, by transactional id; what they do not know is left out."""
    found: dict[str, Transaction] = {}
    for start in range(0, len(ids), _IDS_PER_REQUEST):
        some = ids[start : start + _IDS_PER_REQUEST]
        found |= cluster.ask_coordinators(some, requests.describe_transactions, code_of)
    for one in found.values():
        if one.code not in (error_codes.NONE, error_codes.TRANSACTIONAL_ID_NOT_FOUND):
            raise refused(one.code, _RIGHT)
    return {name: one for name, one in found.items() if not one.code}


def is_spare(cluster: Cluster, one: Prepared) -> bool:
    """Tell whether an id is as its commit has left it, so that another attempt may take it up."""
    known = describe(cluster, [one.transactional_id]).get(one.transactional_id)
    return one.is_committed(known) and known is not None and known.state == _COMMITTED[1]


def commit(cluster: Cluster, one: Prepared) -> bool:
    """Commit; return False if the transaction was aborted or lost."""
    request = requests.end_txn(*one, commit=True)
    code = cluster.ask_coordinator(one.transactional_id, request, lambda answer: answer)
    if code and code not in error_codes.ENDED_OTHERWISE:
        raise refused(code, "commit the transaction" if code not in error_codes.UNAUTHORISED else _RIGHT)
    return not code


def ended(cluster: Cluster, ids: Sequence[str]) -> dict[str, Transaction]:
    """Return what is known once the coordinators have written the ends of transactions into all partitions.

    EndTxn is answered before that: as soon as the decision is in the coordinator's log.
    """

    def code_of(found: Sequence[Transaction]) -> int:
        under_way = any(one.state.startswith(_ENDING) for one in found)
        return error_codes.CONCURRENT_TRANSACTIONS if under_way else _code(found)

    return describe(cluster, ids, code_of)


def fence(cluster: Cluster, transactional_id: str) -> None:
    """Abort what a transactional id has open, and let its producer never write again.

    A coordinator that has to abort something moves the epoch, begins to abort, and asks to be asked again. Whoever does
    begins a producer, of which each later start had to find out, for a week, that no attempt is behind it.
    """

    def code_of(answer: int) -> int:
        if answer != error_codes.CONCURRENT_TRANSACTIONS:
            return answer
        known = ended(cluster, [transactional_id]).get(transactional_id)
        return answer if known is not None and known.state in (ONGOING, _EMPTY) else 0

    request = requests.init_producer_id(transactional_id, _FENCED_TIMEOUT_MS)
    code = cluster.ask_coordinator(transactional_id, request, code_of)
    if code not in (error_codes.NONE, error_codes.CONCURRENT_TRANSACTIONS):
        raise refused(code, _RIGHT)


def left_open(cluster: Cluster, prefix: str) -> list[Prepared]:
    """Return the open transactions of ids that begin so; producers that have not begun one are fenced."""
    ids = _listed(cluster, prefix, [ONGOING, _EMPTY])
    # What was fenced before its first message stays in this state for days.
    for name, known in describe(cluster, ids[_EMPTY]).items():
        if known.state == _EMPTY and known.timeout_ms != _FENCED_TIMEOUT_MS:
            fence(cluster, name)
    return [_identity(known) for known in describe(cluster, ids[ONGOING]).values() if known.state == ONGOING]


def fence_others(cluster: Cluster, prefix: str, batch_id: int, committed: Iterable[Prepared]) -> None:
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
    """Return transactional ids that begin so, by state."""
    nodes, _ = cluster.ask_any(requests.metadata([]))
    ids: dict[str, list[str]] = defaultdict(list)
    for node in nodes:
        code, listed = cluster.ask_node(node, requests.list_transactions(states), lambda answer: answer[0])
        if code:
            raise refused(code, _RIGHT)
        for name, state in listed:
            if name.startswith(prefix):
                ids[state].append(name)
    return ids


def longest_timeout_ms(cluster: Cluster) -> int | None:
    """Return the brokers' limit on the length of a transaction; None if the user may not see it."""
    nodes, _ = cluster.ask_any(requests.metadata([]))
    if not nodes:
        raise UnavailableError("the cluster reports no brokers")
    request = requests.broker_setting(str(nodes[0].number), "transaction.max.timeout.ms")
    code, value = cluster.ask_node(nodes[0], request, lambda answer: answer[0])
    if code in error_codes.UNAUTHORISED or value is None or not value.isdecimal():
        return None
    if code:
        raise refused(code, "tell its settings")
    return min(int(value), (1 << 31) - 1)


def _identity(known: Transaction) -> Prepared:
    return Prepared(known.transactional_id, known.producer_id, known.epoch)
