"""What a processor may ask of its handle, and when: items L, TM, TL, W, B and X."""

from __future__ import annotations

from collections.abc import Iterator

from tests.spark.processors.probes.probe import Error, Probes, States, attempt, survived, written

probe = Probes()


@probe((-1, -1))
def w1_without_a_time_mode_there_is_no_time(s: States) -> Iterator[object]:
    assert s.times is not None
    yield s.times.getCurrentProcessingTimeInMs(), s.times.getCurrentWatermarkInMs()


_LATE = "[STATEFUL_PROCESSOR_CANNOT_PERFORM_OPERATION_WITH_INVALID_HANDLE_STATE]"


@probe(
    Error("PySparkRuntimeError", "Error initializing value state:", _LATE, "operation=get_value_state"),
    ends_spark=True,
)
def l5_a_value_is_declared_in_init_only(s: States) -> Iterator[object]:
    yield attempt(s.handle.getValueState, "late", "n int")


@probe(
    Error("PySparkRuntimeError", "Error initializing list state:", _LATE, "operation=get_list_state"),
    ends_spark=True,
)
def l5_a_list_is_declared_in_init_only(s: States) -> Iterator[object]:
    yield attempt(s.handle.getListState, "late", "n int")


@probe(
    Error("PySparkRuntimeError", "Error initializing map state:", _LATE, "operation=get_map_state"),
    ends_spark=True,
)
def l5_a_map_is_declared_in_init_only(s: States) -> Iterator[object]:
    yield attempt(s.handle.getMapState, "late", "k int", "n int")


@probe(Error("PySparkRuntimeError", "Error deleting state:", _LATE, "operation=delete_if_exists"), ends_spark=True)
def d7_variables_are_deleted_in_init_only(s: States) -> Iterator[object]:
    yield attempt(s.handle.deleteIfExists, "value")


_NO_TIMERS = "[STATEFUL_PROCESSOR_CANNOT_PERFORM_OPERATION_WITH_INVALID_TIME_MODE]"


@probe(
    Error("PySparkRuntimeError", "Error register timer:", _NO_TIMERS, "operation=register_timer", "timeMode=NoTime"),
    ends_spark=True,
)
def tm7_no_timer_is_registered_without_a_time_mode(s: States) -> Iterator[object]:
    yield attempt(s.handle.registerTimer, 5)


@probe(
    Error("PySparkRuntimeError", "Error deleting timer:", _NO_TIMERS, "operation=delete_timer", "timeMode=NoTime"),
    ends_spark=True,
)
def tm7_no_timer_is_deleted_without_a_time_mode(s: States) -> Iterator[object]:
    yield attempt(s.handle.deleteTimer, 5)


@probe(
    Error("PySparkRuntimeError", _NO_TIMERS, "operation=list_timers", "timeMode=NoTime"),
    (1,),
    spark=([], "lost"),
    ends_spark=True,
)
def tm7_no_timers_are_listed_without_a_time_mode(s: States) -> Iterator[object]:
    """Q5, X4: Spark says that there are none, and the next call finds the state server gone."""
    yield attempt(lambda: list(s.handle.listTimers()))
    yield survived(written, s.single, (1,))
