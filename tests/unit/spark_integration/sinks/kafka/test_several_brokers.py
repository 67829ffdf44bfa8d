"""A cluster of several brokers: one that is listed and does not answer, and answers that leave something out."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import pytest

from holdfast.errors import UnavailableError
from holdfast.spark_integration.sinks.kafka import brokers
from holdfast.spark_integration.sinks.kafka.brokers import Cluster, Security
from holdfast.spark_integration.sinks.kafka.protocol import encoded
from tests.unit.spark_integration.sinks.kafka.hostile_broker import broker, packet, versions

_METADATA, _FIND, _CONFIGS, _DESCRIBE, _LIST = 3, 10, 32, 65, 66
Address = tuple[str, int]


@pytest.fixture
def dead() -> Iterator[Address]:
    """Return an address at which nobody listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield taken.getsockname()


@contextmanager
def cluster_of(*listings: list[Address], answers: Callable[[Address], dict[int, bytes]]) -> Iterator[Cluster]:
    """Serve one broker, which says in turn that these and itself are there; `answers` are given its address."""
    left = list(listings)

    def replies(key: int, number: int) -> bytes:
        if key == 18:
            return versions(number)
        if key == _METADATA:
            others = left.pop(0) if len(left) > 1 else left[0]
            return packet(number, b"\0" + metadata([*others, address]))
        return packet(number, answers(address)[key])

    with ExitStack() as ends:
        address = ends.enter_context(broker(replies))
        yield ends.enter_context(Cluster([address], Security(), patience_ms=3000))


def metadata(nodes: list[Address]) -> bytes:
    told = [(number, host, port, "") for number, (host, port) in enumerate(nodes)]
    return encoded("i [(i s i s)] s i [(h s u ? [] i)]", 0, told, "cluster", 0, [], flexible=True)


def listed(*ids: str) -> bytes:
    found = [(name, 1, "Ongoing") for name in ids]
    return b"\0" + encoded("i h [s] [(s q s)]", 0, 0, [], found, flexible=True)


def test_a_broker_that_has_gone_is_asked_no_more_once_the_cluster_says_so(dead: Address) -> None:
    """It stays listed for some seconds after its death, and a commit must not fail for that."""
    with cluster_of([dead], [dead], [], answers=lambda _: {_LIST: listed("other")}) as cluster:
        assert brokers.left_open(cluster, "holdfast.") == []


def test_the_limit_of_transactions_is_told_by_a_broker_that_is_there(dead: Address) -> None:
    setting = ("transaction.max.timeout.ms", "60000", False, 0, False, [])
    told = encoded("i [(h s b s [(s s ? b ? [(s s b)])])]", 0, [(0, "", 4, "0", [setting])])
    with cluster_of([dead], [], answers=lambda _: {_CONFIGS: told}) as cluster:
        assert brokers.longest_timeout_ms(cluster) == 60_000


@pytest.mark.parametrize("leaves_out", ["coordinator", "state"])
def test_an_id_that_an_answer_leaves_out_is_not_taken_for_a_forgotten_one(leaves_out: str) -> None:
    """A forgotten transaction may be given up; one of which nothing was said may not."""

    def answers(address: Address) -> dict[int, bytes]:
        there = [] if leaves_out == "coordinator" else [("id", 0, *address, 0, "")]
        return {
            _FIND: b"\0" + encoded("i [(s isi h s)]", 0, there, flexible=True),
            _DESCRIBE: b"\0" + encoded("i [(h s s i q q h [(s [i])])]", 0, [], flexible=True),
        }

    with cluster_of([], answers=answers) as cluster, pytest.raises(UnavailableError, match="as Kafka does"):
        brokers.describe(cluster, ["id"])
