"""Publishes the newest full runs in the repository, all from one directory of results.

::

    make results RUN=DIR     DIR ──▶ benches/results/                    compact; the only source of all figures.
                                                                         Suites that DIR did not measure stay.
    make results                     benches/results/ ──▶ benches/RESULTS.md      the summary
                                                      ──▶ docs/report.html        the whole report
                                                      ──▶ docs/throughput.svg     README's figure
                                                      ──▶ README.md               the paragraph between two comments

A test recreates these files and compares, so that no figure is left over from an earlier run.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.benches.jobs.shard import PLAIN_DOWNLOAD, RESTORE
from holdfast.benches.report.answers import Answer, answers_of
from holdfast.benches.report.directory import RUN, Results, read, replace_text
from holdfast.benches.report.html import render
from holdfast.benches.report.summary import missed, summarize
from holdfast.benches.report.tables import BENCHMARKS, MICRO_COMMAND
from holdfast.benches.report.words import count, listed, times
from holdfast.errors import HoldfastError, InvalidArgumentError

# Contrast on white and on GitHub's dark background: text at least 4.2, bars at least 3.
_INK, _HOLDFAST, _OTHER = "#717a84", "#1f9e8f", "#8c959f"
_PANEL_PX, _NAME_PX, _BAR_PX, _ROW_PX, _TOP_PX = 460, 170, 150, 26, 34
_FONT = 'font-family="DejaVu Sans, Helvetica, Arial, sans-serif" font-size="12"'


@dataclass(frozen=True)
class Panel:
    """One half of the figure: a measurement and the names of its engines by label, the baseline last."""

    suite: str
    name: str
    title: str
    bars: Mapping[str, str]

    def answer(self, answers: list[Answer]) -> Answer:
        for answer in answers:
            if (answer.question.suite, answer.question.name) == (self.suite, self.name):
                missing = sorted(self.bars.keys() - set(answer.labels))
                if missing:
                    raise InvalidArgumentError(
                        "no throughput was measured for some engines; run the suite again",
                        suite=self.suite,
                        missing=missing,
                    )
                return answer
        raise InvalidArgumentError("a measurement is missing; run its suite", suite=self.suite, name=self.name)


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
    """Return README's figure as SVG."""
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


RESULTS, PAGE, REPORT = Path("benches/results"), Path("benches/RESULTS.md"), Path("docs/report.html")
PICTURE, README = Path("docs/throughput.svg"), Path("README.md")
_LINES_MAX, _WIDTH = 150, 120
_BEGIN, _END = "<!-- figures: make results writes what follows -->", "<!-- end of figures -->"
# Phases of micro-batches that the report reads; the others would be most of the bytes.
_PHASES = (RESTORE, PLAIN_DOWNLOAD)


def publish(run: Path, root: Path) -> None:
    """Replace the repository's results of each suite that a full run measured, in compact form."""
    results = read(run)
    if results.quick:
        raise InvalidArgumentError("a quick run measures one user's load; publish a full one", run=run)
    wrong = [answer.question.id for answer in answers_of(results) if not answer.equal]
    if wrong:
        raise InvalidArgumentError("entries found different results, so their times do not count", questions=wrong)
    # Documents of pytest-benchmark lack these facts.
    begun = {name: results.run[name] for name in ("started", "versions", "machine")}
    documents = [(question, begun | _compact(document)) for question, document in results.measured]
    plan = results.run["plan"]
    if (root / RESULTS / RUN).exists():
        before = read(root / RESULTS)
        new_suites = {question.suite for question, _ in results.measured}
        kept = {question.suite for question, _ in before.measured} - new_suites
        documents += [(question, document) for question, document in before.measured if question.suite in kept]
        order = list(dict.fromkeys(line["suite"] for line in (*before.run["plan"], *plan)))
        plan = [line for line in before.run["plan"] if line["suite"] in kept] + [
            line for line in plan if line["suite"] not in kept
        ]
        plan.sort(key=lambda line: order.index(line["suite"]))
    new = root / RESULTS.with_name("results.new")
    shutil.rmtree(new, ignore_errors=True)
    for question, document in documents:
        file = new / question.suite / f"{question.name}.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(_json(document))
    (new / RUN).write_text(_json({**results.run, "plan": plan}))
    answers = answers_of(read(new))
    for panel in PANELS:
        panel.answer(answers)
    shutil.rmtree(root / RESULTS, ignore_errors=True)
    new.rename(root / RESULTS)


def texts(root: Path, *, report: bool = True) -> dict[Path, str]:
    """Return the content of each file that is made from the results, with or without the report."""
    results = read(root / RESULTS)
    answers = answers_of(results)
    readme = (root / README).read_text()
    if readme.count(_BEGIN) != 1 or readme.count(_END) != 1:
        raise InvalidArgumentError("README lacks the comments around its figures; add them", begin=_BEGIN, end=_END)
    paragraph = f"{_BEGIN}\n\n{_readme_paragraph(answers)}\n\n{_END}"
    found = {
        PAGE: _results_page(results, answers),
        PICTURE: draw(answers),
        README: re.sub(f"{re.escape(_BEGIN)}.*{re.escape(_END)}", lambda _: paragraph, readme, flags=re.DOTALL),
    }
    if (lines := found[PAGE].count("\n")) > _LINES_MAX:
        raise InvalidArgumentError("RESULTS.md is too long; shorten it", lines=lines, at_most=_LINES_MAX)
    return found | ({REPORT: render(results)} if report else {})


