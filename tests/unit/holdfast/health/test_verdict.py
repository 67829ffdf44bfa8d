"""Whether a query runs, is stopped, stale or failing: by what is known, at the time, of whatever rhythm it has."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from holdfast.health import Health, QueryRun, Report, Signs, Verdict, health_of, judge, runs_of
from holdfast.snapshotter.ownership.claims import Claim, ClaimingRun
from holdfast.spark_integration.client.messages import RecentBatch
from holdfast.spark_integration.spark_state.query_location import LoggedTimes

NOW = 1_800_000_000_000
S, MIN, HOUR, DAY = 1_000, 60_000, 3_600_000, 86_400_000


def log(ends_ms: int, count: int = 30, every_ms: int = 10 * S, takes_ms: int = 2 * S) -> list[LoggedTimes]:
    """Return micro-batches of an even rhythm, the last of which was planned at a time."""
    first = ends_ms - (count - 1) * every_ms
    return [LoggedTimes(n, first + n * every_ms, first + n * every_ms + takes_ms) for n in range(count)]


def run(started_ms: int, seen_ms: int, batch_id: int | None = None, has_ended: bool | None = None) -> QueryRun:
    return QueryRun(f"run-{started_ms}", started_ms, seen_ms, batch_id, has_ended)


def hourly(count: int, last_ms: int, has_ended: bool | None = None) -> tuple[QueryRun, ...]:
    """Return runs of a minute each hour, the last of which began at a time."""
    return tuple(run(last_ms - n * HOUR, last_ms - n * HOUR + MIN, 100 - n, has_ended) for n in reversed(range(count)))


def failed(batch_id: int, stored_ms: int = NOW - MIN) -> Report:
    return Report(stored_ms, "totals/shard-0003", f"troubles/micro-batch-{batch_id}-0123456789abcdef")


def background(what: str, stored_ms: int = NOW - MIN) -> Report:
    return Report(stored_ms, "totals/shard-0003", f"troubles/{what}-0123456789abcdef")


def test_a_query_at_work_runs_since_its_start() -> None:
    """The last micro-batch is seconds old; what is planned is at work."""
    times = log(NOW - 5 * S)
    begun = run(NOW - HOUR, NOW - MIN, 25, has_ended=False)
    found = judge(Signs((begun,), log=tuple(times)), NOW)
    assert (found.state, found.since_ms) == ("running", NOW - HOUR)
    assert found.why == "Micro-batch 29 was committed 3 s ago."
    planned = judge(Signs((begun,), log=(*times, LoggedTimes(30, NOW - S, None))), NOW)
    assert (planned.state, planned.why) == ("running", "Micro-batch 30 is running, planned 1 s ago.")


def test_claims_alone_tell_that_it_runs() -> None:
    """Where its location is not known, a claim of the last five minutes does, and the answer names it."""
    found = judge(Signs((run(NOW - HOUR, NOW - 2 * MIN, 25),)), NOW)
    assert found.state == "running"
    assert found.why == "Last active 2 min ago, according to its claim in the state directory."
    assert judge(Signs((run(NOW - HOUR, NOW - 6 * MIN, 25),)), NOW).state == "stale"


@pytest.mark.parametrize(
    ("every_ms", "takes_ms", "silent_ms", "state"),
    [
        (10 * S, 2 * S, 4 * MIN, "running"),
        (10 * S, 2 * S, 6 * MIN, "stale"),
        (HOUR, MIN, 110 * MIN, "running"),  # a trigger of an hour
        (HOUR, MIN, 130 * MIN, "stale"),
        (20 * MIN, 20 * MIN, 70 * MIN, "running"),  # one takes 20 minutes, and this one three times as long
    ],
)
def test_its_own_pace_says_how_long_it_may_be_silent(every_ms: int, takes_ms: int, silent_ms: int, state: str) -> None:
    """Five minutes, twice the time between its micro-batches, or four times what one takes."""
    times = log(NOW - silent_ms - takes_ms, every_ms=every_ms, takes_ms=takes_ms)
    assert judge(Signs((run(NOW - 90 * DAY, NOW - silent_ms, 29),), log=tuple(times)), NOW).state == state


def test_a_query_written_67_days_ago_is_stale_and_says_how_that_is_known() -> None:
    """Its process is out of sight: so it is not said to have ended."""
    found = judge(Signs(stored_ms=NOW - 67 * DAY), NOW)
    assert (found.state, found.since_ms) == ("stale", NOW - 67 * DAY)
    assert "No micro-batch for 67 d, according to the newest stored commit" in found.why
    assert "this machine cannot tell whether it is still running" in found.why


def test_a_process_that_still_runs_is_told() -> None:
    """It may have no input, be stopped in a notebook, or hang: stale, and the planned micro-batch is named."""
    times = (*log(NOW - HOUR), LoggedTimes(30, NOW - 50 * MIN, None))
    found = judge(Signs((run(NOW - DAY, NOW - 50 * MIN, 30, has_ended=False),), log=times), NOW)
    assert found.state == "stale"
    assert "its process on this machine is still running" in found.why
    assert "Micro-batch 30 is planned and not committed" in found.why


def test_a_query_whose_processes_have_ended_is_stopped_at_once() -> None:
    """However young its last micro-batch is; one that was planned runs again at the next start."""
    ended = run(NOW - DAY, NOW - 2 * MIN, 29, has_ended=True)
    found = judge(Signs((ended,), log=tuple(log(NOW - 5 * S))), NOW)
    assert (found.state, found.since_ms) == ("stopped", NOW - 3 * S)
    assert "its processes on this machine have ended" in found.why
    midway = judge(Signs((ended,), log=(*log(NOW - 15 * S), LoggedTimes(30, NOW - 5 * S, None))), NOW)
    assert midway.state == "stopped"
    assert "Micro-batch 30 is planned and not committed. The next start runs it again." in midway.why


def test_an_earlier_run_that_has_ended_says_nothing_of_who_goes_on() -> None:
    """Another machine has taken over, whose tasks make no claims: Spark's log is newer than the ended run."""
    found = judge(Signs((run(NOW - DAY, NOW - HOUR, 3, has_ended=True),), log=tuple(log(NOW - 5 * S))), NOW)
    assert found.state == "running"


