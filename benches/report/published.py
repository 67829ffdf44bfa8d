"""What the repository says of its newest full runs, all of it made from one directory of results.

::

    make results RUN=DIR     DIR ──▶ benches/results/                    compact; the one source of all figures.
                                                                         A suite that DIR did not measure stays.
    make results                     benches/results/ ──▶ benches/RESULTS.md      the summary
                                                      ──▶ docs/report.html        the whole report
                                                      ──▶ docs/throughput.svg     README's figure
                                                      ──▶ README.md               the paragraph between its two comments

A test makes them again and compares, so that no figure is left over from another run.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
import textwrap
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from holdfast.benches.jobs.shard import PLAIN_DOWNLOAD, RESTORE
from holdfast.benches.report import figure
from holdfast.benches.report.answers import Answer, answers_of
from holdfast.benches.report.directory import RUN, Results, read, replace_text
from holdfast.benches.report.html import render
from holdfast.benches.report.names import name_of
from holdfast.benches.report.summary import Sentence, summarize
from holdfast.benches.report.tables import BENCHMARKS, MICRO_COMMAND
from holdfast.benches.report.words import count, listed, of_field, times
from holdfast.errors import HoldfastError, InvalidArgumentError

RESULTS, PAGE, REPORT = Path("benches/results"), Path("benches/RESULTS.md"), Path("docs/report.html")
PICTURE, README = Path("docs/throughput.svg"), Path("README.md")
_LINES_MAX, _WIDTH = 150, 120
_BEGIN, _END = "<!-- figures: make results writes what follows -->", "<!-- end of figures -->"
Line = Mapping[str, Any]
# Parts of a micro-batch that the report reads; others would be most of the bytes.
_PHASES = (RESTORE, PLAIN_DOWNLOAD)


def publish(run: Path, root: Path) -> None:
    """Put each suite that a full run measured, compact, in the place of the one that the repository has."""
    results = read(run)
    if results.quick:
        raise InvalidArgumentError("a quick run is one user's own; publish a full one", run=run)
    wrong = [answer.question.id for answer in answers_of(results) if not answer.equal]
    if wrong:
        raise InvalidArgumentError("entries found different results, so their times mean nothing", questions=wrong)
    # Documents of pytest-benchmark do not say when they were measured, by what and where.
    begun = {name: results.run[name] for name in ("started", "versions", "machine")}
    documents = [(question, begun | _compact(document)) for question, document in results.measured]
    plan = results.run["plan"]
    if (root / RESULTS / RUN).exists():
        before = read(root / RESULTS)
        new_suites = {question.suite for question, _ in results.measured}
        kept = {question.suite for question, _ in before.measured} - new_suites
        documents += [(question, document) for question, document in before.measured if question.suite in kept]
        plan = _merged(before.run["plan"], plan, kept)
    new = root / RESULTS.with_name("results.new")
    shutil.rmtree(new, ignore_errors=True)
    for question, document in documents:
        file = new / question.suite / f"{question.name}.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(_json(document))
    (new / RUN).write_text(_json({**results.run, "plan": plan}))
    answers = answers_of(read(new))
    for panel in figure.PANELS:
        panel.answer(answers)
    shutil.rmtree(root / RESULTS, ignore_errors=True)
    new.rename(root / RESULTS)


def _merged(before: Sequence[Line], now: Sequence[Line], kept: Collection[str]) -> list[Line]:
    """Return the lines of a plan that keeps some suites, in the order of the suites before."""
    order = list(dict.fromkeys(line["suite"] for line in (*before, *now)))
    lines = [line for line in before if line["suite"] in kept] + [line for line in now if line["suite"] not in kept]
    return sorted(lines, key=lambda line: order.index(line["suite"]))


def texts(root: Path, *, report: bool = True) -> dict[Path, str]:
    """Return what the files must hold that are made of the results: all of them, or all but the whole report."""
    results = read(root / RESULTS)
    answers = answers_of(results)
    readme = (root / README).read_text()
    if readme.count(_BEGIN) != 1 or readme.count(_END) != 1:
        raise InvalidArgumentError("README lacks the comments around its figures", begin=_BEGIN, end=_END)
    paragraph = f"{_BEGIN}\n\n{_readme_paragraph(answers)}\n\n{_END}"
    found = {
        PAGE: _results_page(results, answers),
        PICTURE: figure.draw(answers),
        README: re.sub(f"{re.escape(_BEGIN)}.*{re.escape(_END)}", lambda _: paragraph, readme, flags=re.DOTALL),
    }
    lines = found[PAGE].count("\n")
    if lines > _LINES_MAX:
        raise InvalidArgumentError("the summary has grown too long", lines=lines, at_most=_LINES_MAX)
    return found | ({REPORT: render(results)} if report else {})


def _results_page(results: Results, answers: list[Answer]) -> str:
    """Return RESULTS.md: the ratios of each question, what is no ratio, missed targets, gaps, commands."""
    summary = summarize(results, answers)
    ratios = list(_ratios(answers))
    compared = {question for question, *_ in ratios}
    parts = [
        "# Measured",
        _wrapped(
            "`make results` wrote this page from [results](results/run.json), where the raw figures are. "
            "[The whole report](../docs/report.html) has charts, settings and memory, and says which backend "
            "suits which load; [docs/performance.md](../docs/performance.md) says why. Sinks under kills, and beside "
            "plain writes: [SINKS.md](SINKS.md)."
        ),
        _wrapped(f"{results.described}."),
        _wrapped(f"**{'; '.join(summary.headline)}.**") if summary.headline else "",
        _wrapped(" ".join(f"{doubt.question} {doubt.text}" for doubt in summary.doubts)),
        "## Ratios",
        _RATIOS,
        _table(("question", "baseline", "throughput by it"), ratios),
    ]
    costs = [cost for cost in summary.costs if cost.question not in compared]
    if costs:
        parts += ["## What it costs", _table(("question", "answer"), list(_by_question(costs)))]
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
    "Medians of the ratios within each turn, in brackets the least and the most of several turns. Entries that "
    "begin with a backend are holdfast's, vectorised if nothing else is said. Bold: holdfast is "
    "slower than the baseline, by more than the turns leave open. *Wanted*: the least, where a target is missed.",
    _WIDTH,
)


def _readme_paragraph(answers: list[Answer]) -> str:
    """Return what README says below its figure."""
    vectorised, by_key = (panel.answer(answers) for panel in figure.PANELS)
    halves = []
    for panel, answer in zip(figure.PANELS, (vectorised, by_key), strict=True):
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
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(_cell(cell) for cell in line) + " |" for line in lines)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def _by_question(sentences: list[Sentence]) -> Iterator[tuple[str, str]]:
    for question in dict.fromkeys(sentence.question for sentence in sentences):
        yield question, " ".join(sentence.text for sentence in sentences if sentence.question == question)


def _missed(answer: Answer) -> dict[str, dict[str, Any]]:
    """Return the targets that an answer misses, by what they are of."""
    return {target["what"]: target for target in answer.document["targets"] if not target["met"]}


def _missed_targets(answers: list[Answer]) -> list[str]:
    """Return how many targets are met, and a table of those missed that stand beside no ratio."""
    targets, missed = sum(len(answer.document["targets"]) for answer in answers), sum(map(len, map(_missed, answers)))
    if not missed:
        return []
    rows = []
    for answer in answers:
        of_ratios = {f"{label}/{answer.baseline(label)}" for label in answer.labels} if answer.equal else set()
        rows += [
            (answer.question.text, what, target["wanted"], f"{target['measured']:.3g}")
            for what, target in _missed(answer).items()
            if what not in of_ratios
        ]
    met = f"{targets - missed} of {targets} targets are met."
    if not rows:
        return ["## Missed targets", met]
    table = _table(("question", "figure", "wanted", "measured"), rows)
    return ["## Missed targets", f"{met} Besides those among the ratios, these are not:", table]


def _ratios(answers: list[Answer]) -> Iterator[tuple[str, str, str]]:
    """Yield a line for each question and baseline."""
    for answer in answers:
        by_base: dict[str, list[str]] = {}
        turns: list[str] = []
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
                is_loss = answer.name(label).ours and not answer.name(base).ours and ratio.median < 1 and not ratio.same
                bold = "**" if is_loss else ""
                turns = [f"in {ratio.turns} turns"] if ratio.turns > 1 else []
                target = _missed(answer).get(f"{label}/{base}")
                spreads = f" ({times(ratio.least)} to {times(ratio.most)})" if ratio.turns > 1 else ""
                shown = f"{name.removeprefix('holdfast on ')} {bold}{times(ratio.median)}{bold}{spreads}"
                shown += f", wanted {target['wanted'].removeprefix('at least ')}" if target else ""
                by_base.setdefault(other, []).append(shown)
        for base, ratios in by_base.items():
            yield answer.question.text, base, "; ".join(ratios + turns)


def _compact(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return a document without what no page shows: parts of micro-batches, and sizes after each of them."""
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
    """Publish the run that is named, if any, and write what is made of the results."""
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
