"""The reader of headers: what it accepts, and what its errors show."""

from __future__ import annotations

import pytest

from holdfast.errors import CorruptionError
from holdfast.snapshotter.fields import Fields


def test_only_notices_may_have_fields_of_a_newer_release() -> None:
    values = {"what": "x", "since_then": 1}
    with pytest.raises(CorruptionError, match=r"it has other fields than this release.*unknown=.*since_then"):
        Fields(values, "it", "what")
    assert Fields.of_notice(values, "it", "what").text("what") == "x"
    for wrong in ({"since_then": 1}, None, ["what"]):
        with pytest.raises(CorruptionError, match=r"^it has "):
            Fields.of_notice(wrong, "it", "what")


def test_no_error_repeats_a_long_text_of_the_header() -> None:
    """Whoever reads the log learns which object, which field, and how it begins."""
    fields = Fields({"shard": "s" * 100_000}, "it", "shard")
    with pytest.raises(CorruptionError) as told:
        fields.refuse("belongs elsewhere", shard=fields.text("shard"))
    assert str(told.value) == f"it belongs elsewhere, shard={'s' * 80}"
