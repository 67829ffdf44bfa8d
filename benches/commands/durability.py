"""Durability: commits, requests, snapshots, uploads and restore."""

from __future__ import annotations

from typing import Any

import click

from holdfast.benches.commands.single import compare, compare_with_change, engines_option, options_of
from holdfast.benches.jobs.job import SparkJob
from holdfast.benches.jobs.job_a import JobA
from holdfast.benches.jobs.job_b import JobB
from holdfast.benches.jobs.requests import DurableA, DurableB, DurableJob, Requests, server_of_environment
from holdfast.benches.jobs.store.commits import Commits
from holdfast.benches.jobs.store.savepoints import Savepoints
from holdfast.benches.jobs.store.sinks import Sinks
from holdfast.benches.jobs.store.snapshots import Restore, Size, Snapshots
from holdfast.benches.report.results import WITH_SNAPSHOTS, WITHOUT
from holdfast.benches.runs.by_name import engines_for


@click.command("stalls")
@engines_option(Commits, "store-memory,store-filesystem,store-rocksdb")
@options_of(Commits(), repeats=1)
def stalls(engines: str, **options: Any) -> None:
    """Commits to the store alone, one after another: how long merges and compaction hold one back."""
    compare("stalls", Commits(), engines, options)


@click.command("requests")
@engines_option(Requests, "holdfast-memory-s3")
@options_of(Requests(), repeats=1)
def requests(engines: str, **options: Any) -> None:
    """What small micro-batches of many shards ask of an S3 server: one of its own, or one that `make s3` started."""
    server_of_environment()
    compare("requests", Requests(), engines, options)


@click.command("snapshots")
@engines_option(Snapshots, "store-rocksdb,store-memory")
@options_of(Snapshots(), repeats=1)
def snapshots(engines: str, **options: Any) -> None:
    """Bytes that a snapshot sends when few keys have changed, by those of a full one."""
    compare("snapshots", Snapshots(), engines, options)


@click.command("restore")
@engines_option(Restore, "store-rocksdb,store-filesystem,store-memory")
@options_of(Restore(), repeats=1, without="keys")
def restore(engines: str, **options: Any) -> None:
    """State that is in the storage only, against a plain download; S3: --serves true --state-dir s3://bucket/bench."""
    compare("restore", Restore(), engines, options)


def _uploads(name: str, job: SparkJob) -> click.Command:
    @click.command(name)
    @click.option("--engine", type=click.Choice(engines_for(type(job))), default="holdfast-rocksdb")
    @options_of(job)
    def uploads(engine: str, **options: Any) -> None:
        """A job with snapshots that are uploaded while it runs, and without."""
        compare_with_change(name, job, engine, options, (WITH_SNAPSHOTS, WITHOUT), SparkJob.without_snapshots)

    return uploads


uploads_a = _uploads("uploads-a", JobA(batches=24, warmup=4, snapshot_commits=5))
uploads_b = _uploads("uploads-b", JobB(batches=24, warmup=4, snapshot_commits=5))


def _waiting(name: str, job: DurableJob) -> click.Command:
    @click.command(name)
    @engines_option(type(job), "holdfast-memory-s3,holdfast-memory")
    @options_of(job, repeats=1)
    def waiting(engines: str, **options: Any) -> None:
        """A job whose commits wait for S3 at any distance, against local disk: --latency-ms 20 --profile."""
        server_of_environment()
        compare(name, job, engines, options)

    return waiting


waiting_a = _waiting("waiting-a", DurableA())
waiting_b = _waiting("waiting-b", DurableB())


@click.command("savepoints")
@engines_option(Savepoints, "store-memory")
@options_of(Savepoints(), repeats=1, without="keys")
def savepoints(engines: str, **options: Any) -> None:
    """Savepoints in Spark, against a plain copy; S3: --serves true --state-dir s3://bucket/bench."""
    compare("savepoints", Savepoints(), engines, options)


@click.command("sinks")
@engines_option(Sinks, "store-memory")
@options_of(Sinks(), repeats=1, without="keys")
def sinks(engines: str, **options: Any) -> None:
    """Micro-batches into each sink, against the fastest plain way: --postgres 'host=… dbname=…' --kafka … --topic …."""
    compare("sinks", Sinks(), engines, options)


@click.command("size")
@engines_option(Size, "store-memory,store-filesystem,store-rocksdb")
@options_of(Size(), repeats=1)
def size(engines: str, **options: Any) -> None:
    """Micro-batches on one shard of --keys by the store alone, then a snapshot and a restore."""
    compare("size", Size(), engines, options)


COMMANDS = (stalls, requests, waiting_a, waiting_b, snapshots, restore, savepoints, sinks, size, uploads_a, uploads_b)
