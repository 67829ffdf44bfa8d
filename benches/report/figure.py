"""The figure at the top of README: throughput by engine, of job A and of one function by key.

One SVG serves light and dark pages: it has no background, and colours of medium lightness.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from holdfast.benches.report.answers import Answer
from holdfast.errors import InvalidArgumentError

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
    suite, name : str
        The measurement.
    title : str
    bars : mapping of str to str
        Engine to its label, top to bottom; the last one is what the others are compared with.
    """

    suite: str
    name: str
    title: str
    bars: Mapping[str, str]

    def answer(self, answers: list[Answer]) -> Answer:
        """Return the measurement that it shows.

        Raises
        ------
        InvalidArgumentError
            It is not there, or lacks an engine.
        """
        for answer in answers:
            if (answer.question.suite, answer.question.name) == (self.suite, self.name):
                missing = sorted(self.bars.keys() - set(answer.labels))
                if missing:
                    raise InvalidArgumentError("engines without throughput", suite=self.suite, missing=missing)
                return answer
        raise InvalidArgumentError("a measurement is missing", suite=self.suite, name=self.name)


PANELS = (
    Panel(
        "jobs",
        "job-a",
        "Vectorised",
        {
            "holdfast-memory": "holdfast, memory",
            "holdfast-filesystem": "holdfast, filesystem",
            "holdfast-rocksdb": "holdfast, rocksdb",
            "spark-agg-rocksdb": "Spark, aggregation in SQL",
        },
    ),
    Panel(
        "jobs",
        "by-key-pandas",
        "Pandas, key by key",
        {
            "pandas-memory": "holdfast, memory",
            "pandas-filesystem": "holdfast, filesystem",
            "pandas-rocksdb": "holdfast, rocksdb",
            "spark-pandas-rocksdb": "Spark, same function",
        },
    ),
)


def draw(answers: list[Answer]) -> str:
    """Return the figure as SVG; equal figures give equal bytes."""
    with rc_context(_STYLE):
        figure = Figure(figsize=(9.6, 2.2), layout="constrained")
        for panel, axes in zip(PANELS, figure.subplots(1, len(PANELS)), strict=True):
            _draw_panel(axes, panel, panel.answer(answers))
        svg = io.StringIO()
        # Neither date nor version: they would make each drawing another one.
        figure.savefig(svg, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return "".join(f"{line.rstrip()}\n" for line in svg.getvalue().splitlines())


def _draw_panel(axes: Axes, panel: Panel, answer: Answer) -> None:
    *_, last = panel.bars
    heights = [answer.rows_per_second(engine) for engine in panel.bars]
    colours = [_HOLDFAST if answer.name(engine).ours else _OTHER for engine in panel.bars]
    bars = axes.barh(list(panel.bars.values()), heights, color=colours, height=0.62)
    shown = [
        f"{rows:,.0f}"
        if engine == last
        else f"{rows:,.0f}  ({answer.ratio(engine, last).median:.1f}\N{MULTIPLICATION SIGN})"
        for engine, rows in zip(panel.bars, heights, strict=True)
    ]
    axes.bar_label(bars, shown, padding=4)
    axes.set_title(f"{panel.title}, rows/s", loc="left", fontsize=11, fontweight="bold")
    axes.invert_yaxis()
    axes.set_xlim(0, max(heights) * 1.75)
    axes.xaxis.set_visible(False)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
