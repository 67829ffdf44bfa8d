"""What a run is to do: the measurements that were asked for, and those that this machine has no room for."""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import psutil

from holdfast.benches.suites import own_load
from holdfast.benches.suites.measurement import Measurement, Profile
from holdfast.benches.suites.suites import SUITES
from holdfast.errors import InvalidArgumentError


@dataclass(frozen=True)
class Room:
    """What a machine has to spare, on the disk to measure with."""

    memory_gb: float
    disk_gb: float

    @classmethod
    def here(cls, disk: str | None) -> Room:
        """Return what this machine has to spare now."""
        free = psutil.disk_usage(disk or tempfile.gettempdir()).free
        return cls(psutil.virtual_memory().available / 2**30, free / 2**30)

    def lacks(self, measurement: Measurement) -> str:
        """Return in words what a measurement needs and the machine does not have; empty if nothing."""
        needs = (("memory", measurement.memory_gb, self.memory_gb), ("disk", measurement.disk_gb, self.disk_gb))
        return "; ".join(
            f"needs {needed:.1f} GiB of {what}, and {there:.1f} are free"
            for what, needed, there in needs
            if needed > there
        )


def measurements_of(profile: Profile, suites: Collection[str] = (), turns: int | None = None) -> list[Measurement]:
    """Return the measurements of some suites; by default of all, in a quick run of the user's own load alone.

    Each has so many `turns`; by default as many as its suite says.
    """
    unknown = [name for name in suites if name not in SUITES]
    if unknown:
        raise InvalidArgumentError("no such suite; choose one of these", given=unknown[0], suites=" ".join(SUITES))
    chosen = suites or ([own_load.SUITE] if profile.quick else SUITES)
    found = [one for name in SUITES if name in chosen for one in SUITES[name](profile)]
    if not found:
        remedy = "have nothing that is quick; leave --quick out" if profile.quick else "are quick alone; add --quick"
        raise InvalidArgumentError(f"these suites {remedy}", suites=" ".join(chosen))
    return [one if turns is None else _in_turns(one, turns) for one in found]


def _in_turns(one: Measurement, turns: int) -> Measurement:
    # pytest-benchmark has rounds in place of turns.
    return one if one.micro else replace(one, repeats=turns, minutes=one.minutes * turns / one.repeats)


def with_room(
    measurements: Sequence[Measurement], room: Room
) -> tuple[list[Measurement], list[tuple[Measurement, str]]]:
    """Return the measurements that the machine has room for, and the others with what they lack."""
    lacking = [(one, room.lacks(one)) for one in measurements]
    fit = [one for one, lack in lacking if not lack]
    if not fit:
        raise InvalidArgumentError(
            f"this machine has no room for any of the measurements: the first {lacking[0][1]}; free some, or choose "
            "another disk by --disk",
            measurement=f"{measurements[0].suite}/{measurements[0].name}",
        )
    return fit, [(one, lack) for one, lack in lacking if lack]
