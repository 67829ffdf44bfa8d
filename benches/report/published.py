"""What the repository says of its newest full run, all of it made from one directory of results.

::

    make results RUN=DIR     DIR ──▶ benches/results/                    compact; the one source of all figures
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
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from holdfast.benches.report import figure, markdown
from holdfast.benches.report.answers import answers_of
from holdfast.benches.report.directory import BENCHMARKS, read
from holdfast.benches.report.page.html import render
from holdfast.benches.running.directory import RUN, replace_text
from holdfast.errors import HoldfastError, InvalidArgumentError

RESULTS, PAGE, REPORT = Path("benches/results"), Path("benches/RESULTS.md"), Path("docs/report.html")
PICTURE, README = Path("docs/throughput.svg"), Path("README.md")
_BEGIN, _END = "<!-- figures: make results writes what follows -->", "<!-- end of figures -->"
# Parts of a micro-batch that the report reads; others would be most of the bytes.
_PHASES = ("restore", "plain download")


def publish(run: Path, root: Path) -> None:
    """Put a full run's results, compact, in the place of those that the repository has.

    Raises
    ------
    InvalidArgumentError
        It is a quick run, or lacks what README's figure shows.
    """
    results = read(run)
    if results.quick:
        raise InvalidArgumentError("a quick run is one user's own; publish a full one", run=run)
    answers = answers_of(results)
    wrong = [answer.question.id for answer in answers if not answer.equal]
    if wrong:
        raise InvalidArgumentError("entries found different results, so their times mean nothing", questions=wrong)
    for panel in figure.PANELS:
        panel.answer(answers)
    new = root / RESULTS.with_name("results.new")
    shutil.rmtree(new, ignore_errors=True)
    for question, document in results.measured:
        file = new / question.suite / f"{question.name}.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(_json(_compact(document)))
    (new / RUN).write_text(_json(results.run))
    shutil.rmtree(root / RESULTS, ignore_errors=True)
    new.rename(root / RESULTS)


def texts(root: Path, *, report: bool = True) -> dict[Path, str]:
    """Return what the files must hold that are made of the results.

    Parameters
    ----------
    report : bool
        Whether to make the whole report too, which takes some seconds.
    """
    results = read(root / RESULTS)
    answers = answers_of(results)
    readme = (root / README).read_text()
    if readme.count(_BEGIN) != 1 or readme.count(_END) != 1:
        raise InvalidArgumentError("README lacks the comments around its figures", begin=_BEGIN, end=_END)
    paragraph = f"{_BEGIN}\n\n{markdown.readme_paragraph(results, answers)}\n\n{_END}"
    found = {
        PAGE: markdown.results_page(results, answers),
        PICTURE: figure.draw(answers),
        README: re.sub(f"{re.escape(_BEGIN)}.*{re.escape(_END)}", lambda _: paragraph, readme, flags=re.DOTALL),
    }
    lines = found[PAGE].count("\n")
    if lines > markdown.LINES_MAX:
        raise InvalidArgumentError("the summary has grown too long", lines=lines, at_most=markdown.LINES_MAX)
    return found | ({REPORT: render(results)} if report else {})


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
