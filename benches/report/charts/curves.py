"""Curves: how something grows along a size. Both axes are logarithmic; markers tell curves apart without colours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator

from holdfast.benches.report.charts.canvas import SMALL_PX, canvas, colour, marker, shortened, svg, use_numbers

_PLOT_PX, _AXIS_PX, _LEGEND_ROW_PX = 170, 38, 18
_TICKS_MAX = 6
_DASHES = ("-", "--", ":", "-.")


@dataclass(frozen=True)
class Curve:
    """One engine: its name, its hue, and its points in the order of x."""

    label: str
    hue: str
    points: Sequence[tuple[float, float]]


def draw_curves(
    chart_id: str, title: str, description: str, curves: Sequence[Curve], axes_names: tuple[str, str]
) -> str:
    """Return curves as SVG.

    Parameters
    ----------
    axes_names : tuple of str
        What grows to the right, and what upwards.
    """
    below = _AXIS_PX + _LEGEND_ROW_PX * len(curves) + 6
    with canvas(_PLOT_PX + below + 20, left=44, right=12, top=20, bottom=below) as axes:
        xs = sorted({x for curve in curves for x, _ in curve.points})
        ys = [y for curve in curves for _, y in curve.points]
        _scale(axes, "x", xs)
        _scale(axes, "y", ys)
        axes.grid(axis="y")
        axes.set_axisbelow(True)
        axes.spines["bottom"].set_visible(True)
        axes.set_xlabel(axes_names[0], fontsize=SMALL_PX)
        axes.text(0, 1.04, axes_names[1], transform=axes.transAxes, fontsize=SMALL_PX, color=colour("soft"))
        seen: dict[str, int] = {}
        for row, curve in enumerate(curves):
            same = seen[curve.hue] = seen.get(curve.hue, -1) + 1
            style = _DASHES[same % len(_DASHES)] + marker(curve.hue)
            look: dict[str, Any] = {"color": colour(curve.hue), "linewidth": 2, "markersize": 6, "markeredgewidth": 0}
            axes.plot(*zip(*curve.points, strict=True), style, **look)
            _write_legend(axes, row, curve.label, style, look)
        return svg(axes, chart_id, title, description)


def _scale(axes: Axes, which: str, values: Sequence[float]) -> None:
    least, most = min(values), max(values)
    log = least > 0 and most / least > 3
    set_scale = axes.set_xscale if which == "x" else axes.set_yscale
    set_limits = axes.set_xlim if which == "x" else axes.set_ylim
    if log:
        set_scale("log")
        set_limits(least / 1.3, most * 1.4)
    else:
        set_limits(0 if which == "y" else least - 0.05 * (most - least or 1), most + 0.08 * (most - least or most or 1))
    use_numbers(axes, which, log=log)
    if which == "x" and len(values) <= _TICKS_MAX:
        axes.xaxis.set_major_locator(FixedLocator(list(values)))


def _write_legend(axes: Axes, row: int, label: str, style: str, look: dict[str, Any]) -> None:
    y = -(_AXIS_PX + _LEGEND_ROW_PX * (row + 0.5)) / _PLOT_PX
    axes.plot((-0.1, -0.05, 0), (y, y, y), style, transform=axes.transAxes, clip_on=False, markevery=[1], **look)
    axes.text(0.03, y, shortened(label, 46), transform=axes.transAxes, va="center", clip_on=False)
