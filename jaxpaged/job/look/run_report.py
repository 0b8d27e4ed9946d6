"""The report that an output's last run left there, whichever version wrote it.

Values are asked for by name: what a version does not write, or writes as something else, is None.
"""

import dataclasses
import json
from collections.abc import Iterable, Mapping
from typing import Any

from jaxpaged.errors import OutputConflictError
from jaxpaged.job.output import output_view
from jaxpaged.job.tally import ScoreCount
from jaxpaged.storage.store import Store

_REMEDY = "For a finished job `jaxpaged run JOB --repair` writes it anew, without speeds"

# No figure of a run is above this.
_MOST = 2**63

_EXPECTED = ("report_version", "output", "run", "job")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunReport:
    """A report as it is written.

    Attributes:
        values: The JSON object.
    """

    values: Mapping[str, Any]

    def value(self, *path: str) -> object:
        """What stands under these keys, one inside the other; None if nothing does."""
        found: object = self.values
        for key in path:
            found = found.get(key) if isinstance(found, dict) else None
        return found

    def number(self, *path: str) -> float | int | None:
        """The number there."""
        return _number(self.value(*path))

    def text(self, *path: str) -> str | None:
        """The text there."""
        found = self.value(*path)
        return found if isinstance(found, str) else None

    def counts(self, *path: str) -> dict[str, int]:
        """The whole numbers of the group there, by name."""
        found = self.value(*path)
        numbers = found.items() if isinstance(found, dict) else ()
        return _counts(numbers)

    def error_counts(self) -> dict[str, int]:
        """Failed rows by code."""
        errors = _objects(self.value("errors"))
        return _counts((str(error.get("code")), error.get("count")) for error in errors)

    def scores(self) -> dict[tuple[str, str | None], ScoreCount]:
        """By metric and group, None for all rows; in the report's order."""
        found: dict[tuple[str, str | None], ScoreCount] = {}
        for score in _objects(self.value("scores")):
            metric, groups = str(score.get("metric")), score.get("by")
            named = groups.items() if isinstance(groups, dict) else ()
            for group, count in ((None, score.get("overall")), *named):
                if (known := _score(count)) is not None:
                    found[metric, group] = known
        return found


def read(store: Store) -> RunReport:
    """The report of an output of jaxpaged's.

    Raises:
        OutputConflictError: There is none, or what is there is no report.
        StorageError: It cannot be read.
    """
    place = f"{store.url}/{output_view.REPORT}"
    data = store.read(output_view.REPORT)
    if data is None:
        raise OutputConflictError(
            f"{place} is missing: a run writes it when it ends, and none has; run the job to its "
            f"end (`jaxpaged status {store.url}` says how far it is). {_REMEDY}"
        )
    try:
        values = json.loads(data, parse_constant=lambda name: None)
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, dict) or any(key not in values for key in _EXPECTED):
        raise OutputConflictError(
            f"{place} is no report of jaxpaged's: expected a JSON object with "
            f"{', '.join(_EXPECTED)}; restore the file. {_REMEDY}"
        )
    return RunReport(values=values)


def _objects(value: object) -> list[dict[str, Any]]:
    items = value if isinstance(value, list) else []
    return [item for item in items if isinstance(item, dict)]


def _counts(items: Iterable[tuple[str, object]]) -> dict[str, int]:
    found = ((name, _count(value)) for name, value in items)
    return {name: count for name, count in found if count is not None}


def _score(value: object) -> ScoreCount | None:
    if not isinstance(value, dict):
        return None
    correct, scored = _count(value.get("correct")), _count(value.get("scored"))
    if correct is None or scored is None:
        return None
    return ScoreCount(correct=correct, scored=scored)


def _count(value: object) -> int | None:
    found = _number(value)
    return found if isinstance(found, int) else None


def _number(value: object) -> float | int | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value if abs(value) <= _MOST else None
