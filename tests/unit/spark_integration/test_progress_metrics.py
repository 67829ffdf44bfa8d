"""Observed metrics, as classic Spark and Spark Connect hand them over."""

from __future__ import annotations

import re

from pyspark.sql import Row

from holdfast.spark_integration.client.measures import METRICS, of_group
from holdfast.spark_integration.progress_metrics import by_name
from holdfast.spark_integration.transport.observed import is_observed
from tests.source_tree import ROOT


def test_metrics_have_the_same_names_everywhere() -> None:
    columns = [{"name": name, "type": "long", "nullable": True, "metadata": {}} for name in ("shards", "rows")]
    over_connect = Row(values=[2, None], schema={"type": "struct", "fields": columns})
    assert by_name(over_connect) == by_name(Row(shards=2, rows=None)) == {"shards": 2, "rows": None}


def test_what_a_state_server_remembers_has_the_same_names_and_units() -> None:
    """What it does not know is null, not zero."""
    values = {"rows": 5, "call_us": 1_500_000, "snapshot_lag_versions": 3, "of a later release": 7}
    found = of_group(2, values)
    assert list(found) == [metric.name for metric in METRICS]
    known = {name: value for name, value in found.items() if value is not None}
    assert known == {"shards": 2, "rows": 5, "call_seconds": 1.5, "snapshot_lag_versions_max": 3}


def test_the_document_explains_each_metric_in_order() -> None:
    rows = re.findall(r"^\| (`.*?`) \|", (ROOT / "docs/metrics.md").read_text(), re.MULTILINE)
    assert re.findall(r"`(\w+)`", " ".join(rows)) == [metric.name for metric in METRICS]


def test_what_others_observe_is_not_ours() -> None:
    """A user may observe something under a name that begins as ours do."""
    assert is_observed({metric.name: 1 for metric in METRICS} | {"more": 1})
    assert not is_observed(by_name(Row(rows=3, shards=1)))
    assert not is_observed(by_name(None))
