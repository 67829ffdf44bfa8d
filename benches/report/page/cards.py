"""A card: one chart with its figures as tables, and the command that repeats them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from markupsafe import Markup

from holdfast.benches.report.answers import Answer
from holdfast.benches.report.charts.bars import Bar
from holdfast.benches.report.tables import Sheet


@dataclass(frozen=True)
class Card:
    """One chart.

    Attributes
    ----------
    id : str
        Unique on the page.
    title : str
    svg : markupsafe.Markup
        The chart; empty if there is but the table.
    sheets : list of Sheet
        The figures.
    command : str
        What repeats them.
    about : str
        Where the measurement is described: the suite and its name.
    note : str
        What a reader must know of the sizes.
    question : str
        The id of the question, empty if it is none of the plan's.
    opened : bool
        Whether the table is shown without being asked for.
    """

    id: str
    title: str
    svg: Markup | str
    sheets: list[Sheet] = field(default_factory=list)
    command: str = ""
    about: str = ""
    note: str = ""
    question: str = ""
    opened: bool = False

    @classmethod
    def of(cls, answer: Answer, chart_id: str, svg: str, sheets: Iterable[Sheet | None], title: str = "") -> Card:
        """Return the card of an answer's chart."""
        kept = [sheet for sheet in sheets if sheet is not None]
        about = f"{answer.question.suite}, {answer.question.name}"
        if title:
            about = f"{answer.question.text} {about}"
        # matplotlib wrote it, and escaped the names in it.
        chart = Markup(svg)  # noqa: S704
        return cls(
            f"card-{chart_id}",
            title or answer.question.text,
            chart,
            kept,
            answer.document["command"],
            about,
            answer.question.note,
            answer.question.id,
        )


def sheet_of(answer: Answer, title: str) -> Sheet | None:
    """Return the table of an answer whose title begins so, None if it has none."""
    return next((sheet for sheet in answer.sheets if sheet.title.startswith(title)), None)


def described(bars: Sequence[Bar]) -> str:
    """Return bars in words."""
    return "; ".join(f"{bar.label}: {bar.note}" for bar in bars) + "."
