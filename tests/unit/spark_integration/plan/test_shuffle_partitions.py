"""Task slots follow from the configuration, and a warning names the figure to set only where there are far too few."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest

from holdfast.spark_integration.plan.session import task_slots, warn_of_partitions

STANDALONE = {"spark.master": "spark://host:7077"}
YARN = {"spark.master": "yarn", "spark.executor.instances": "5", "spark.executor.cores": "4"}
DYNAMIC = YARN | {"spark.dynamicAllocation.enabled": "true"}


@pytest.mark.parametrize(
    ("configuration", "slots"),
    [
        ({"spark.master": "local"}, 1),
        ({"spark.master": "local[4]"}, 4),
        ({"spark.master": "local[4, 3]"}, 4),
        ({"spark.master": "local[*]"}, 6),
        ({"spark.master": "local[*,3]", "spark.task.cpus": "2"}, 3),
        ({"spark.master": "local[2]", "spark.task.cpus": "4"}, 1),
        ({"spark.master": "local-cluster[2, 4, 1024]"}, 8),
        (YARN, 20),
        (YARN | {"spark.master": "k8s://https://host", "spark.task.cpus": "2"}, 10),
        ({"spark.master": "yarn", "spark.executor.instances": "5"}, 5),
        ({"spark.master": "yarn"}, None),
        (DYNAMIC, None),
        (DYNAMIC | {"spark.dynamicAllocation.maxExecutors": "50"}, 200),
        (DYNAMIC | {"spark.dynamicAllocation.maxExecutors": "infinity"}, None),
        (STANDALONE, None),
        (STANDALONE | {"spark.executor.instances": "3"}, None),
        (STANDALONE | {"spark.cores.max": "12"}, 12),
        (STANDALONE | {"spark.cores.max": "12", "spark.executor.instances": "2", "spark.executor.cores": "3"}, 6),
        ({"spark.master": "something new"}, None),
        ({}, None),
    ],
)
def test_task_slots_follow_from_the_configuration(configuration: dict[str, str], slots: int | None) -> None:
    """What is not known stays unknown: a wrong figure would be worse than none."""
    assert task_slots(configuration, local_cores=6) == slots


def a_session(partitions: int, configuration: dict[str, str], **others: Any) -> Any:
    conf = SimpleNamespace(getAll=configuration, get={"spark.sql.shuffle.partitions": str(partitions)}.get)
    return SimpleNamespace(conf=conf, **others)


def test_far_more_partitions_than_slots_are_told_with_the_figure_to_set() -> None:
    """Two hundred tasks on two slots: the newcomer reads what to set, and until when."""
    session = a_session(200, {"spark.master": "local[2]"})
    with pytest.warns(UserWarning, match=r"200 shuffle partitions for 2 task slots.*partitions=2,.*first started"):
        warn_of_partitions(session, stacklevel=1)


@pytest.mark.parametrize(
    "session",
    [
        a_session(16, {"spark.master": "local[2]"}),
        a_session(200, STANDALONE),
        # Spark Connect: no SparkContext says how many cores `*` is.
        a_session(200, {"spark.master": "local[*]"}),
        # A default parallelism that somebody chose is not the number of cores.
        a_session(
            200,
            {"spark.master": "local[*]", "spark.default.parallelism": "2"},
            sparkContext=SimpleNamespace(defaultParallelism=2),
        ),
    ],
)
def test_nothing_is_said_of_a_small_multiple_or_where_slots_are_unknown(session: Any) -> None:
    """A warning that may be wrong teaches users to ignore warnings."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_partitions(session, stacklevel=1)


def test_all_cores_of_the_driver_are_what_spark_takes_by_default() -> None:
    """The commonest master, ``local[*]``, has its cores in no setting."""
    session = a_session(200, {"spark.master": "local[*]"}, sparkContext=SimpleNamespace(defaultParallelism=3))
    with pytest.warns(UserWarning, match=r"shuffle\.partitions=3"):
        warn_of_partitions(session, stacklevel=1)