@pytest.mark.parametrize("has_ended", [None, True])
@pytest.mark.parametrize(("silent_ms", "state"), [(40 * MIN, "stopped"), (119 * MIN, "stale")])
def test_a_minute_each_hour(has_ended: bool | None, silent_ms: int, state: str) -> None:
    """It is stopped between its runs, and stale once it has been silent for twice as long, wherever it ran."""
    found = judge(Signs(hourly(5, NOW - silent_ms - MIN, has_ended)), NOW)
    assert found.state == state
    assert ("it usually pauses for 59 min" in found.why) == (state == "stale" or has_ended is None)


@pytest.mark.parametrize("batches", [1, 2])
@pytest.mark.parametrize(("silent_ms", "state"), [(2 * MIN, "running"), (40 * MIN, "stopped"), (119 * MIN, "stale")])
def test_a_run_each_hour_of_a_micro_batch_or_two(batches: int, silent_ms: int, state: str) -> None:
    """What is between two runs is a pause, also where each has no more to do: no trigger of an hour."""
    runs = hourly(8, NOW - silent_ms - MIN)
    planned = [one.started_ms + n * 10 * S for one in runs for n in range(batches)]
    times = tuple(LoggedTimes(n, at_ms, at_ms + 4 * S) for n, at_ms in enumerate(planned))
    assert judge(Signs(runs, log=times), NOW).state == state


def test_an_hourly_trigger_with_two_deployments_runs() -> None:
    """Few of its micro-batches are the first of a run: what is between the others is its pace."""
    times = log(NOW - 70 * MIN, every_ms=HOUR)
    starts = [NOW - 90 * DAY, NOW - 5 * HOUR, NOW - 3 * HOUR]
    runs = tuple(
        run(at, max(one.planned_ms for one in times if one.planned_ms < end), 20 + n)
        for n, (at, end) in enumerate(zip(starts, [*starts[1:], NOW], strict=True))
    )
    assert judge(Signs(runs, log=tuple(times)), NOW).state == "running"


def test_a_clock_that_is_ahead_makes_no_time_negative() -> None:
    """The store's: its objects are of the future. A copied location has the times of copying, commits before plans."""
    ended = run(NOW - DAY, NOW + 5 * S, 29, has_ended=True)
    assert judge(Signs((ended,)), NOW).why.startswith("Last active now, according to its claim")
    copied = tuple(LoggedTimes(n, NOW, NOW - S) for n in range(10))
    assert figures(Signs(log=copied))["Micro-batch duration"][0] == "unknown"


