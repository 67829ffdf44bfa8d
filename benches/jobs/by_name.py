"""All jobs by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from holdfast.benches.jobs.by_key import ByProcessor, DropIn
from holdfast.benches.jobs.job import Job
from holdfast.benches.jobs.job_a import JobA
from holdfast.benches.jobs.job_b import JobB
from holdfast.benches.jobs.operators import Operators
from holdfast.benches.jobs.shard import Restore, Size, Snapshots
from holdfast.benches.jobs.sinks import Sinks
from holdfast.benches.nexmark.job import Nexmark
from holdfast.benches.peers.job import FromFiles

JOBS: dict[str, type[Job]] = {
    job.name: job
    for job in (JobA, JobB, DropIn, ByProcessor, Operators, Nexmark, FromFiles, Snapshots, Restore, Size, Sinks)
}


def read_job(stored: Mapping[str, Any]) -> Job:
    """Return the job that `Job.stored` wrote."""
    sizes = dict(stored)
    sizes.pop("transport", None)  # a field of old results
    return JOBS[sizes.pop("name")](**sizes)
