"""What gates put out: what is wrong, on the console, and their tables, into a page."""

from collections.abc import Sequence

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table


def fail_on(problems: Sequence[str], console: Console) -> None:
    """Ends the program, saying what is wrong, if anything is."""
    if problems:
        console.print(f"{len(problems)} problems:", style="bold red")
        for problem in problems:
            console.print(f"- {escape(problem)}", soft_wrap=True)
        raise SystemExit(1)


def table_text(table: Table) -> str:
    """A table in Markdown, from one that has such a box."""
    console = Console(width=250, color_system=None)
    with console.capture() as capture:
        console.print(table)
    return "\n".join(line.strip() for line in capture.get().splitlines() if line.strip())


def replace_marked(page: str, text: str, markers: tuple[str, str]) -> str:
    """The page with the text between two markers, which stay.

    Raises:
        click.ClickException: The markers are not there, each once.
    """
    begin, end = markers
    if page.count(begin) != 1 or page.count(end) != 1 or page.index(begin) > page.index(end):
        raise click.ClickException(f"the page needs one {begin} and, behind it, one {end}")
    before, _, rest = page.partition(begin)
    return f"{before}{begin}\n\n{text}\n\n{end}{rest.partition(end)[2]}"
