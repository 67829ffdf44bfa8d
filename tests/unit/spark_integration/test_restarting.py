"""When a query is started again: what passes, how long to wait, when to give up."""

from __future__ import annotations

import socket
from collections.abc import Sequence

import pytest
from py4j.clientserver import JavaClient, JavaParameters, PythonParameters
from py4j.java_gateway import GatewayProperty

import holdfast
from holdfast import errors, restart
from holdfast.errors import InvalidArgumentError
from holdfast.spark_integration.failures import passes
from holdfast.spark_integration.restarting import FAILURES_MAX, Exponential, RestartStrategy
from tests.servers.programs import free_ports

EVEN = lambda: 0.5  # noqa: E731


def delays(strategy: RestartStrategy, failures_s: Sequence[float]) -> list[float | None]:
    """Return what the strategy says after each failure."""
    return [strategy.delay_s(failures_s[: i + 1]) for i in range(len(failures_s))]


def test_a_fixed_delay_ends_after_its_attempts() -> None:
    assert delays(restart.fixed_delay(2, 7), [0, 100, 9000]) == [7, 7, None]
    assert delays(restart.fixed_delay(0), [0]) == [None]


def test_an_exponential_delay_grows_to_its_longest_and_begins_anew_when_it_was_quiet() -> None:
    strategy = Exponential(1, 5, 2, 60, 0, None, EVEN)
    assert delays(strategy, [0, 10, 20, 30, 40, 101, 110]) == [1, 2, 4, 5, 5, 1, 2]
    assert delays(Exponential(1, 5, 2, 60, 0, 2, EVEN), [0, 1, 2, 90]) == [1, 2, None, 1]
    many = [float(i) for i in range(FAILURES_MAX)]
    assert strategy.delay_s(many) == 5


def test_the_delay_is_off_by_the_jitter_at_most() -> None:
    """Many queries that lose one server do not all come back in the same second."""
    assert Exponential(10, 10, 1, 60, 0.2, None, lambda: 0.0).delay_s([0]) == pytest.approx(8)
    assert Exponential(10, 10, 1, 60, 0.2, None, lambda: 1.0).delay_s([0]) == pytest.approx(12)


def test_a_rate_gives_up_where_failures_are_dense() -> None:
    assert delays(restart.failure_rate(2, 10, 1), [0, 9, 18, 27, 28]) == [1, 1, 1, 1, None]


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: restart.fixed_delay(-1), "attempts"),
        (lambda: restart.fixed_delay(FAILURES_MAX), "attempts"),
        (lambda: restart.exponential(5, 1), "longest_s"),
        (lambda: restart.exponential(factor=0.5), "factor"),
        (lambda: restart.exponential(jitter=2), "jitter"),
        (lambda: restart.failure_rate(delay_s=float("nan")), "delay_s"),
    ],
)
def test_a_number_that_cannot_be_is_named(make: object, name: str) -> None:
    assert callable(make)
    with pytest.raises(InvalidArgumentError, match=name):
        make()


@pytest.mark.parametrize(
    "error",
    [
        errors.UnavailableError("the storage did not answer"),
        ConnectionResetError("by peer"),
        RuntimeError("Job aborted due to stage failure: ExecutorLostFailure (executor 3 exited caused by …)"),
        RuntimeError("org.apache.spark.SparkException: Python worker exited unexpectedly (crashed)"),
        RuntimeError("Caused by: java.net.ConnectException: Connection refused"),
        RuntimeError("Lost task 0.0 in stage 4.0 (TID 9): java.nio.channels.CancelledKeyException\n\tat java.base/X"),
        RuntimeError("org.apache.kafka.common.errors.TimeoutException: Topic not present in metadata after 60000 ms."),
    ],
)
def test_what_a_lost_machine_process_or_network_causes_passes(error: Exception) -> None:
    assert passes(error)


@pytest.mark.parametrize(
    "error",
    [
        errors.StateLostError("gone"),
        errors.FencedError("a newer run"),
        errors.InvalidArgumentError("no"),
        RuntimeError("java.lang.IllegalStateException: something else"),
        ValueError("negative amount: java.net.ConnectException"),
    ],
)
def test_what_stays_wrong_does_not_pass(error: Exception) -> None:
    """A newer run that has taken over must not be started against, and a function does not mend itself."""
    with pytest.raises(type(error)) as caught:  # with its traceback, as a query's
        raise error
    assert not passes(caught.value)


def test_a_start_that_returns_no_query_is_told_so() -> None:
    """As one whose last line lacks its return, or ``.start()``."""
    with pytest.raises(InvalidArgumentError, match=r"start must return the query .* given=NoneType"):
        holdfast.run(lambda: None)  # type: ignore[arg-type, return-value]


def test_a_lost_jvm_does_not_pass() -> None:
    """Without it no start in this process can succeed; whoever started the process must start it again."""
    (port,) = free_ports(1)
    client = JavaClient(JavaParameters(port=port), PythonParameters(), GatewayProperty(True, None))
    with pytest.raises(ConnectionRefusedError) as caught:  # what PySpark raises then
        client.send_command("a command")
    assert not passes(caught.value)
    with pytest.raises(ConnectionRefusedError) as caught:
        socket.create_connection(("127.0.0.1", port))
    assert passes(caught.value), "any other connection may come back"
