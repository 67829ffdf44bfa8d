"""Where a run of an engine may write, and what it yields."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Places:
    """Where a run may write.

    Attributes
    ----------
    disk : pathlib.Path
        Checkpoints, local state on disk, and Spark's own local files.
    memory : pathlib.Path
        Local state in RAM where the machine has room for it.
    profile : pathlib.Path or None
        Where workers leave their spans; None does not profile.
    """

    disk: Path
    memory: Path
    profile: Path | None = None

    @property
    def checkpoint(self) -> Path:
        """The query's checkpoint location."""
        return self.disk / "checkpoint"


@dataclass(frozen=True)
class Measured:
    """What one run yields; JSON values.

    Attributes
    ----------
    batch_ms : list of float
        Every micro-batch, those that fill the state and warm-up included.
    phases_ms : list of dict
        Of each micro-batch, its parts: for a query, those of Spark's progress.
    cpu : dict
        Over the counted micro-batches: seconds by kind of process, and of the wall.
    memory : dict
        Over the whole run, by kind of process: the largest ``rss``, ``pss`` and ``anonymous`` bytes.
    written : dict
        Over the counted micro-batches: bytes written to disk by kind of process, and ``durable``: by how much that
        grew from which the state is restored.
    settings : dict
        All settings of the run.
    state_bytes : dict
        ``local_peak``, ``local_final`` and the sizes after each micro-batch; ``live_arrow`` and ``ratio``, which may
        be None.
    storage : dict
        Over the counted micro-batches, where it is counted: requests to the durable storage by kind, bytes each way,
        and files of Spark's own checkpoint.
    start_ms : float or None
        From the start of the engine's own process to the moment at which it begins to read, where that was measured; in
        no micro-batch.
    equality : dict
        What of this run's own result was compared with what is right, how many rows, and that they were equal; empty
        where nothing was.
    """

    batch_ms: list[float]
    phases_ms: list[dict[str, float]]
    cpu: dict[str, float]
    memory: dict[str, dict[str, int]]
    written: dict[str, float]
    settings: dict[str, str]
    state_bytes: dict[str, Any]
    storage: dict[str, float] = field(default_factory=dict)
    start_ms: float | None = None
    equality: dict[str, Any] = field(default_factory=dict)
