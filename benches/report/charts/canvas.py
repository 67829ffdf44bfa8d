"""From a matplotlib figure to an SVG that a page can hold.

A page holds many drawings, in light and dark and on paper. So each gets ids of its own, a name and a description that
are read aloud, and colours by name: matplotlib draws with the colours of `_LIGHT`, and what is written refers to the
style sheet's variables, as ``var(--memory)``. Fonts are the page's.

::

    figure ──▶ SVG of matplotlib ──▶ <svg role="img" aria-labelledby="c7-title c7-desc">
                                       ids c7-…      colours var(--…)      no fonts, no metadata
"""

from __future__ import annotations

import io
import logging
import math
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from xml.etree import ElementTree as ET

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter, NullLocator

from holdfast.benches.report.names import HUES

# As wide as a phone's screen less its margins, so that text there has the size it is given here.
WIDTH_PX = 336
TEXT_PX, SMALL_PX = 12, 10.5
_SVG, _XLINK = "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"
# Okabe and Ito's colours where they are dark enough for white: 3 : 1 at least.
_LIGHT = {
    "ink": "#1d2430",
    "soft": "#596273",
    "grid": "#d5dae2",
    "surface": "#fefefe",
    "memory": "#0072b2",
    "filesystem": "#00845f",
    "rocksdb": "#c85200",
    "spark": "#6b7280",
    "floor": "#949aa5",
    "flink": "#b0508a",
    "pathway": "#7a5cc4",
    "bytewax": "#8a7500",
    "quix": "#a8473f",
    "other": "#4d5a73",
}
_MARKERS = dict(zip(HUES, "os^DXPv<>h", strict=True))
_STYLE: dict[Any, Any] = {
    "axes.edgecolor": _LIGHT["soft"],
    "axes.labelcolor": _LIGHT["soft"],
    "axes.labelsize": SMALL_PX,
    "axes.linewidth": 0.8,
    "font.size": TEXT_PX,
    "font.sans-serif": ["DejaVu Sans"],
    "grid.color": _LIGHT["grid"],
    "grid.linewidth": 0.8,
    "svg.fonttype": "none",
    "svg.hashsalt": "holdfast",
    "text.color": _LIGHT["ink"],
    # A name of an engine is text, whatever dollars it has.
    "text.parse_math": False,
    "xtick.color": _LIGHT["soft"],
    "xtick.labelsize": SMALL_PX,
    "ytick.color": _LIGHT["soft"],
    "ytick.labelsize": SMALL_PX,
}


def colour(name: str) -> str:
    """Return the colour to draw with; the page chooses the one that is seen."""
    return _LIGHT[name]


def marker(hue: str) -> str:
    """Return the marker of a hue: who sees no colours tells curves apart by it."""
    return _MARKERS[hue]


@contextmanager
def canvas(height_px: float, left: float = 4, right: float = 8, top: float = 4, bottom: float = 4) -> Iterator[Axes]:
    """Give axes without frame, so many pixels inside the drawing, in the charts' style."""
    with rc_context(_STYLE), warnings.catch_warnings():
        # The browser has a font for letters that matplotlib's own lacks.
        warnings.filterwarnings("ignore", message=r"Glyph .* missing from font", category=UserWarning)
        logging.getLogger("matplotlib.font_manager").setLevel(logging.ERROR)
        figure = Figure(figsize=(WIDTH_PX / 72, height_px / 72), dpi=72)
        size = (left, bottom, WIDTH_PX - left - right, height_px - top - bottom)
        axes = figure.add_axes(
            (size[0] / WIDTH_PX, size[1] / height_px, size[2] / WIDTH_PX, size[3] / height_px),
        )
        axes.patch.set_visible(False)
        figure.patch.set_visible(False)
        axes.spines[:].set_visible(False)
        axes.tick_params(length=0, pad=4)
        yield axes


