"""The newest full run in Markdown: the page that the repository shows, and README's sentence below its figure."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

from holdfast.benches.report.answers import Answer
from holdfast.benches.report.directory import Results
from holdfast.benches.report.figure import PANELS
from holdfast.benches.report.names import name_of
from holdfast.benches.report.page.html import commands, described_machine
from holdfast.benches.report.page.summary import Sentence, summarize
from holdfast.benches.report.page.words import count, listed, of_field, spread, times

LINES_MAX = 150
_WIDTH = 120


def results_page(results: Results, answers: list[Answer]) -> str:
    """Return RESULTS.md: the summary, a line of ratios for each question, targets, gaps, commands."""
    summary = summarize(results, answers)
    parts = [
        "# Measured",
        _wrapped(
            "`make results` wrote this page from [results](results/run.json), where the raw figures are. "
            "[The whole report](../docs/report.html) has charts, spreads, settings and memory; "
            "[docs/performance.md](../docs/performance.md) says why. Sinks under kills, and beside plain writes: "
            "[SINKS.md](SINKS.md)."
        ),
        _wrapped(f"{described_machine(results)}."),
        _wrapped(f"**{'; '.join(summary.headline)}.**") if summary.headline else "",
    ]
    if summary.choices:
        rows = [
            (
                f"{advice.sentence.question} {advice.sentence.text}",
                advice.choice.backend,
                _capital(advice.choice.reason),
            )
            for advice in summary.choices
        ]
        parts += ["## Which backend", _table(("question", "backend", "reason"), rows)]
    for heading, sentences in (
        ("Where holdfast loses", summary.losses),
        ("Where there is no difference", summary.level),
        ("What it costs", summary.costs),
        ("How far to trust these figures", summary.doubts),
    ):
        if sentences:
            parts += [f"## {heading}", _table(("question", "answer"), list(_by_question(sentences)))]
    parts += ["## Ratios", _RATIOS, _table(("question", "baseline", "throughput by it"), list(_ratios(answers)))]
    targets = [
        (
            answer.question.text,
            target["what"],
            target["wanted"],
            f"{target['measured']:.3g}",
            "yes" if target["met"] else "**no**",
        )
        for answer in answers
        for target in answer.document["targets"]
    ]
    if targets:
        parts += ["## Targets", _table(("question", "figure", "wanted", "measured", "met"), targets)]
    if results.missing:
        gaps = [(q.text, f"{q.suite}, {q.name}", q.state, q.reason.partition("\n")[0]) for q in results.missing]
        parts += ["## Not measured", _table(("question", "suite", "state", "reason"), gaps)]
    repeat = dict.fromkeys(command for _, command in commands(results, answers))
    parts += ["## To repeat", "```\n" + "\n".join(repeat) + "\n```"]
    return "\n\n".join(filter(None, parts)) + "\n"


_RATIOS = textwrap.fill(
    "Medians of the ratios within each turn, in brackets the least and the most of them. Below 1 holdfast is slower.",
    _WIDTH,
)


def readme_paragraph(results: Results, answers: list[Answer]) -> str:
    """Return what README says below its figure."""
    vectorised, by_key = (panel.answer(answers) for panel in PANELS)
    cores = vectorised.document["machine"]["cores"]
    halves = []
    for panel, answer in zip(PANELS, (vectorised, by_key), strict=True):
        *ours, base = panel.bars
        ratios = [f"{times(answer.ratio(label, base).median)} (`{answer.name(label).backend}`)" for label in ours]
        halves.append(f"{listed(ratios)} times Spark's throughput")
    rows, touched = (a.document["settings"]["jobs"][a.labels[0]] for a in (vectorised, by_key))
    return _wrapped(
        f"A running count and sum with durable state, on {count(cores)} cores; Spark uses its RocksDB provider. Left: "
        f"holdfast's vectorised operator and Spark's built-in aggregation, {count(rows['rows'])} rows per micro-batch: "
        f"{halves[0]}. Right: one `applyInPandasWithState` function, unchanged, {count(touched['touched'])} keys per "
        f"micro-batch: {halves[1]}. Measured on {results.run['started'][:10]}; where holdfast loses, other engines, "
        "and how to repeat each figure: [benches/RESULTS.md](benches/RESULTS.md) and [the report](docs/report.html)."
    )


def _wrapped(text: str) -> str:
    return textwrap.fill(text, _WIDTH, break_long_words=False, break_on_hyphens=False)


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(_cell(cell) for cell in line) + " |" for line in lines)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def _by_question(sentences: list[Sentence]) -> Iterator[tuple[str, str]]:
    for question in dict.fromkeys(sentence.question for sentence in sentences):
        yield question, " ".join(sentence.text for sentence in sentences if sentence.question == question)


def _ratios(answers: list[Answer]) -> Iterator[tuple[str, str, str]]:
    """Yield a line for each question and baseline."""
    for answer in answers:
        by_base: dict[str, list[str]] = {}
        for label in answer.labels:
            base = answer.baseline(label)
            if base is not None and answer.equal:
                ratio, name = answer.ratio(label, base), answer.name(label).text
                if answer.curves:
                    where = f"{count(answer.along(label) or 0)} {of_field(answer.question.along)}"
                    name = f"{name_of(answer.engine(label)).text}, {where}"
                other = answer.name(base).text
                if answer.curves and base != answer.question.baseline:
                    other = name_of(answer.engine(base)).text
                shown = f"{name} {times(ratio.median)}" + (f" ({spread(ratio)})" if ratio.turns > 1 else "")
                by_base.setdefault(other, []).append(shown)
        for base, ratios in by_base.items():
            yield answer.question.text, base, "; ".join(ratios)