def test_the_newest_run_is_the_one_that_the_store_saw_last() -> None:
    """An earlier run's machine had its clock an hour ahead: its start is later than that of who works now."""

    def told(run_id: str, started_ms: int, seen_ms: int) -> ClaimingRun:
        return ClaimingRun(run_id, started_ms, seen_ms, 1, 100, "", "elsewhere")

    ahead, now = told("a", NOW + 30 * MIN, NOW - 30 * MIN), told("b", NOW - 20 * MIN, NOW - MIN)
    runs = runs_of([Claim("totals", 7, "q", None, "app", "host", (ahead, now))], "q")
    assert [one.run_id for one in runs] == ["a", "b"]
    assert judge(Signs(runs), NOW).state == "running"


def test_one_run_a_day_is_told_by_sparks_log() -> None:
    """Claims tell of a day, so that two are known at most; the log has a hundred micro-batches."""
    days = [one for n in range(6) for one in log(NOW - (6 - n) * DAY + 4 * HOUR, 3, 30 * S)]
    times = tuple(LoggedTimes(n, one.planned_ms, one.committed_ms) for n, one in enumerate(days))
    last = (run(NOW - 20 * HOUR, NOW - 20 * HOUR + MIN, 15),)
    assert judge(Signs(last, log=times), NOW).state == "stopped"
    assert judge(Signs(last, log=times), NOW + 2 * DAY).state == "stale"


def test_restarts_of_a_query_that_runs_on_are_no_pauses() -> None:
    """Three deployments in a morning: that it stands still in the afternoon is no rest between runs."""
    runs = tuple(run(NOW - n * HOUR, NOW - (n - 1) * HOUR - 20 * S, 10 * (9 - n)) for n in (8, 7, 6))
    assert judge(Signs(runs), NOW).state == "stale"


def test_a_micro_batch_that_failed_is_failing_until_it_is_committed() -> None:
    """Whether it runs again, has ended, or was silent since; a commit of it ends that, whoever tells it."""
    times = tuple(log(NOW - HOUR))
    for signs in (
        Signs((run(NOW - DAY, NOW - HOUR, 30, has_ended=True),), log=times, reports=(failed(30),)),
        Signs((run(NOW - DAY, NOW - MIN, 30),), reports=(failed(30),)),
    ):
        found = judge(signs, NOW)
        assert (found.state, found.since_ms) == ("failing", NOW - MIN)
        known = "has not been committed" if signs.log else "is not known to have been committed"
        assert found.why == f"Micro-batch 30 failed and {known} since."
        assert found.failure == failed(30)
    assert judge(Signs(log=times, reports=(failed(29),)), NOW - HOUR + 3 * S).state == "running"
    assert judge(Signs((run(NOW - DAY, NOW - S, 31),), reports=(failed(30),)), NOW).state == "running"
    live = RecentBatch("q", "totals", 31, NOW - S, 1, {})
    assert judge(Signs(measured=(live,), reports=(failed(30),)), NOW).state == "running"


@pytest.mark.parametrize(("what", "effect"), [("snapshot", "commits pile up"), ("clean-up", "storage grows")])
def test_a_background_failure_is_one_of_a_query_at_work(what: str, effect: str) -> None:
    """It runs, and will not for ever. One that is stopped is stopped, whatever failed before."""
    at_work = judge(Signs((run(NOW - DAY, NOW - MIN, 3),), reports=(background(what),)), NOW)
    assert at_work.state == "failing"
    assert f"a {what} of totals/shard-0003 keeps failing" in at_work.why
    assert effect in at_work.why
    ended = run(NOW - DAY, NOW - MIN, 3, has_ended=True)
    assert judge(Signs((ended,), reports=(background(what),)), NOW).state == "stopped"


def test_starts_in_vain_are_a_failure() -> None:
    """Three runs at one micro-batch that none has committed; one that was killed and its successor are none."""

    def started(count: int) -> Verdict:
        runs = tuple(run(NOW - (9 - n) * MIN, NOW - (9 - n) * MIN + S, 30) for n in range(count))
        return judge(Signs(runs, log=tuple(log(NOW - 20 * MIN))), NOW)

    assert started(2).state != "failing"
    assert started(3).state == "failing"
    assert started(3).why.startswith("3 starts have reached micro-batch 30, and none has committed it")
    committed = tuple(run(NOW - n * MIN, NOW - n * MIN + S, 29) for n in (3, 2, 1))
    assert judge(Signs(committed, log=tuple(log(NOW - 3 * S))), NOW).state == "running"


