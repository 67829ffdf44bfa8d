"""The figure at the top of README: throughput by engine, drawn from the tables of RESULTS.md.

::

    benches/RESULTS.md ──"### job-a …"───▶ panel ┐
                       ──"### dropin …"──▶ panel ┴▶ docs/throughput.svg          make figure

Numbers stand in RESULTS.md alone, as ``holdfast bench report`` printed them. A new run replaces its table there; a test
fails until the picture is drawn again.

One SVG serves light and dark pages: it has no background, and colours of medium lightness.
"""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from holdfast.errors import InvalidArgumentError

RESULTS, PICTURE = Path("benches/RESULTS.md"), Path("docs/throughput.svg")
# Text has a contrast of 4.2 and more on white and on GitHub's dark background, bars of 3 and more.
_INK, _HOLDFAST, _OTHER = "#717a84", "#1f9e8f", "#8c959f"
_STYLE: dict[Any, Any] = {
    "font.sans-serif": ["DejaVu Sans", "Helvetica", "Arial", "sans-serif"],
    "svg.fonttype": "none",
    "svg.hashsalt": "holdfast",
    "text.color": _INK,
    "ytick.color": _INK,
}


@dataclass(frozen=True)
class Panel:
    """One half of the figure.

    Attributes
    ----------
    section : str
        Beginning of the heading in RESULTS.md.
    title : str
    bars : mapping of str to str
        Engine as RESULTS.md names it, to its label; top to bottom.
    """

    section: str
    title: str
    bars: Mapping[str, str]


PANELS = (
    Panel(
        "job-a, all backends",
        "Vectorised",
        {
            "holdfast-memory": "holdfast, memory",
            "holdfast-filesystem": "holdfast, filesystem",
            "holdfast-rocksdb": "holdfast, rocksdb",
            "spark-agg-rocksdb": "Spark, aggregation in SQL",
        },
    ),
    Panel(
        "dropin: applyInPandasWithState",
        "Pandas, key by key",
        {
            "pandas-memory": "holdfast, memory",
            "pandas-filesystem": "holdfast, filesystem",
            "pandas-rocksdb": "holdfast, rocksdb",
            "spark-pandas-rocksdb": "Spark, same function",
        },
    ),
)


def throughput(results: str, section: str) -> dict[str, int]:
    """Return the rows a second of each engine.

    Parameters
    ----------
    results : str
        The text of RESULTS.md.
    section : str
        Beginning of the heading below which the table stands.

    Raises
    ------
    InvalidArgumentError
        There is no such section, or no table of throughput in it.
    """
    _, heading, rest = results.partition(f"\n### {section}")
    table = re.search(r"^\*\*Throughput\*\*\n\n.*\n.*\n((?:\|.*\n)+)", rest.partition("\n### ")[0], re.MULTILINE)
    if not heading or table is None:
        raise InvalidArgumentError("no table of throughput", section=section)
    cells = [row.split("|")[1:3] for row in table[1].splitlines()]
    return {engine.strip(): int(rows.replace(",", "")) for engine, rows in cells}


def draw(results: str) -> str:
    """Return the figure of RESULTS.md's text as SVG; equal tables give equal bytes."""
    with rc_context(_STYLE):
        figure = Figure(figsize=(9.6, 2.2), layout="constrained")
        for panel, axes in zip(PANELS, figure.subplots(1, len(PANELS)), strict=True):
            _draw_panel(axes, panel, throughput(results, panel.section))
        svg = io.StringIO()
        # Neither date nor version: they would make each drawing another one.
        figure.savefig(svg, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return "".join(f"{line.rstrip()}\n" for line in svg.getvalue().splitlines())


def _draw_panel(axes: Axes, panel: Panel, rows_per_second: Mapping[str, int]) -> None:
    missing = panel.bars.keys() - rows_per_second.keys()
    if missing:
        raise InvalidArgumentError("engines without throughput", section=panel.section, missing=sorted(missing))
    heights = [rows_per_second[engine] for engine in panel.bars]
    slowest = heights[-1]
    colours = [_HOLDFAST if label.startswith("holdfast") else _OTHER for label in panel.bars.values()]
    bars = axes.barh(list(panel.bars.values()), heights, color=colours, height=0.62)
    shown = [
        f"{rows:,}" if rows == slowest else f"{rows:,}  ({rows / slowest:.1f}\N{MULTIPLICATION SIGN})"
        for rows in heights
    ]
    axes.bar_label(bars, shown, padding=4)
    axes.set_title(f"{panel.title}, rows/s", loc="left", fontsize=11, fontweight="bold")
    axes.invert_yaxis()
    axes.set_xlim(0, max(heights) * 1.75)
    axes.xaxis.set_visible(False)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


if __name__ == "__main__":
    PICTURE.write_text(draw(RESULTS.read_text()))
    sys.stdout.write(f"{PICTURE}\n")
