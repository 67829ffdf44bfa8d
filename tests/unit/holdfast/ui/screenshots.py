"""The pictures of docs/ui.md, taken of the demo's state; and of each page of a query in each state, to look at.

::

    holdfast demo --keep --work-dir /tmp/flights --backend filesystem --batches 16 --no-kill \\
        --conf spark.sql.shuffle.partitions=24 --conf spark.holdfast.commit.carriedBytes=0 \\
        --conf spark.holdfast.snapshot.maxCommits=4
    python -m tests.unit.holdfast.ui.screenshots /tmp/flights docs/ui
    python -m tests.unit.holdfast.ui.screenshots /tmp/states
    cp /tmp/states/failing-overview-1120.png docs/ui/failing.png
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from tests.browser import PHONE, chromium, shown
from tests.unit.holdfast.health import in_four_states
from tests.unit.holdfast.ui.places import served

OPERATOR = "0/flight_totals/"
#: By name: the view, its width and height in pixels, and the scheme.
PICTURES = {
    "overview": ("", 1120, 850, "light"),
    "operator": (f"{OPERATOR}?measure=written", 1120, 1440, "light"),
    "rows": (f"{OPERATOR}rows?key.kind=carrier&key.name=UA", 1120, 960, "light"),
    "phone": (OPERATOR, PHONE, 1080, "dark"),
}


def take(flights: Path, to: Path) -> None:
    """Take all pictures of the demo in a work directory."""
    to.mkdir(parents=True, exist_ok=True)
    with served(flights / "state", flights / "query") as address, chromium() as browser:
        for name, (view, width, height, scheme) in PICTURES.items():
            with shown(browser, address + view, width, scheme) as it:
                it.page.set_viewport_size({"width": width, "height": height})
                it.page.screenshot(path=to / f"{name}.png")


def take_states(to: Path) -> None:
    """Take each page of a query in each state, on a desktop and a phone."""
    to.mkdir(parents=True, exist_ok=True)
    views = {"overview": "", "operator": "0/totals/", "shard": "0/totals/shard/2", "rows": "0/totals/rows"}
    with tempfile.TemporaryDirectory() as folder, chromium() as browser:
        for state in in_four_states.STATES:
            with served(in_four_states.make(Path(folder) / state, state, 24)) as address:
                for name, view in views.items():
                    for width, scheme in ((1120, "light"), (PHONE, "dark")):
                        with shown(browser, address + view, width, scheme) as it:
                            it.page.set_viewport_size({"width": width, "height": 540 if width > PHONE else 760})
                            it.page.screenshot(path=to / f"{state}-{name}-{width}.png")


if __name__ == "__main__":
    if len(sys.argv) > 2:
        take(Path(sys.argv[1]), Path(sys.argv[2]))
    else:
        take_states(Path(sys.argv[1]))