def test_lost_state_is_a_failure_whatever_runs() -> None:
    signs = Signs((run(NOW - DAY, NOW - S, 3),), lost="The record of totals cannot be read.")
    assert judge(signs, NOW) == Verdict("failing", 0, "The record of totals cannot be read.")


def test_where_nothing_is_known_that_is_said() -> None:
    assert judge(Signs(), NOW).why.startswith("The query has never been active")


def figures(signs: Signs) -> dict[str, tuple[str, str]]:
    found: Health = health_of("q", ["totals"], signs, [], NOW)
    return {figure.name: (figure.value, figure.known_from) for figure in found.figures}


def live(rows: Sequence[int]) -> tuple[RecentBatch, ...]:
    """Return micro-batches ten seconds apart, newest first, as state servers remember them."""
    return tuple(RecentBatch("q", "totals", 40 - n, NOW - n * 10 * S, 2, {"rows": one}) for n, one in enumerate(rows))


def test_figures_say_what_they_are_known_from() -> None:
    """How often, how long against the next start, from Spark's log; rows, from the servers of this machine."""
    found = figures(Signs(log=tuple(log(NOW - 5 * S)), measured=live([7, 5_000, 3_000, 4_000])))
    source = "over the last 20 uninterrupted micro-batches, from Spark's log"
    assert found["Micro-batches per minute"] == ("6.0", source)
    assert found["Micro-batch duration"][0] == "2 s of every 10 s"
    assert "idle 80 % of the time" in found["Micro-batch duration"][1]
    assert found["Rows per second"][0] == "400"  # the newest may be at work
    assert found["Pending input"][0] == "unknown"


def test_what_is_not_known_is_unknown() -> None:
    """Without the location and away from the query's machines no figure is guessed."""
    found = figures(Signs((run(NOW - HOUR, NOW - MIN, 3),), stored_ms=NOW - MIN))
    assert {value for value, _ in found.values()} == {"unknown"}
    assert "pass the query's checkpointLocation as well" in found["Micro-batches per minute"][1]
    assert "query.lastProgress" in found["Pending input"][1]
    begun = figures(Signs(measured=live([7])))
    assert begun["Rows per second"] == ("unknown", "this machine's servers saw fewer than two micro-batches")
    named = figures(Signs(log=(LoggedTimes(0, NOW - S, None),)))
    assert named["Micro-batches per minute"] == ("unknown", "fewer than two consecutive micro-batches are known")
    assert named["Micro-batch duration"] == ("unknown", "Spark's log has no committed micro-batch")
    only = figures(Signs(log=(LoggedTimes(0, NOW - 5 * S, NOW - S),)))
    assert only["Micro-batch duration"] == ("4 s", "from plan to commit, in Spark's log")


def test_a_pause_is_no_part_of_the_pace() -> None:
    """A query that ran yesterday evening and goes on this morning has the pace of this morning."""
    times = (*log(NOW - 12 * HOUR, 10), *(LoggedTimes(10 + n, NOW - (6 - n) * 20 * S, NOW) for n in range(6)))
    assert figures(Signs(log=times))["Micro-batches per minute"][0] == "3.0"


def test_micro_batches_without_rest_and_what_is_planned_are_told() -> None:
    """Its trigger is too short, or it has none; a planned micro-batch is the input that is known to be left."""
    times = (*log(NOW - 12 * S, every_ms=10 * S, takes_ms=9_800), LoggedTimes(30, NOW - 2 * S, None))
    found = figures(Signs(log=times))
    assert "back to back" in found["Micro-batch duration"][1]
    assert found["Pending input"] == ("micro-batch 30", "planned and not committed, in Spark's log")


def test_rare_micro_batches_are_one_in_so_long() -> None:
    found = figures(Signs(log=tuple(log(NOW - MIN, every_ms=HOUR))))
    assert found["Micro-batches per minute"][0] == "one in 1 h"


def test_what_passed_between_a_restore_and_the_first_start_is_no_part_of_the_pace() -> None:
    """A restored location has one micro-batch from before any start: nobody knows a rhythm yet."""
    begun = run(NOW - 20 * S, NOW - 9 * S, 8)
    times = (LoggedTimes(7, NOW - 3 * HOUR, NOW - 3 * HOUR), LoggedTimes(8, NOW - 15 * S, NOW - 12 * S))
    unknown = ("unknown", "fewer than two consecutive micro-batches are known")
    assert figures(Signs((begun,), log=times))["Micro-batches per minute"] == unknown
    assert judge(Signs((begun,), log=times), NOW + HOUR).state == "stale"
