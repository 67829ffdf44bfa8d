"""Figures in words for the summary and the tables; the names and colours of engines in reports."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass


def times(ratio: float) -> str:
    """Return a ratio with two significant digits: 4.1, 0.85, 23, 0.0041."""
    if ratio < 0.0995:
        return f"{ratio:.2g}"
    return f"{ratio:.0f}" if ratio >= 9.95 else f"{ratio:.1f}" if ratio >= 0.995 else f"{ratio:.2f}"


def count(value: float) -> str:
    """Return a count in words: 20 million, 100,000."""
    for size, word in ((1e9, "billion"), (1e6, "million")):
        if value >= size:
            return f"{value / size:.3g} {word}"
    return f"{value:,.0f}"


def number(value: float) -> str:
    """Abbreviate a number: 667,928 becomes 668k."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size * 0.9995:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"


def size(value_bytes: float) -> str:
    """Return a number of bytes with a suitable unit."""
    for unit_bytes, unit in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if abs(value_bytes) >= unit_bytes:
            shown = value_bytes / unit_bytes
            return f"{shown:,.0f} {unit}" if shown >= 100 else f"{shown:.1f} {unit}"
    return f"{value_bytes:,.0f} B"


def duration(ms: float) -> str:
    """Return a time with a suitable unit."""
    return f"{ms / 1000:.2f} s" if ms >= 1000 else f"{ms:.0f} ms" if ms >= 10 else f"{ms:.1f} ms"


def listed(parts: Sequence[str]) -> str:
    """List parts in a sentence: a, b and c."""
    return ", ".join(parts[:-1]) + f" and {parts[-1]}" if len(parts) > 1 else "".join(parts)


def of_field(job_field: str) -> str:
    """Return a job's field in words: ``fill_rows`` is fill rows, ``store_latency_ms`` store latency, ms."""
    return re.sub(r"_(ms|mb|bytes)$", r", \1", job_field).replace("_", " ")


_BACKENDS = ("memory", "filesystem", "rocksdb")
# Names without the backend, by the longest prefix of an engine's name that matches.
_KINDS = {
    "holdfast": "holdfast",
    "pandas": "holdfast by key",
    "store": "holdfast's store alone",
    "nexmark": "holdfast",
    "nexmark-spark": "Spark",
    "operator": "holdfast",
    "spark-operator": "Spark's operator",
    "floor": "the floor: no state",
    "spark-agg": "Spark's aggregation",
    "spark-pandas": "Spark's applyInPandasWithState",
    "spark-aiwps": "Spark's applyInPandasWithState",
    "spark-tws": "Spark's transformWithState",
    "spark": "Spark",
    "flink": "Flink",
    "flink-sql": "Flink SQL",
    "flink-process": "PyFlink's process function",
    "pathway": "Pathway",
    "bytewax": "Bytewax",
    "quixstreams": "Quix Streams",
}
_OURS = ("holdfast", "pandas", "store", "nexmark", "operator")
# Where other engines keep state.
_STORES = {"rocksdb": "RocksDB", "hdfs": "HDFSBacked", "heap": "its heap"}
_DETAILS = {
    "row": "by Row",
    "pandas": "by pandas",
    "s3": "S3",
    "count": "counting",
    "backlog": "in pieces",
    "volatile": "not surviving a kill",
}
# Words that contain a hyphen.
_OF_SEVERAL_WORDS = ("by-key", "mini-batch")
_HUES = {"spark": "spark", "floor": "floor", "quixstreams": "quix"}
_COLOURS = ("memory", "filesystem", "rocksdb", "spark", "floor", "flink", "pathway", "bytewax", "quix", "other")


@dataclass(frozen=True)
class Name:
    """An engine's name in reports, its colour in the style sheet, and holdfast's backend, empty for other engines."""

    text: str
    hue: str
    backend: str = ""

    @property
    def ours(self) -> bool:
        return bool(self.backend)


def name_of(engine: str, label: str | None = None) -> Name:
    """Return the name of an engine, or of one of its entries, whose label may extend it."""
    kind = _kind_of(engine)
    rest = re.sub("|".join(_OF_SEVERAL_WORDS), lambda words: words[0].replace("-", " "), engine.removeprefix(kind))
    details = [part for part in rest.split("-") if part] if kind else []
    backend = next((part for part in details if part in _BACKENDS), "") if kind in _OURS else ""
    stores = [part for part in details if part == backend or part in _STORES]
    words = [_DETAILS.get(part, part) for part in details if part not in stores]
    on = [part if part == backend else _STORES[part] for part in stores]
    text = ", ".join([" on ".join([_KINDS[kind], *on]), *words]) if kind else engine
    first = kind.split("-")[-1] if kind == "nexmark-spark" else kind.partition("-")[0]
    hue = backend or _HUES.get(first, first if first in _COLOURS else "other")
    if label is not None and label != engine:
        text = f"{text}{label.removeprefix(engine)}" if label.startswith(engine) else label
    return Name(text, hue, backend)


def _kind_of(engine: str) -> str:
    return max((kind for kind in _KINDS if f"{engine}-".startswith(f"{kind}-")), key=len, default="")
