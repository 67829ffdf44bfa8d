"""Distributions, one below another on one scale: where the times of micro-batches lie.

::

    holdfast on memory                           1.37 s
    ·  ──·━━━|━━━·────── ·  ·

The thick line holds the middle half, the thin one nine tenths, the gap is the median; each dot is a micro-batch, as
long as these can be told apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes

from holdfast.benches.report.charts.bars import ROW_PX, write_row
from holdfast.benches.report.charts.canvas import SMALL_PX, canvas, colour, svg, use_numbers

_DOTS_MAX = 80
_AXIS_PX = 36
# Beyond this the slowest would leave nothing to be seen of the others.
_LOG_FROM = 12.0


@dataclass(frozen=True)
class Strip:
    """A distribution: its name, its figures in words, its hue, its values."""

    label: str
    note: str
    hue: str
    values: Sequence[float]


def draw_strips(chart_id: str, title: str, description: str, strips: Sequence[Strip], unit: str) -> str:
    """Return distributions as SVG."""
    everything = np.concatenate([np.asarray(strip.values, dtype=float) for strip in strips])
    least, most = max(float(everything.min()), 1e-3), max(float(everything.max()), 1e-3)
    log = most / least > _LOG_FROM
    height = ROW_PX * len(strips) + _AXIS_PX + 4
    with canvas(height, left=8, right=10, top=2, bottom=_AXIS_PX) as axes:
        axes.set_yticks([])
        axes.set_ylim(len(strips), -0.02)
        if log:
            axes.set_xscale("log")
            axes.set_xlim(least / 1.15, most * 1.15)
        else:
            axes.set_xlim(0, most * 1.04)
        use_numbers(axes, "x", log=log)
        axes.grid(axis="x")
        axes.set_axisbelow(True)
        axes.set_xlabel(f"{unit}, logarithmic" if log else unit, fontsize=SMALL_PX)
        for row, strip in enumerate(strips):
            write_row(axes, row, strip.label, strip.note)
            _draw(axes, row + 0.64, strip, least)
        return svg(axes, chart_id, title, description)


def _draw(axes: Axes, y: float, strip: Strip, least: float) -> None:
    values = np.maximum(np.asarray(strip.values, dtype=float), least)
    p5, p25, p50, p75, p95 = np.percentile(values, (5, 25, 50, 75, 95))
    hue = colour(strip.hue)
    axes.plot((p5, p95), (y, y), color=hue, linewidth=1.6, solid_capstyle="butt")
    axes.plot((p25, p75), (y, y), color=hue, linewidth=8, alpha=0.55, solid_capstyle="butt")
    if len(values) <= _DOTS_MAX:
        # The golden ratio spreads neighbours without chance.
        heights = y + ((np.arange(len(values)) * 0.618034) % 1 - 0.5) * 0.3
        axes.plot(values, heights, "o", color=hue, markersize=3.2, markeredgewidth=0, alpha=0.75)
    else:
        axes.plot(values.max(), y, "o", color=hue, markersize=4, markeredgewidth=0)
    axes.plot((p50, p50), (y - 0.24, y + 0.24), color=colour("ink"), linewidth=2)
