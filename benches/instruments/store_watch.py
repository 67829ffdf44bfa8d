"""What a run without Spark uses, from its first counted micro-batch to its last one."""

from __future__ import annotations

from collections.abc import Mapping

from holdfast.benches.instruments.measured import Measured
from holdfast.benches.instruments.processes import Processes, since, store_kind


class StoreWatch:
    """Looks at this process, those below it and the size of the local state, whenever it is told to."""

    def __init__(self) -> None:
        self._processes = Processes(store_kind)
        self._sizes: list[int] = []
        self.count_from_here()

    def count_from_here(self) -> None:
        """Forget what was used before; what memory was held still counts."""
        self._processes.look()
        self._before = self._processes.seconds(), self._processes.written()

    def look(self, local_bytes: int) -> None:
        """Note what is used now, and how large the local state is."""
        self._processes.look()
        self._sizes.append(local_bytes)

    def measured(
        self, phases_ms: list[dict[str, float]], batch_ms: list[float], settings: Mapping[str, str], **storage: float
    ) -> Measured:
        """Return what was measured until now; there was a look at least."""
        self._processes.look()
        return Measured(
            batch_ms=batch_ms,
            phases_ms=phases_ms,
            cpu=since(self._before[0], self._processes.seconds()),
            memory=self._processes.peak(),
            written=since(self._before[1], self._processes.written()),
            settings=dict(settings),
            state_bytes={
                "live_arrow": None,
                "local_final": self._sizes[-1],
                "local_peak": max(self._sizes),
                "ratio": None,
                "after_batch": self._sizes,
            },
            storage=storage,
        )
