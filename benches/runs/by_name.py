"""All engines by name, wherever they are."""

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
    """Return the names of the engines that run jobs of a kind."""
    return [name for name, engine in ENGINES.items() if issubclass(job, engine.runs)]


def measured(engine: str, job: Mapping[str, Any], disk: str, memory: str) -> dict[str, Any]:
    """Run an engine in this process, which does nothing else; `paired.run_engine` calls it in a fresh one."""
    return asdict(ENGINES[engine].run(read_job(job), Places(Path(disk), Path(memory))))
