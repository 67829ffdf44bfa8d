"""The pictures of docs/ui.md, taken of the demo's state.

::

    holdfast demo --keep --work-dir /tmp/flights --backend filesystem --batches 16 --no-kill \\
        --conf spark.sql.shuffle.partitions=24 --conf spark.holdfast.commit.carriedBytes=0 \\
        --conf spark.holdfast.snapshot.maxCommits=4
    python -m tests.unit.holdfast.ui.screenshots /tmp/flights docs/ui
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.browser import PHONE, chromium, shown
from tests.unit.holdfast.ui.serving import served

OPERATOR = "0/flight_totals/"
#: By name: the view, its width and height in pixels, and the scheme.
PICTURES = {
    "overview": ("", 1120, 580, "light"),
    "operator": (f"{OPERATOR}?measure=written", 1120, 1120, "light"),
    "rows": (f"{OPERATOR}rows?key.kind=carrier&key.name=UA", 1120, 900, "light"),
    "phone": (OPERATOR, PHONE, 760, "dark"),
}


def take(flights: Path, to: Path) -> None:
    """Take all pictures of the demo in a work directory."""
    to.mkdir(parents=True, exist_ok=True)
    with served(flights / "state", flights / "query") as address, chromium() as browser:
        for name, (view, width, height, scheme) in PICTURES.items():
            with shown(browser, address + view, width, scheme) as it:
                it.page.set_viewport_size({"width": width, "height": height})
                it.page.screenshot(path=to / f"{name}.png")


if __name__ == "__main__":
    take(Path(sys.argv[1]), Path(sys.argv[2]))
