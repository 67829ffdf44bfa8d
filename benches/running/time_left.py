"""How long the rest of a plan takes: what its author expected, corrected by what has been measured so far."""

from __future__ import annotations

from collections.abc import Iterable

from holdfast.benches.running.carrying_out import Step

# The correction begins at 1 and is believed once so much has been measured.
_BELIEVED_S = 60.0


class TimeLeft:
    """See the module.

    Parameters
    ----------
    steps : iterable of Step
        All that are to do.
    """

    def __init__(self, steps: Iterable[Step]) -> None:
        self._to_do = list(steps)
        self._done: list[tuple[Step, float]] = []

    def add(self, step: Step, seconds: float) -> None:
        """Note what a run took, of this command or of an earlier one."""
        self.leave_out(step)
        self._done.append((step, seconds))

    def leave_out(self, step: Step) -> None:
        """Expect a run no more."""
        self._to_do = [other for other in self._to_do if other.key != step.key]

    def expected_s(self, step: Step) -> float:
        """Return how long a run takes: as long as that of the same entry did, if there was one."""
        same = [s for one, s in self._done if one.measurement is step.measurement and one.label == step.label]
        return sum(same) / len(same) if same else step.expected_s * self._correction

    @property
    def _correction(self) -> float:
        expected = sum(step.expected_s for step, _ in self._done)
        measured = sum(seconds for _, seconds in self._done)
        return (measured + _BELIEVED_S) / (expected + _BELIEVED_S)

    def left_s(self, suite: str | None = None, running_s: float = 0.0) -> float:
        """Return the seconds that are left, of all suites or of one.

        Parameters
        ----------
        running_s : float
            How long the first run that is to do has been running.
        """
        left = 0.0
        for i, step in enumerate(self._to_do):
            if suite in (None, step.measurement.suite):
                left += max(0.0, self.expected_s(step) - (running_s if i == 0 else 0.0))
        return left
