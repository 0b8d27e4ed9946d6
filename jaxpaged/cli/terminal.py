"""What commands write to: stdout for what they give, stderr for how they get on."""

import json
from collections.abc import Callable
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    import rich.console

    from jaxpaged.job.progress import Progress


def show(as_json: object, show: "Callable[[rich.console.Console], None]") -> None:
    """Prints a result: as JSON if that is given, else as it shows itself on the console."""
    if as_json is None:
        show(console())
    else:
        click.echo(json.dumps(as_json, indent=1, allow_nan=False))


def progress(quiet: bool) -> "Progress":
    """How a job gets on, on stderr: a bar where that is a terminal, else lines."""
    import rich.console

    from jaxpaged.job.progress import BarProgress, LineProgress, SilentProgress

    if quiet:
        return SilentProgress()
    errors = rich.console.Console(stderr=True)
    return BarProgress(errors) if errors.is_terminal else LineProgress(errors)


def console() -> "rich.console.Console":
    """Stdout; wide enough never to fold a line where it is no terminal."""
    import rich.console

    output = rich.console.Console()
    return output if output.is_terminal else rich.console.Console(width=1000)
