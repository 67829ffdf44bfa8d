"""The dashboard against what state servers show while a query runs."""

from __future__ import annotations

import json
import re
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from holdfast.spark_integration.client.connection import StateClient
from tests.servers import downloads
from tests.servers.programs import Program, answer_of, free_ports, wait_until
from tests.source_tree import ROOT
from tests.spark.conftest import Lab
from tests.spark.queries.test_metrics import ended

pytestmark = pytest.mark.spark

DASHBOARD = json.loads((ROOT / "docs/metrics-dashboard.json").read_text())
DOCUMENT = (ROOT / "docs/metrics.md").read_text()
#: What Grafana puts in, and the label that Prometheus gives each target.
VARIABLES = {"$query": ".*", "$operator": "totals", "$__rate_interval": "30s"}
NAME = re.compile(r"holdfast_\w+")


def expressions() -> list[str]:
    """Return every expression of the dashboard, and of the alerts in the document."""
    shown = [target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", ())]
    alerts = re.findall(r"```promql\n(.*?)```", DOCUMENT, re.DOTALL)
    alerting = [line.partition("  #")[0].rpartition(">")[0] for text in alerts for line in text.splitlines()]
    return [*shown, *alerting]


def filled(expression: str) -> str:
    for name, value in VARIABLES.items():
        expression = expression.replace(name, value)
    return expression


@pytest.fixture
def port(lab: Lab) -> int:
    """Return where the state server of a query answers that has run some micro-batches."""
    lab.configure({"metrics.port": str(free_ports(1)[0])})
    for i in range(3):
        lab.feed([("a", i), (str(i), i)])
    ended(lab, lab.totals())
    clients = map(StateClient, lab.local.glob("holdfast-*/executor-*"))
    [found] = {client.call("statistics")["metrics_port"] for client in clients}
    return int(found)


def scrape(port: int) -> Any:
    answer = answer_of(f"http://127.0.0.1:{port}/metrics")
    assert answer is not None
    return list(text_string_to_metric_families(answer.decode()))


def test_all_that_the_dashboard_and_the_document_name_is_shown(port: int) -> None:
    """And all that is shown is explained."""
    families = scrape(port)
    labels = {s.name: set(s.labels) for f in families for s in f.samples if not s.name.endswith("_created")}
    used = {name for expression in expressions() for name in NAME.findall(expression)}
    used |= {name for variable in DASHBOARD["templating"]["list"] for name in NAME.findall(str(variable.get("query")))}
    assert used <= labels.keys()
    for expression in expressions():
        asked = set(re.findall(r"(\w+)=~", expression))
        for by in re.findall(r"by \((.*?)\)", expression):
            asked |= set(by.replace(" ", "").split(","))
        assert all(asked - {"instance"} <= labels[name] for name in NAME.findall(expression)), expression
    explained = set(NAME.findall(DOCUMENT))
    assert {name.removesuffix("_total") for name in labels} <= {name.removesuffix("_total") for name in explained}


@pytest.mark.all
def test_names_follow_the_conventions_of_openmetrics(port: int) -> None:
    """Counters end in _total, and units are base units."""
    for family in scrape(port):
        assert family.documentation.endswith("."), family.name
        assert family.type in ("counter", "gauge")
        assert not re.search(r"_(ms|us|ns|millis|kb|mb|minutes)\b", family.name), family.name
        is_total = [sample.name.endswith("_total") for sample in family.samples]
        assert all(is_total) if family.type == "counter" else not any(is_total), family.name


class Prometheus:
    """A Prometheus that scrapes one target each second."""

    def __init__(self, folder: Path, target_port: int) -> None:
        [port] = free_ports(1)
        self.url = f"http://127.0.0.1:{port}"
        scraping = {"job_name": "holdfast", "static_configs": [{"targets": [f"127.0.0.1:{target_port}"]}]}
        configuration = {"global": {"scrape_interval": "1s"}, "scrape_configs": [scraping]}
        (folder / "prometheus.json").write_text(json.dumps(configuration))  # which is YAML, too
        command = [
            str(downloads.prometheus()),
            f"--config.file={folder / 'prometheus.json'}",
            f"--storage.tsdb.path={folder / 'tsdb'}",
            f"--web.listen-address=127.0.0.1:{port}",
        ]
        self.program = Program(command, folder / "prometheus.log", {"HOME": str(folder)}, folder)

    def query(self, expression: str) -> list[Any]:
        """Return what an expression gives now; nothing while the server is not ready."""
        answer = answer_of(f"{self.url}/api/v1/query?query={urllib.parse.quote(expression)}")
        return [] if answer is None else json.loads(answer)["data"]["result"]


@pytest.fixture
def prometheus(port: int, tmp_path: Path) -> Iterator[Prometheus]:
    with downloads.skipped_where_missing():
        server = Prometheus(tmp_path, port)
    try:
        yield server
    finally:
        server.program.stop()


@pytest.mark.all  # its build takes minutes
@pytest.mark.prometheus
@pytest.mark.slow(15)
def test_prometheus_answers_every_expression(prometheus: Prometheus) -> None:
    def is_scraped_twice() -> bool:
        return bool(prometheus.query("rate(holdfast_rows_total[30s])"))

    wait_until(is_scraped_twice, lambda: [prometheus.program])
    found = [result["value"][1] for result in prometheus.query('holdfast_rows_total{operator="totals"}')]
    assert "6" in found, "other queries of this session have the same operator"
    empty = [expression for expression in expressions() if not prometheus.query(filled(expression))]
    assert empty == []
