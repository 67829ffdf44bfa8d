"""Nexmark's events, each computed from its number in Spark columns.

::

    number % 50    0         1 2 3      4 … 49
                   person    auction    bid          1 : 3 : 46

    ids     people and auctions are numbered consecutively from 1000
    hot     every second bid is for the newest auction whose number is a multiple of 100; three of four bids come from
            the person after the newest multiple of 100, three of four auctions from the person at it
    others  one of the last 1,000 people or 100 auctions, or one of the next ten, which arrive a little later
    time    a fixed number of events per second; groups of events are shuffled by a fixed permutation

So the events do not depend on the Spark session, on stream or batch, or on the size of micro-batches.

Sources: Tucker, Tufte, Papadimos, Maier, "NEXMark - A Benchmark for Queries over Data Streams", OGI 2002, for people,
auctions and bids; proportions, ids, prices and order in time are the defaults of the generators of Apache Beam
(``org.apache.beam.sdk.nexmark``) and of Flink's nexmark (github.com/nexmark/nexmark). Hashes of the numbers replace
their random generators; columns that no query reads, and the padding of events to 100, 200 and 500 bytes, are left out.
"""

from __future__ import annotations

from dataclasses import dataclass

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from holdfast.benches.jobs.job import FIRST_SECOND
from holdfast.errors import InvalidArgumentError

PERSON, AUCTION, BID = 0, 1, 2
PEOPLE, AUCTIONS, CYCLE = 1, 3, 50
FIRST_ID, FIRST_CATEGORY, CATEGORIES = 1000, 10, 5
LEAD, HOT = 10, 100
#: The delay of the watermark, as in the tables of Flink's nexmark.
WATERMARK_S = 4
_FIRST_NAMES = ("Peter", "Paul", "Luke", "John", "Saul", "Vicky", "Kate", "Julie", "Sarah", "Deiter", "Walter")
_LAST_NAMES = ("Shultz", "Abrams", "Spencer", "White", "Bartels", "Walton", "Smith", "Jones", "Noris")
_CHANNELS = ("Google", "Facebook", "Baidu", "Apple")
_STEP = 953  # a prime, so that its multiples visit every position of a group unless they divide it


