"""A session may have other shuffle partitions at a restart: Spark goes on with those it began with, and so do we."""

from __future__ import annotations

import itertools
import json
import warnings
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from pyspark.errors import StreamingQueryException

from holdfast.snapshotter.ownership.claims import ALIVE_MS
from tests.spark import conftest as lab_module
from tests.spark.application import run_program
from tests.spark.conftest import Lab, age, claims
from tests.tiers import cases

pytestmark = [pytest.mark.spark, pytest.mark.slow(60), pytest.mark.timeout(600)]

PROGRAM = Path(__file__).with_name("partitions_query.py")
KEYS = [f"key {i}" for i in range(40)]


@dataclass(frozen=True)
class Case:
    """A query that begins with some number of partitions, and is started again in a session with another."""

    #: ``spark.sql.shuffle.partitions`` of the session.
    first: int
    then: int
    #: ``spark.holdfast.shards``, where it is set.
    shards: int | None
    #: Whether there is a state directory.
    durable: bool

    def __str__(self) -> str:
        return f"{self.first} to {self.then}, {self.shards} shards, {'durable' if self.durable else 'local'}"

    def configure(self, lab: Lab, partitions: int) -> None:
        lab.spark.conf.set("spark.sql.shuffle.partitions", partitions)
        if self.shards is not None:
            lab.configure({"shards": str(self.shards)})
        if not self.durable:
            lab.spark.conf.unset("spark.holdfast.state.dir")
            warnings.filterwarnings("ignore", "this query's state is not durable")


SHRINKING, GROWING = Case(8, 4, 4, durable=True), Case(3, 8, None, durable=True)
LOCAL = Case(2, 5, 3, durable=False)
# With 200 partitions, Spark's default, a micro-batch takes 20 seconds: once.
ALL = [Case(*each) for each in itertools.product((1, 3, 8), (1, 2, 8, 20), (None, 1, 4, 16), (True, False))]
ALL.append(Case(8, 200, None, durable=True))


def parameters() -> list[object]:
    quick = cases([SHRINKING, GROWING, LOCAL])
    wide = [
        case
        for case in dict.fromkeys([SHRINKING, GROWING, LOCAL, *ALL])
        if case not in quick and case.first != case.then and (case.durable or case.shards)
    ]
    return [pytest.param(c, id=str(c)) for c in quick] + [
        pytest.param(c, id=str(c), marks=pytest.mark.all) for c in wide
    ]


@pytest.fixture(autouse=True)
def partitions_stay(lab: Lab) -> object:
    before = lab.spark.conf.get("spark.sql.shuffle.partitions")
    yield
    lab.spark.conf.set("spark.sql.shuffle.partitions", before)


@pytest.mark.filterwarnings("ignore:this query's state is not durable", "ignore:this session has 20")
@pytest.mark.parametrize("case", parameters())
def test_a_restart_with_other_partitions_keeps_all_state(lab: Lab, case: Case) -> None:
    """Else 16 of 40 keys counted from 1 (4 shards, 8 partitions, then 4), or 15 of 16 shards began empty."""
    case.configure(lab, case.first)
    lab.feed([(key, 1) for key in KEYS])
    lab.feed([(key, 1) for key in KEYS])
    lab.run(lab.totals())
    case.configure(lab, case.then)
    lab.feed([(key, 1) for key in KEYS])
    (counted,) = lab.run(lab.totals())
    assert sorted((row["key"], row["n"]) for row in counted) == [(key, 3) for key in sorted(KEYS)]
    if case.durable:
        lab.lose_local_state()
        lab.feed([(key, 1) for key in KEYS])
        case.configure(lab, case.first)
        (counted,) = lab.run(lab.totals())
        assert {row["n"] for row in counted} == {4}
        assert lab.state() == dict.fromkeys(KEYS, (4, 4))


@pytest.mark.all
@pytest.mark.filterwarnings("ignore:this query's state is not durable")
@pytest.mark.parametrize(("first", "then"), [(2, 4), pytest.param(4, 2, marks=pytest.mark.all)])
def test_where_nothing_durable_tells_the_number_of_shards_it_must_be_set(lab: Lab, first: int, then: int) -> None:
    """No key counts from 1 meanwhile, and with the number that the error names the query goes on."""
    case = Case(first, then, None, durable=False)
    case.configure(lab, first)
    lab.feed([(key, 1) for key in KEYS])
    lab.run(lab.totals())
    case.configure(lab, then)
    lab.feed([(KEYS[0], 1)])
    expected = f"(?s)SchemaMismatchError.*set spark.holdfast.shards to {first}"
    with pytest.raises(StreamingQueryException, match=expected):
        lab.run(lab.totals())
    replace(case, shards=first).configure(lab, then)
    (counted,) = lab.run(lab.totals())
    assert [(row["key"], row["n"]) for row in counted] == [(KEYS[0], 2)]


def test_another_number_of_shards_than_stored_is_refused(lab: Lab) -> None:
    replace(GROWING, shards=3).configure(lab, 2)
    lab.feed([(key, 1) for key in KEYS])
    lab.run(lab.totals())
    replace(GROWING, shards=5).configure(lab, 2)
    lab.feed([(key, 1) for key in KEYS])
    with pytest.raises(StreamingQueryException, match=r"(?s)SchemaMismatchError.*stored=3 defined=5"):
        lab.run(lab.totals())


@pytest.mark.all
@pytest.mark.parametrize("case", [pytest.param(c, id=str(c)) for c in (Case(4, 2, None, durable=True),)])
def test_a_new_application_with_other_partitions_keeps_all_state(lab: Lab, case: Case) -> None:
    """Its run before had set a job group of its own, which Spark uses for its run id.

    The former application lives on, so its claims must have grown old before another one may begin.
    """
    case.configure(lab, case.first)
    lab.feed([(key, 1) for key in KEYS])
    lab.run(lab.totals(), group="nightly: a/b.c")
    lab.feed([(key, 1) for key in KEYS])
    age(claims(lab), ALIVE_MS)
    counted, _ = run_program(PROGRAM, lab.folder, str(case.then))
    assert json.loads(counted) == [[key, 2] for key in sorted(KEYS)]
    lab.feed([(key, 1) for key in KEYS])
    lab.run(lab.totals(), group="nightly")
    assert lab.state() == dict.fromkeys(KEYS, (3, 3))


@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
def test_far_more_partitions_than_slots_are_told_where_the_query_is_defined(lab: Lab) -> None:
    """The warning names the user's line, and comes once: what is stored has its number, and no choice any more."""
    lab.feed([("a", 1)])
    lab.spark.conf.set("spark.sql.shuffle.partitions", 17)
    with pytest.warns(UserWarning, match=r"17 shuffle partitions for 2 task slots") as told:
        lab.totals()
    # Spark 4.0 and 4.1 leave the socket of collect() open, and Python warns of that too.
    assert [w.filename for w in told if w.category is not ResourceWarning] == [lab_module.__file__]
    lab.configure({"shards": "2"})
    lab.spark.conf.set("spark.sql.shuffle.partitions", 2)
    lab.run(lab.totals())
    lab.spark.conf.unset("spark.holdfast.shards")
    lab.spark.conf.set("spark.sql.shuffle.partitions", 17)
    lab.totals()
