"""Writes the table of docs/families.md: how near this package comes to transformers.

    PYTHONPATH=. python scripts/parity_table.py --out docs/families.md

Runs the tiny models of tests/golden/families.json by XLA and by the kernels for CPUs, as the tests
do. Takes about two minutes on two cores.
"""

import argparse
import dataclasses
import datetime
import pathlib
import platform
import sys

import jax

ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

import parity  # noqa: E402 - found by the line above

BEGIN = "<!-- Between these marks scripts/parity_table.py writes. -->\n"
END = "<!-- End of what it writes. -->"
COLUMNS = (
    "case",
    "`model_type`",
    "features",
    "logits, XLA",
    "logits, CPU kernels",
    "decoded, XLA",
    "decoded, CPU kernels",
    "tokens equal",
)


def main() -> None:
    """Parses the arguments, measures and writes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--out", type=pathlib.Path, required=True, help="the page that has the marks"
    )
    options = parser.parse_args()
    rows = []
    for name, case in parity.cases().items():
        kinds = ("xla", "llvm") if name in parity.served_by_kernels() else ("xla",)
        found = [parity.measure(case, kind) for kind in kinds]
        print(name, *map(dataclasses.astuple, found))
        missing = [parity.NOT_SERVED] * (2 - len(kinds))
        logits = [f"{one.logit_error:.0e}" for one in found] + missing
        decoded = [f"{one.logprob_error:.0e}" for one in found] + missing
        equal = "yes" if all(one.tokens_equal for one in found) else "NO"
        cells = [f"`{name}`", case.config["model_type"], parity.FEATURES[name]]
        rows.append(" | ".join([*cells, *logits, *decoded, equal]))
    made = (
        f"Written by `scripts/parity_table.py` on {datetime.date.today()}, {platform.machine()}, "
        f"Python {platform.python_version()}, JAX {jax.__version__}."
    )
    heads = [" | ".join(COLUMNS), " | ".join(["---"] * 3 + ["--:"] * 4 + ["---"])]
    table = "".join(f"| {row} |\n" for row in [*heads, *rows])
    before, rest = options.out.read_text().split(BEGIN)
    behind = rest.split(END)[1]
    options.out.write_text(f"{before}{BEGIN}{made}\n\n{table}{END}{behind}")


if __name__ == "__main__":
    main()
