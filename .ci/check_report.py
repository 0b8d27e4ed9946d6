"""Fail unless a pytest run really tested everything that it should have.

Usage: python check_report.py REPORT.xml LOG, in the repository, after pytest wrote both. Exit 0
means: at least one test ran, none failed or was skipped, and what was deselected is exactly what
carries a marker of the other tiers.
"""

import pathlib
import re
import subprocess
import sys
from xml.etree import ElementTree

OTHER_TIERS = "gpu or slow"


def report_counts(report: pathlib.Path) -> dict[str, int]:
    """Sums of `tests`, `skipped`, `failures` and `errors` over the suites of a JUnit report."""
    suites = list(ElementTree.parse(report).iter("testsuite"))
    return {
        name: sum(int(suite.get(name, 0)) for suite in suites)
        for name in ("tests", "skipped", "failures", "errors")
    }


def num_deselected(log: pathlib.Path) -> int:
    """How many tests pytest's closing line says were deselected."""
    closing = log.read_text(errors="replace").rstrip().rpartition("\n")[2]
    found = re.search(r"(\d+) deselected", closing)
    return int(found[1]) if found else 0


def num_in_other_tiers() -> int:
    """How many tests carry a marker that keeps them out of the default tier."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", OTHER_TIERS]
    listing = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    return sum("::" in line for line in listing.splitlines())


def main() -> None:
    """Check the report and the log named on the command line; say what is wrong, if anything."""
    report, log = map(pathlib.Path, sys.argv[1:])
    counts = report_counts(report)
    if counts.pop("tests") < 1:
        sys.exit("pytest ran no test")
    for name, count in counts.items():
        if count:
            sys.exit(f"pytest reports {name}: {count}, expected 0")
    deselected, allowed = num_deselected(log), num_in_other_tiers()
    if deselected != allowed:
        sys.exit(f"{deselected} tests were deselected, but {allowed} are marked {OTHER_TIERS}")


if __name__ == "__main__":
    main()
