"""docs/report.md names every field of report.json."""

import dataclasses
import pathlib
import re

import pytest

from jaxpaged.engine.stats import EngineStats
from jaxpaged.job import report, slow_rows, tally, timeline

DOCS = (pathlib.Path(__file__).parents[2] / "docs" / "report.md").read_text()


def section(title: str) -> str:
    """What stands under a title, up to the next one."""
    found = re.search(rf"^#+ {re.escape(title)}$(.*?)(?=^#|\Z)", DOCS, re.MULTILINE | re.DOTALL)
    assert found is not None, title
    return found[1]


@pytest.mark.parametrize(
    ("kind", "title"),
    [
        (report.JobReport, "report.json, version 3"),
        (report.OutputFacts, "output"),
        (tally.AdapterCount, "output"),
        (tally.ErrorCount, "errors"),
        (tally.RowError, "errors"),
        (tally.MetricScore, "scores"),
        (tally.ScoreCount, "scores"),
        (report.RunFacts, "run"),
        (slow_rows.SlowRow, "run"),
        (timeline.Timeline, "run.timeline"),
        (EngineStats, "run.engine"),
        (report.IdentityFacts, "identity"),
    ],
)
def test_every_field_is_described_where_it_belongs(kind, title):
    names = {field.name for field in dataclasses.fields(kind)} - {"samples", "has_page"}
    assert [name for name in sorted(names) if f"`{name}`" not in section(title)] == []


def test_the_version_is_that_of_the_code():
    assert f"| `report_version` | {report.REPORT_VERSION} |" in DOCS
    assert f"## report.json, version {report.REPORT_VERSION}\n" in DOCS
