"""All engines by name, of this folder and of others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from holdfast.benches.instruments.measured import Places
from holdfast.benches.jobs.by_name import read_job
from holdfast.benches.jobs.job import Job
from holdfast.benches.nexmark import job as nexmark
from holdfast.benches.peers import engines as peers
from holdfast.benches.runs import engines
from holdfast.benches.runs.engines import Engine

ENGINES: Mapping[str, Engine] = engines.ENGINES | nexmark.ENGINES | peers.ENGINES


def engines_for(job: type[Job]) -> list[str]:
    return [name for name, engine in ENGINES.items() if issubclass(job, engine.runs)]


def measured(engine: str, job: Mapping[str, Any], disk: str, memory: str) -> dict[str, Any]:
    """Run an engine in this process, which `paired.run_engine` starts for it."""
    return asdict(ENGINES[engine].run(read_job(job), Places(Path(disk), Path(memory))))