def svg(axes: Axes, chart_id: str, title: str, description: str) -> str:
    """Return the drawing that holds the axes; call it inside of `canvas`.

    Parameters
    ----------
    chart_id : str
        Begins every id in the drawing; letters, digits and hyphens.
    title, description : str
        What is read aloud: what is shown, and what there is to see.
    """
    written = io.StringIO()
    figure = axes.get_figure()
    assert isinstance(figure, Figure)
    figure.savefig(written, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    root = ET.fromstring(written.getvalue())  # noqa: S314 - matplotlib's own
    for unwanted in ("metadata", "defs/{*}style"):
        for parent in [root, *root.iter(f"{{{_SVG}}}defs")]:
            for found in parent.findall(f"{{{_SVG}}}{unwanted.removeprefix('defs/{*}')}"):
                parent.remove(found)
    used = set(re.findall(r"(?:url\(#|href=\"#)([^)\"]+)", written.getvalue()))
    for element in root.iter():
        _make_its_own(element, chart_id, used)
    for name in ("width", "height", "version"):
        root.attrib.pop(name, None)
    root.attrib |= {"class": "chart", "role": "img", "aria-labelledby": f"{chart_id}-title {chart_id}-desc"}
    for place, (tag, text) in enumerate((("title", title), ("desc", description))):
        told = ET.Element(f"{{{_SVG}}}{tag}", {"id": f"{chart_id}-{tag}"})
        told.text = _readable(text)
        root.insert(place, told)
    ET.register_namespace("", _SVG)
    ET.register_namespace("xlink", _XLINK)
    return ET.tostring(root, encoding="unicode")


def _readable(text: str) -> str:
    # XML has no place for control characters.
    return "".join(c for c in text if c.isprintable() or c == " ")


def _make_its_own(element: ET.Element, chart_id: str, used: set[str]) -> None:
    """Give an element the chart's ids, the page's fonts and colours by name."""
    name = element.attrib.pop("id", None)
    if name in used:
        element.set("id", f"{chart_id}-{name}")
    for attribute, value in list(element.attrib.items()):
        if attribute.endswith("href"):
            element.set(attribute, f"#{chart_id}-{value.removeprefix('#')}")
        elif "url(#" in value:
            element.set(attribute, value.replace("url(#", f"url(#{chart_id}-"))
        if attribute == "style":
            element.set("style", _styled(value))


def _styled(style: str) -> str:
    kept = []
    for rule in filter(None, (rule.strip() for rule in style.split(";"))):
        name, _, value = rule.partition(":")
        if name == "font":
            size = re.search(r"([\d.]+)px", value)
            weight = "; font-weight: bold" if "bold" in value or " 700" in value else ""
            kept.append(f"font-size: {size[1] if size else TEXT_PX}px{weight}")
        elif name != "font-family":
            for hue, drawn in _LIGHT.items():
                value = value.replace(drawn, f"var(--{hue})")
            kept.append(f"{name}:{value}")
    return "; ".join(kept)


def shortened(text: str, most: int = 44) -> str:
    """Return a text that fits a chart; the whole one stands in the table below it."""
    readable = _readable(text)
    return readable if len(readable) <= most else f"{readable[: most - 1]}\N{HORIZONTAL ELLIPSIS}"


def number(value: float) -> str:
    """Return a number as a chart shows it: 667,928 is 668k."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size * 0.9995:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"


def use_numbers(axes: Axes, which: str, *, log: bool, most: int = 5) -> None:
    """Write the numbers of an axis short, and few of them."""
    axis = axes.xaxis if which == "x" else axes.yaxis
    least, largest = axes.get_xlim() if which == "x" else axes.get_ylim()
    decades = math.log10(largest / least) if log else 0
    subs = (1.0, 2.0, 5.0) if decades < 1.8 else (1.0, 3.0) if decades < 2.6 else (1.0,)
    axis.set_major_locator(LogLocator(subs=subs, numticks=99) if log else MaxNLocator(most))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: number(value)))
    axis.set_minor_formatter(NullFormatter())
