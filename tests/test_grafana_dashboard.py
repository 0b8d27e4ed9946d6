"""The dashboard asks for metrics and labels that a run has, and shows all of them."""

import json
import pathlib
import re
from typing import Any

import pytest
from scrape import Scrape, fetch
from scripted_engine import ScriptedStats

from jaxpaged.job import metrics_server, outcomes
from jaxpaged.job.metrics_progress import MetricsProgress
from jaxpaged.job.progress import SilentProgress, Snapshot

DASHBOARD = pathlib.Path(__file__).parents[1] / "scripts/grafana_dashboard.json"
# What Prometheus itself adds to each sample.
TARGET_LABELS = {"job", "instance"}
NAME = r"\b(?:jaxpaged|process|python)_\w+"


@pytest.fixture(scope="module")
def dashboard() -> dict[str, Any]:
    return json.loads(DASHBOARD.read_text())


@pytest.fixture(scope="module")
def scrape() -> Scrape:
    """All metrics that a run can have."""
    progress = MetricsProgress(SilentProgress())
    figures = ("rows", "resumed", "errors", "prompt_tokens", "completion_tokens")
    load = ("running", "waiting", "used_blocks", "num_blocks")
    progress.begin(total=1, done=0, journaled=0)
    numbers: dict[str, Any] = dict.fromkeys((*figures, *load), 0)
    progress.update(Snapshot(**numbers, outcomes=outcomes.zeros(), engine=ScriptedStats()))
    with metrics_server.serve(progress, host="127.0.0.1", port=0) as url:
        return fetch(url)


def panels(dashboard: dict[str, Any]) -> list[dict[str, Any]]:
    """The panels that show something."""
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


def queries(dashboard: dict[str, Any]) -> list[str]:
    """The PromQL of all panels and variables."""
    asked = [target["expr"] for panel in panels(dashboard) for target in panel["targets"]]
    variables = dashboard["templating"]["list"]
    return asked + [one["query"]["query"] for one in variables if one["type"] == "query"]


def test_it_can_be_imported(dashboard) -> None:
    assert dashboard["title"] == "jaxpaged run"
    assert dashboard["uid"] == "jaxpaged-run"
    # Grafana gives the number; one in the file would take another dashboard's place.
    assert dashboard["id"] is None
    assert dashboard["schemaVersion"] >= 36
    source, *others = dashboard["templating"]["list"]
    assert (source["type"], source["query"]) == ("datasource", "prometheus")
    chosen = {"type": "prometheus", "uid": f"${{{source['name']}}}"}
    assert all(variable["datasource"] == chosen for variable in others)
    numbers = [panel["id"] for panel in dashboard["panels"]]
    assert sorted(set(numbers)) == sorted(numbers)
    for panel in panels(dashboard):
        assert panel["datasource"] == chosen
        assert panel["title"]
        assert panel["description"]
        assert panel["fieldConfig"]["defaults"]["unit"]
        assert [target["datasource"] for target in panel["targets"]] == [chosen] * len(
            panel["targets"]
        )
        references = [target["refId"] for target in panel["targets"]]
        assert sorted(set(references)) == references


def test_panels_do_not_overlap(dashboard) -> None:
    taken: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert max(x for x, _ in cells) < 24, panel["title"]
        assert not cells & taken, panel["title"]
        taken |= cells


def test_it_refers_to_nothing_outside(dashboard) -> None:
    assert "://" not in DASHBOARD.read_text()
    assert dashboard["links"] == []
    assert "__inputs" not in dashboard


def test_every_metric_that_it_asks_for_exists(dashboard, scrape) -> None:
    asked = {name for query in queries(dashboard) for name in re.findall(NAME, query)}

    assert asked - scrape.names("") == set()


def test_every_metric_that_a_run_has_is_shown(dashboard, scrape) -> None:
    asked = {name for query in queries(dashboard) for name in re.findall(NAME, query)}

    assert scrape.names() - asked == set()


def test_every_label_and_value_that_it_asks_for_exists(dashboard, scrape) -> None:
    known: dict[str, set[str]] = {}
    for _, labels in scrape.values:
        for label, value in labels:
            known.setdefault(label, set()).add(value)
    seen = 0
    for query in queries(dashboard):
        for grouping in re.findall(r"\b(?:by|without) \(([^)]*)\)", query):
            assert set(grouping.split(", ")) <= set(known), query
            seen += 1
        for label, operator, value in re.findall(r'(\w+)(=~?)"([^"]*)"', query):
            assert label in TARGET_LABELS if operator == "=~" else value in known[label], query
            seen += 1
    for panel in panels(dashboard):
        for target in panel["targets"]:
            assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= set(known)
    assert seen > 50


def test_counters_are_asked_for_as_rates_or_totals_and_gauges_never_as_rates(
    dashboard, scrape
) -> None:
    gauges = {name for name, family in scrape.families.items() if family.type == "gauge"}
    for query in queries(dashboard):
        rated = set(re.findall(rf"rate\(({NAME})", query))
        assert not rated & gauges, query
        assert all(re.search(r"_(total|bucket|sum|count)$", name) for name in rated), query


def test_it_can_be_narrowed_to_a_run_everywhere(dashboard) -> None:
    selector = r'\{job=~"\$job", instance=~"\$instance"'
    for panel in panels(dashboard):
        for target in panel["targets"]:
            names = re.findall(NAME, target["expr"])
            assert len(re.findall(selector, target["expr"])) == len(names), target["expr"]
