"""What RocksDB's options cost for our rows: ``python -m holdfast.benches.rocksdb_options [TABLE ...]``.

Each variant runs in a process of its own, the variants take turns, and a table shows medians. Wall time suffers from
whatever else the machine does, so CPU time decides: of the calling thread, or of all threads where a column says so.
What misses the block cache is read from the page cache. The decisions are in docs/decisions/0009-rocksdb.md.
"""

from __future__ import annotations

import multiprocessing
import shutil
import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
import numpy as np

from holdfast.benches.rocksdb_measures import (
    Figures,
    commits,
    density,
    life,
    load,
    read_and_write,
    reads,
    shards,
)
from holdfast.benches.rocksdb_workload import Bench, Tuning


@dataclass(frozen=True)
class Size:
    """How much is measured."""

    keys: int
    batch: int
    commits: int
    value_bytes: int
    cache_mib: int


Variant = tuple[Tuning, Mapping[str, Any]]


def _tunings(*changes: Mapping[str, Any]) -> dict[str, Variant]:
    """Return the defaults, and each of these changes of them."""
    named = {", ".join(f"{k} {v}" for k, v in change.items()) or "chosen": change for change in ({}, *changes)}
    return {name: (replace(Tuning(), **change), {}) for name, change in named.items()}


CHOSEN = _tunings()
TABLES: Mapping[str, tuple[Callable[..., Figures], Mapping[str, Variant]]] = {
    "bloom": (read_and_write, _tunings({"bloom_bits": 0}, {"bloom_bits": 16}, {"filters_for_hits": True})),
    "compression": (
        read_and_write,
        _tunings({"bottom": "zstd"}, {"compression": "none"}, {"compression": "none", "bottom": "none"}),
    ),
    "blocks": (read_and_write, _tunings(*({"block_kib": k} for k in (8, 16, 32)))),
    "block format": (
        read_and_write,
        _tunings(
            {"format_version": 5},
            {"restart_interval": 4},
            {"hash_index": True},
            {"checksum": "crc32c"},
            {"hyper_clock": True},
            {"index_in_cache": False},
            {"open_files": 16},
        ),
    ),
    "commits": (
        commits,
        _tunings(
            {"style": "universal"},
            {"dynamic_levels": False},
            {"background_jobs": 1},
            {"level_base_mib": 64},
            {"level0_trigger": 2},
            {"level0_trigger": 4},
            {"level0_slowdown": 1000},
            {"write_buffer_mib": 4},
            {"write_buffer_mib": 4, "write_buffer_number": 4},
            {"write_buffer_mib": 48, "write_buffer_ratio": 0.8},
            {"write_buffer_number": 4},
            {"rate_mib": 32},
        ),
    ),
    "density": (density, CHOSEN),
    "reads": (reads, CHOSEN),
    "load": (
        load,
        {
            f"{how}, {batch} a time": (Tuning(), {"how": how, "batch": batch})
            for how, batch in (
                ("sorted", 5000),
                ("sorted", 50_000),
                ("sorted", 300_000),
                ("unsorted", 50_000),
                ("ingest", 300_000),
            )
        },
    ),
    "shards": (
        shards,
        {
            f"{count} of {mib} MiB{', flush' if flush else ''}": (
                Tuning(write_buffer_mib=mib),
                {"count": count, "flush": flush},
            )
            for count, mib, flush in ((1, 16, False), (8, 16, False), (8, 3, False), (8, 16, True))
        },
    ),
    "life": (life, CHOSEN),
}


def _measure(table: str, name: str, size: Size, directory: str, seed: int) -> Figures:
    """Run one variant; called in a process of its own."""
    work, variants = TABLES[table]
    tuning, arguments = variants[name]
    tuning = replace(tuning, cache_mib=size.cache_mib)
    folder = Path(tempfile.mkdtemp(dir=directory))
    try:
        chance = np.random.default_rng(seed)
        bench = Bench(tuning, size.keys, size.batch, size.value_bytes, size.commits, folder / "database", chance)
        found = work(bench, **arguments)
        bench.database.close()
        return found
    finally:
        shutil.rmtree(folder)


def _print(table: str, found: Mapping[str, list[Figures]]) -> None:
    columns = next(iter(found.values()))[0]
    click.echo(f"\n| {table} | {' | '.join(columns)} |\n|{'---|' * (len(columns) + 1)}")
    for name, runs in found.items():
        medians = (float(np.median([run[column] for run in runs])) for column in columns)
        click.echo(f"| {name} | {' | '.join(f'{median:.3g}' for median in medians)} |")


@click.command(context_settings={"show_default": True})
@click.argument("tables", nargs=-1, type=click.Choice(list(TABLES)))
@click.option("--keys", default=2_000_000)
@click.option("--batch", default=10_000, help="keys that a commit touches")
@click.option("--commits", default=60)
@click.option("--value-bytes", default=100)
@click.option("--repeats", default=3, help="runs of each variant, in turns")
@click.option("--cache-mib", default=128)
@click.option("--directory", default=tempfile.gettempdir(), type=click.Path(exists=True, file_okay=False))
def main(tables: tuple[str, ...], repeats: int, directory: str, **size: int) -> None:
    """Print TABLES (all without one): microseconds a key where no other unit stands."""
    for table in tables or TABLES:
        found: dict[str, list[Figures]] = {name: [] for name in TABLES[table][1]}
        for seed in range(repeats):
            for name in list(found) if seed % 2 == 0 else reversed(found):
                with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
                    found[name].append(pool.submit(_measure, table, name, Size(**size), directory, seed).result())
        _print(table, found)


if __name__ == "__main__":
    main()
