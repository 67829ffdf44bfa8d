"""The reader of headers: what it accepts, and what its errors show."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import pytest

from holdfast.backends.base import Pointer
from holdfast.errors import CorruptionError
from holdfast.snapshotter.fields import NOT_STORED, Coding, Fields, SignedInt, Stored, refuse


@dataclass(frozen=True)
class Inner(Stored):
    flag: bool
    at: Pointer

    def require(self, header: Fields) -> None:
        if self.at.version == 13:
            header.refuse("has an unlucky version")


BINARY = Coding(Annotated[str, re.compile("[01]+")], lambda text: int(text, 2), "{:b}".format, "binary")


@dataclass(frozen=True)
class Outer(Stored):
    """A value of each kind that a header holds."""

    name: Annotated[str, re.compile("[a-z]+")]
    count: int
    shard: Annotated[int, range(4)]
    since: SignedInt | None
    inner: Inner | None
    each: tuple[Inner, ...]
    pair: Annotated[list[str], 2]
    sizes: Mapping[str, int]
    free: Mapping[str, Any]
    bits: Annotated[int, BINARY]
    last: Annotated[frozenset[str], Coding(list[str], frozenset, sorted)]
    made: Annotated[str, NOT_STORED] = ""


INNER = Inner(flag=True, at=Pointer(7, "00c0ffee00c0ffee"))
OUTER = Outer(
    "abc", 0, 3, -5, INNER, (INNER, INNER), ["a", "b"], {"x": 1}, {"any": [None]}, 5, frozenset({"b", "a"}), "now"
)
JSON = json.loads(json.dumps(OUTER.to_json()))


def test_what_is_stored_is_read_as_it_was() -> None:
    inner = {"flag": True, "at": "7-00c0ffee00c0ffee"}
    plain = {"name": "abc", "count": 0, "shard": 3, "since": -5, "pair": ["a", "b"], "sizes": {"x": 1}}
    coded = {"free": {"any": [None]}, "binary": "101", "last": ["a", "b"]}
    assert {**plain, **coded, "inner": inner, "each": [inner, inner]} == JSON
    assert Outer.read(JSON, "it") == Outer(**{**vars(OUTER), "made": ""})
    assert Outer.read(JSON | {"inner": None, "since": None}, "it").inner is None


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("name", [None, 1, "", "A", "abc\n"]),
        ("count", [None, "1", True, 1.0, -1, 1 << 62]),
        ("shard", [4, -1, False, None]),
        ("since", ["1", 1 << 62, 0.5]),
        ("pair", [None, ["a"], ["a", 1], "ab", {"a": 1, "b": 2}]),
        ("sizes", [None, [], {"x": -1}, {"x": None}]),
        ("free", [None, []]),
        ("each", [None, {}, "x"]),
        ("binary", [None, 5, "", "12"]),
        ("last", [None, "a", [1]]),
    ],
)
def test_a_value_of_another_kind_is_refused_by_its_name(field: str, values: list[object]) -> None:
    for value in values:
        name = "bits" if field == "binary" else field
        with pytest.raises(CorruptionError, match=f"^it has an invalid field, field=({field}|{name}) found="):
            Outer.read(JSON | {field: value}, "it")


@pytest.mark.parametrize("field", ["inner", "each"])
def test_an_object_inside_is_read_as_strictly(field: str) -> None:
    for wrong, says in (
        ({"flag": 1}, "an invalid field, field=flag found=1"),
        ({"at": "7"}, "an invalid field, field=at"),
        ({"at": f"13-{'0' * 16}"}, "an unlucky version"),
        ({"more": 1}, "different fields than this release.*unknown=.*more"),
    ):
        inner = JSON["inner"] | wrong
        with pytest.raises(CorruptionError, match=f"^it has {says}"):
            Outer.read(JSON | {field: inner if field == "inner" else [inner]}, "it")


@dataclass(frozen=True)
class Strict(Stored):
    what: str


@dataclass(frozen=True)
class Notice(Stored, notice=True):
    what: str


def test_only_notices_may_have_fields_of_a_newer_release() -> None:
    values = {"what": "x", "since_then": 1}
    with pytest.raises(CorruptionError, match=r"it has different fields than this release.*unknown=.*since_then"):
        Strict.read(values, "it")
    assert Notice.read(values, "it") == Notice("x")
    for wrong in ({"since_then": 1}, None, ["what"]):
        with pytest.raises(CorruptionError, match=r"^it has "):
            Notice.read(wrong, "it")


def test_no_error_repeats_a_long_text_of_the_header() -> None:
    """Whoever reads the log learns which object, which field, and how it begins."""
    with pytest.raises(CorruptionError) as told:
        refuse("it", "belongs elsewhere", shard="s" * 100_000)
    assert str(told.value) == f"it belongs elsewhere, shard={'s' * 80}"
