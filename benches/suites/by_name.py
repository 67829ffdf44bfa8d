"""All suites by name: a new one is a module with a function `measurements`, and a line here."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from holdfast.benches.suites import durability, growth, jobs, micro, nexmark, own_load, peers
from holdfast.benches.suites.measurement import Measurement, Profile

OWN_LOAD = "own-load"
SUITES: Mapping[str, Callable[[Profile], list[Measurement]]] = {
    OWN_LOAD: own_load.measurements,
    "jobs": jobs.measurements,
    "micro": micro.measurements,
    "durability": durability.measurements,
    "growth": growth.measurements,
    "nexmark": nexmark.measurements,
    "peers": peers.measurements,
}
