"""The figure at the top of README: throughput by engine, of job A and of one function by key.

One SVG serves light and dark pages: it has no background, and colours of medium lightness.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from holdfast.benches.report.answers import Answer
from holdfast.errors import InvalidArgumentError

# Text has a contrast of 4.2 and more on white and on GitHub's dark background, bars of 3 and more.
_INK, _HOLDFAST, _OTHER = "#717a84", "#1f9e8f", "#8c959f"
_PANEL_PX, _NAME_PX, _BAR_PX, _ROW_PX, _TOP_PX = 460, 170, 150, 26, 34
_FONT = 'font-family="DejaVu Sans, Helvetica, Arial, sans-serif" font-size="12"'


@dataclass(frozen=True)
class Panel:
    """One half of the figure: a measurement, and its engines by label; the last is what the others are read against."""

    suite: str
    name: str
    title: str
    bars: Mapping[str, str]

    def answer(self, answers: list[Answer]) -> Answer:
        """Return the measurement that it shows, which must have all its engines."""
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
    """Return the figure as SVG."""
    width, height = _PANEL_PX * len(PANELS), _TOP_PX + _ROW_PX * max(len(panel.bars) for panel in PANELS)
    lines = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" fill="{_INK}" {_FONT}>']
    for place, panel in enumerate(PANELS):
        lines += [f'<g transform="translate({place * _PANEL_PX} 0)">', *_panel(panel, panel.answer(answers)), "</g>"]
    return "\n".join([*lines, "</svg>"]) + "\n"


def _panel(panel: Panel, answer: Answer) -> Iterator[str]:
    *_, last = panel.bars
    most = max(map(answer.rows_per_second, panel.bars))
    yield f'<text x="{_NAME_PX}" y="16" font-weight="bold">{panel.title}, rows/s</text>'
    for row, (engine, name) in enumerate(panel.bars.items()):
        rows, y = answer.rows_per_second(engine), _TOP_PX + row * _ROW_PX
        length, colour = _BAR_PX * rows / most, _HOLDFAST if answer.name(engine).ours else _OTHER
        ratio = "" if engine == last else f"  ({answer.ratio(engine, last).median:.1f}\N{MULTIPLICATION SIGN})"
        yield f'<text x="{_NAME_PX - 8}" y="{y + 11}" text-anchor="end">{name}</text>'
        yield f'<rect x="{_NAME_PX}" y="{y - 1}" width="{length:.1f}" height="16" fill="{colour}"/>'
        yield f'<text x="{_NAME_PX + length + 5:.1f}" y="{y + 11}">{rows:,.0f}{ratio}</text>'
