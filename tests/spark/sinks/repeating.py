"""Lets Spark run a micro-batch again that it has ended."""

from __future__ import annotations

from pathlib import Path


def forget_the_last_end(query: Path) -> None:
    """Let Spark repeat a query's last micro-batch, as after a crash just before it noted its end."""
    commits = query / "commits"
    last = max((path for path in commits.iterdir() if path.name.isdigit()), key=lambda path: int(path.name))
    for path in (last, commits / f".{last.name}.crc"):
        path.unlink(missing_ok=True)
