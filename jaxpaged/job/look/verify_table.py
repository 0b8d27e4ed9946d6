"""What `jaxpaged verify` found, on the terminal."""

import rich.console

from jaxpaged.job.look.verify import Verification
from jaxpaged.job.report_table import plain

_MAX_CHARS = 2000


def show(found: Verification, console: rich.console.Console) -> None:
    """Prints each problem, then what is right."""
    for problem in found.problems:
        text = f"{plain(problem.name)}: {plain(problem.text, _MAX_CHARS)}"
        console.print(text, markup=False, highlight=False, soft_wrap=True)
    state = "finished" if found.is_finished else "running" if found.is_running else "not finished"
    console.print(
        f"{found.parts:,} of {found.units:,} parts are right, with {found.rows:,} rows; the job is "
        f"{state}; {len(found.problems):,} problems",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