@dataclass(frozen=True)
class Mix:
    """The generators' parameters.

    The newest `people` bid and sell, and the newest `auctions` get bids. An event happens at most `disorder_ms` earlier
    than the events before it.
    """

    per_second: int
    people: int
    auctions: int
    disorder_ms: int
    seed: int

    def __post_init__(self) -> None:
        if not 1 <= self.per_second <= 1_000_000:
            problem = "each event needs its own microsecond: --per-second must be between 1 and 1,000,000"
            raise InvalidArgumentError(problem, per_second=self.per_second)
        if self.disorder_ms >= (delay_ms := WATERMARK_S * 1000):
            problem = "events would be late and dropped: choose --disorder-ms below the watermark's delay"
            raise InvalidArgumentError(problem, disorder_ms=self.disorder_ms, delay_ms=delay_ms)
        if self.group % _STEP == 0:
            problem = "events cannot be shuffled in groups of this size; change --per-second or --disorder-ms"
            raise InvalidArgumentError(problem, events=self.group)

    @property
    def group(self) -> int:
        """The number of consecutive events that are shuffled together."""
        return max(1, self.per_second * self.disorder_ms // 1000)

    @property
    def longest_ms(self) -> int:
        """The longest time that an auction is open; the average is the time in which `auctions` others open."""
        return 1 + max(1, 2 * (self.auctions * CYCLE * 1000 // AUCTIONS // self.per_second))

    @property
    def reach_ms(self) -> int:
        """The longest time between a bid and the opening of its auction."""
        auctions = max(self.auctions, HOT) + 2 * AUCTIONS
        return 1 + auctions * CYCLE * 1000 // AUCTIONS // self.per_second + 2 * self.disorder_ms


def events(numbers: DataFrame, mix: Mix, *others: str) -> DataFrame:
    """Return the events of a streaming or batch frame of numbers, and the `others` of its columns.

    Each has a ``kind``, its event time ``at``, its arrival time ``arrived`` if events arrive evenly, and columns that
    are null for other kinds: ``person``, ``name``; ``auction``, ``seller``, ``category``, ``expires``; ``auction``,
    ``bidder``, ``price``, ``channel``, ``url``.
    """
    number, place = F.col("number"), F.col("number") % CYCLE
    kind = F.when(place < PEOPLE, PERSON).when(place < PEOPLE + AUCTIONS, AUCTION).otherwise(BID)
    shuffled = F.expr(f"number - number % {mix.group} + number * {_STEP} % {mix.group}")
    counted = numbers.select(
        "*",
        kind.alias("kind"),
        _time(shuffled, mix).alias("at"),
        _time(number, mix).alias("arrived"),
        # The newest person and auction, counted from 0.
        F.expr(f"number div {CYCLE}").alias("last_person"),
        (F.expr(f"number div {CYCLE}") * AUCTIONS + F.least(place, F.lit(AUCTIONS)) - 1).alias("last_auction"),
    )
    is_person, is_auction, is_bid = (F.col("kind") == one for one in (PERSON, AUCTION, BID))
    chance = _Chance(mix.seed)
    length_ms = 1 + chance.below(mix.longest_ms - 1, "length")
    named = F.concat_ws(" ", chance.one_of(_FIRST_NAMES, "first name"), chance.one_of(_LAST_NAMES, "last name"))
    channel = F.when(chance.of("hot channel") < 0.5, chance.one_of(_CHANNELS, "channel")).otherwise(
        F.concat(F.lit("channel-"), chance.below(10_000, "channel"))
    )
    url = F.concat(F.lit("https://www.nexmark.com/"), F.hex(chance.below(1 << 40, "url")), F.lit("/item.htm?query=1"))
    return counted.select(
        *others,
        "kind",
        "at",
        "arrived",
        F.when(is_person, F.col("last_person") + FIRST_ID).alias("person"),
        F.when(is_person, named).alias("name"),
        F.when(is_auction, F.col("last_auction") + FIRST_ID)
        .when(is_bid, _auction_of_bid(mix, chance) + FIRST_ID)
        .alias("auction"),
        F.when(is_auction, _person(mix, chance, "seller", 0) + FIRST_ID).alias("seller"),
        F.when(is_auction, FIRST_CATEGORY + chance.below(CATEGORIES, "category")).alias("category"),
        F.when(is_auction, F.timestamp_micros(F.unix_micros("at") + length_ms * 1000)).alias("expires"),
        F.when(is_bid, _person(mix, chance, "bidder", 1) + FIRST_ID).alias("bidder"),
        F.when(is_bid, F.round(F.pow(F.lit(10.0), chance.of("price") * 6) * 100).cast("long")).alias("price"),
        F.when(is_bid, channel).alias("channel"),
        F.when(is_bid, url).alias("url"),
    )


class _Chance:
    """Pseudo-random numbers that depend on the event's number, a seed and their purpose."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def of(self, what: str) -> Column:
        """Return a number in [0, 1)."""
        bits = 53  # the mantissa of a double
        hashed = F.xxhash64("number", F.lit(self._seed), F.lit(what))
        return hashed.bitwiseAND((1 << bits) - 1) / float(1 << bits)

    def below(self, end: int | Column, what: str) -> Column:
        """Return an integer in [0, end)."""
        return F.floor(self.of(what) * end)

    def one_of(self, texts: tuple[str, ...], what: str) -> Column:
        return F.element_at(F.array(*map(F.lit, texts)), (self.below(len(texts), what) + 1).cast("int"))


def _time(number: Column, mix: Mix) -> Column:
    return F.timestamp_micros(FIRST_SECOND * 1_000_000 + F.floor(number * 1_000_000 / mix.per_second))


def _auction_of_bid(mix: Mix, chance: _Chance) -> Column:
    last = F.col("last_auction")
    first = F.greatest(last - mix.auctions, F.lit(0))
    any_of = first + chance.below(last - first + 1 + LEAD, "auction")
    return F.when(chance.of("hot auction") < 0.5, last - last % HOT).otherwise(any_of)


def _person(mix: Mix, chance: _Chance, what: str, hot: int) -> Column:
    last = F.col("last_person")
    active = F.least(last + 1, F.lit(mix.people))
    any_of = last + 1 - active + chance.below(active + LEAD, what)
    return F.when(chance.of(f"hot {what}") < 0.75, last - last % HOT + hot).otherwise(any_of)


def of_kind(frame: DataFrame, *kinds: int) -> DataFrame:
    return frame.where(F.col("kind").isin(*kinds))


@dataclass(frozen=True)
class House:
    """The input of a query."""

    events: DataFrame
    mix: Mix

    def of(self, *kinds: int, time: str = "at") -> DataFrame:
        """Return the events of some kinds, with a watermark that drops none."""
        return of_kind(self.events, *kinds).withWatermark(time, f"{WATERMARK_S} seconds")
