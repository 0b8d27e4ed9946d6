"""Fail unless a pytest run really tested everything that it should have.

Usage: python check_report.py REPORT.xml, in the repository, after pytest wrote it. Exit 0 means: at
least one test ran, none failed or was skipped, and they are all tests of the repository but those
that carry a marker of the other tiers.
"""

import pathlib
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


def num_collected(markers: str) -> int:
    """How many tests of the repository fit the markers; "" for all of them."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", markers]
    listing = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    return sum("::" in line for line in listing.splitlines())


def main() -> None:
    """Check the report named on the command line; say what is wrong, if anything."""
    (report,) = map(pathlib.Path, sys.argv[1:])
    counts = report_counts(report)
    num_run = counts.pop("tests")
    if num_run < 1:
        sys.exit("pytest ran no test")
    for name, count in counts.items():
        if count:
            sys.exit(f"pytest reports {name}: {count}, expected 0")
    expected = num_collected("") - num_collected(OTHER_TIERS)
    if num_run != expected:
        sys.exit(f"{num_run} tests ran, expected {expected}: all but those marked {OTHER_TIERS}")


if __name__ == "__main__":
    main()
