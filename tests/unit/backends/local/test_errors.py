"""What the operating system says of local files, told as what to do about it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

MAPPED_UNDER_A_LIMIT = """
import resource, sys
from pathlib import Path
import pyarrow as pa
from holdfast.backends.local.errors import reading
from holdfast.errors import UnavailableError

path = Path(sys.argv[1])
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), used + (64 << 20)))
try:
    with reading(path):
        pa.memory_map(str(path))
except UnavailableError as exc:
    print(exc)
"""


def test_a_limit_on_a_worker_s_memory_is_named_when_state_cannot_be_mapped(tmp_path: Path) -> None:
    """Spark limits the address space of workers, where mapped state counts: "cannot allocate memory" tells no one."""
    path = tmp_path / "run.arrow"
    with path.open("wb") as file:
        file.truncate(1 << 30)
    done = subprocess.run(
        [sys.executable, "-c", MAPPED_UNDER_A_LIMIT, path], capture_output=True, text=True, check=True
    )
    assert f"local state at {path} cannot be mapped into memory: unset spark.executor.pyspark.memory" in done.stdout
    assert "limit_bytes=" in done.stdout
