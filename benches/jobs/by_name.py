"""All jobs by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from holdfast.benches.jobs.by_key import DropIn, Timers
from holdfast.benches.jobs.by_processor import ByProcessor
from holdfast.benches.jobs.job import Job
from holdfast.benches.jobs.job_a import JobA, JobAOnCluster
from holdfast.benches.jobs.job_b import JobB
from holdfast.benches.jobs.requests import DurableA, DurableB, Requests
from holdfast.benches.jobs.sessions import Sessions
from holdfast.benches.jobs.store.commits import Commits
from holdfast.benches.jobs.store.savepoints import Savepoints
from holdfast.benches.jobs.store.sinks import Sinks
from holdfast.benches.jobs.store.snapshots import Restore, Size, Snapshots
from holdfast.benches.jobs.ttl import Ttl
from holdfast.benches.nexmark.job import Nexmark
from holdfast.benches.peers.job import FromFiles

JOBS: dict[str, type[Job]] = {
    job.name: job
    for job in (
        *(JobA, JobAOnCluster, JobB, DropIn, ByProcessor, Timers, Sessions, Ttl, Nexmark, FromFiles),
        *(Requests, DurableA, DurableB),
        *(Commits, Snapshots, Restore, Size, Savepoints, Sinks),
    )
}


def read_job(stored: Mapping[str, Any]) -> Job:
    """Return the job that `Job.stored` wrote."""
    sizes = dict(stored)
    return JOBS[sizes.pop("name")](**sizes)
