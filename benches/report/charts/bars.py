"""Bars, one for each thing compared: its name and figure on a line, the bar below it.

::

    holdfast on memory                   668k  4.1x
    ██████████████████████████├─┤                          the line: least and most of the turns

    Spark's aggregation on RocksDB             162k
    ██████
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes

from holdfast.benches.report.charts.canvas import SMALL_PX, TEXT_PX, WIDTH_PX, canvas, colour, shortened, svg

ROW_PX = 38
_LEGEND_PX = 28
# At most, of letters as wide as those of DejaVu Sans.
_LETTER_PX, _BOLD_PX = 6.6, 7.6


@dataclass(frozen=True)
class Bar:
    """One of the things compared.

    Attributes
    ----------
    label, note : str
        Its name, and the figure in words.
    hue : str
        One of `holdfast.benches.report.names.HUES`.
    parts : tuple of float
        Lengths, one after another: one, or as many as the legend has.
    least, most : float or None
        Where the line begins and ends that shows the spread.
    mark : float or None
        A reference, as a line across the bar.
    """

    label: str
    note: str
    hue: str
    parts: tuple[float, ...]
    least: float | None = None
    most: float | None = None
    mark: float | None = None

    @property
    def end(self) -> float:
        """How far anything of it reaches."""
        return max(sum(self.parts), self.most or 0, self.mark or 0)


def draw_bars(
    chart_id: str, title: str, description: str, bars: Sequence[Bar], legend: Sequence[str] = (), mark: str = ""
) -> str:
    """Return bars as SVG.

    Parameters
    ----------
    legend : sequence of str
        What the parts of a bar are, the palest first.
    mark : str
        What the line across a bar is.
    """
    has_legend = bool(legend or mark)
    height = ROW_PX * len(bars) + (_LEGEND_PX if has_legend else 0) + 8
    with canvas(height, top=_LEGEND_PX if has_legend else 2, bottom=2) as axes:
        axes.set_axis_off()
        axes.set_xlim(0, max((bar.end for bar in bars), default=0) * 1.02 or 1)
        axes.set_ylim(len(bars), -0.02)
        for row, bar in enumerate(bars):
            write_row(axes, row, bar.label, bar.note)
            _draw(axes, row + 0.62, bar)
        if has_legend:
            _draw_legend(axes, legend, mark)
        return svg(axes, chart_id, title, description)


def write_row(axes: Axes, row: float, label: str, note: str) -> None:
    """Write a line above what is drawn for it: the name at the left, the figure at the right."""
    figure = shortened(note)
    name = shortened(label, int((WIDTH_PX - 20 - len(figure) * _BOLD_PX) / _LETTER_PX))
    across = axes.get_yaxis_transform()
    axes.text(0, row + 0.2, name, fontsize=TEXT_PX, va="center", transform=across)
    axes.text(1, row + 0.2, figure, fontsize=TEXT_PX, va="center", ha="right", transform=across, fontweight="bold")


def _draw(axes: Axes, y: float, bar: Bar) -> None:
    left = 0.0
    for part, length in enumerate(bar.parts):
        axes.barh(y, length, left=left, height=0.34, color=colour(bar.hue), alpha=_strength(part, len(bar.parts)))
        left += length
    if bar.least is not None and bar.most is not None and bar.most > bar.least:
        axes.plot((bar.least, bar.most), (y, y), color=colour("ink"), linewidth=1.4, solid_capstyle="butt")
        axes.plot((bar.least, bar.most), (y, y), "|", color=colour("ink"), markersize=7, markeredgewidth=1.4)
    if bar.mark is not None:
        axes.plot((bar.mark, bar.mark), (y - 0.21, y + 0.21), color=colour("ink"), linewidth=2)


def _strength(part: int, parts: int) -> float:
    return (0.4 + 0.6 * part / (parts - 1)) if parts > 1 else 1.0


def _draw_legend(axes: Axes, legend: Sequence[str], mark: str) -> None:
    shown = [
        axes.barh(0, 0, color=colour("ink"), alpha=_strength(part, len(legend)), label=name)
        for part, name in enumerate(legend)
    ]
    handles = [bar[0] for bar in shown if len(bar)]
    if mark:
        handles += axes.plot([], [], "|", color=colour("ink"), markersize=9, markeredgewidth=2, label=mark)
    names = [*legend, mark] if mark else list(legend)
    axes.legend(
        handles,
        names,
        loc="lower left",
        bbox_to_anchor=(-0.01, 1.02),
        ncols=len(names),
        frameon=False,
        borderaxespad=0.2,
        borderpad=0,
        columnspacing=1.0,
        handlelength=0.9,
        handletextpad=0.4,
        fontsize=SMALL_PX,
        labelcolor=colour("soft"),
    )