def _results_page(results: Results, answers: list[Answer]) -> str:
    """Return RESULTS.md: ratios, other figures, missed targets, gaps and commands."""
    summary = summarize(results, answers)
    parts = [
        "# Measured",
        _wrapped(
            "`make results` wrote this page from [results](results/run.json). [The report](../docs/report.html) adds "
            "charts, settings, memory, and which backend suits which load; [performance.md](../docs/performance.md) "
            "says why. Sinks: [SINKS.md](SINKS.md)."
        ),
        _wrapped(f"{results.described}."),
        _wrapped(f"**{'; '.join(summary.headline)}.**") if summary.headline else "",
        _wrapped(" ".join(f"{doubt.question} {doubt.text}" for doubt in summary.doubts)),
        "## Ratios",
        _RATIOS,
        _table(
            ("question", "baseline", "throughput by it"),
            [(of.question, baseline, of.text) for baseline, of in summary.ratios],
        ),
    ]
    if summary.costs:
        costs: dict[str, list[str]] = {}
        for cost in summary.costs:
            costs.setdefault(cost.question, []).append(cost.text)
        rows = [(question, " ".join(of)) for question, of in costs.items()]
        parts += ["## What it costs", _table(("question", "answer"), rows)]
    parts += _missed_targets(answers)
    if results.missing:
        gaps = [(q.text, f"{q.suite}, {q.name}", q.state, q.reason.partition("\n")[0]) for q in results.missing]
        parts += ["## Not measured", _table(("question", "suite", "state", "reason"), gaps)]
    repeat = dict.fromkeys(answer.document["command"] for answer in answers)
    if len(answers) < len(results.measured):
        repeat[MICRO_COMMAND] = None
    parts += ["## To repeat", "```\n" + "\n".join(repeat) + "\n```"]
    return "\n\n".join(filter(None, parts)) + "\n"


_RATIOS = textwrap.fill(
    "Medians of the turns' ratios, in brackets least and most. Entries that begin with a backend are holdfast's, "
    "vectorised unless said otherwise. Bold: slower than the baseline, by more than the turns leave open. *Wanted*: "
    "the least, where a target is missed.",
    _WIDTH,
)


def _readme_paragraph(answers: list[Answer]) -> str:
    """Return the paragraph below README's figure."""
    vectorised, by_key = (panel.answer(answers) for panel in PANELS)
    halves = []
    for panel, answer in zip(PANELS, (vectorised, by_key), strict=True):
        *ours, base = panel.bars
        ratios = [f"{times(answer.ratio(label, base).median)} (`{answer.name(label).backend}`)" for label in ours]
        halves.append(f"{listed(ratios)} times Spark's throughput")
    return _wrapped(
        f"On {count(vectorised.document['machine']['cores'])} cores, vectorised (left) {halves[0]}; a function by key, "
        f"unchanged (right), {halves[1]} ({vectorised.document['started'][:10]}; [all figures](benches/RESULTS.md), "
        "[the report](docs/report.html))."
    )


def _wrapped(text: str) -> str:
    return textwrap.fill(text, _WIDTH, break_long_words=False, break_on_hyphens=False)


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = (columns, ["---"] * len(columns), *rows)
    escaped = [[" ".join(cell.split()).replace("|", "\\|").replace("<", "&lt;") for cell in line] for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in escaped)


def _missed_targets(answers: list[Answer]) -> list[str]:
    """Return the number of targets met, and a table of the missed targets that the ratios do not show."""
    targets, misses = sum(len(answer.document["targets"]) for answer in answers), sum(map(len, map(missed, answers)))
    if not misses:
        return []
    rows = []
    for answer in answers:
        of_ratios = {f"{label}/{answer.baseline(label)}" for label in answer.labels} if answer.equal else set()
        rows += [
            (answer.question.text, what, target["wanted"], f"{target['measured']:.3g}")
            for what, target in missed(answer).items()
            if what not in of_ratios
        ]
    met = f"{targets - misses} of {targets} targets are met."
    if not rows:
        return ["## Missed targets", met]
    table = _table(("question", "figure", "wanted", "measured"), rows)
    return ["## Missed targets", f"{met} Besides those among the ratios, these are not:", table]


def _compact(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return a document without data that no page shows: most phases, and the state's size after each micro-batch."""
    if BENCHMARKS in document:
        return dict(document)
    engines = {
        label: {**engine, "runs": [_compact_run(run) for run in engine["runs"]]}
        for label, engine in document["engines"].items()
    }
    state = {label: {**of, "after_batch": []} for label, of in document["state_bytes"].items()}
    return {**document, "engines": engines, "state_bytes": state}


def _compact_run(run: Mapping[str, Any]) -> dict[str, Any]:
    phases = [{name: of[name] for name in _PHASES if name in of} for of in run["phases_ms"]]
    return {**run, "batch_ms": [round(ms, 1) for ms in run["batch_ms"]], "phases_ms": phases}


def _json(content: object) -> str:
    return json.dumps(content, separators=(",", ":"), sort_keys=False) + "\n"


def main(arguments: list[str], root: Path) -> None:
    """Publish the given run, if any, and write all files that are made from the results."""
    if arguments:
        publish(Path(arguments[0]), root)
    for path, text in texts(root).items():
        replace_text(root / path, text)
        print(path)


if __name__ == "__main__":
    try:
        main(sys.argv[1:], Path())
    except HoldfastError as exc:
        sys.exit(f"holdfast: {exc}")
