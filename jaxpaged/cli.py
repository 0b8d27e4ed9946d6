"""The command line. Imports what a command needs inside the command, so that help is instant."""

import functools
import io
import signal
import sys
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, ParamSpec

import click

from jaxpaged._version import VERSION
from jaxpaged.errors import JaxPagedError

if TYPE_CHECKING:
    import rich.console

    from jaxpaged.job.progress import Progress

_P = ParamSpec("_P")

_EXIT_CODES = """
\b
Exit codes:
  0 done                          4 more row errors than max_errors
  2 wrong usage, job or input     5 the model cannot fit into memory
  3 the output is another job's   6 the output folder is in use or not ours
  1 unexpected                    130, 143 interrupted; run again to continue
"""

_OVERRIDE = click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="KEY=VALUE",
    help="Replace a key of the job file, as in sampling.max_tokens=64, as if the file said so: "
    "the value is YAML, and a relative path is relative to the file. May be repeated.",
)


def _ends_well(command: Callable[_P, int]) -> Callable[_P, None]:
    """Ends the process with the command's exit code, or with one message about what went wrong."""

    @functools.wraps(command)
    def wrapper(*args: _P.args, **kwargs: _P.kwargs) -> None:
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                # Row text may hold what the terminal's encoding does not.
                stream.reconfigure(errors="replace")
        try:
            code = command(*args, **kwargs)
        except JaxPagedError as error:
            click.echo(f"error: {error}", err=True)
            code = error.exit_code
        except KeyboardInterrupt:
            click.echo("interrupted", err=True)
            code = 128 + signal.SIGINT
        except (click.ClickException, click.exceptions.Exit, click.Abort, BrokenPipeError):
            raise  # click knows how to end on these
        except Exception:
            click.echo(traceback.format_exc(), err=True)
            message = f"error: a bug in jaxpaged {VERSION}; please report it with the lines above"
            click.echo(message, err=True)
            code = 1
        sys.exit(code)

    return wrapper


@click.group(context_settings={"help_option_names": ["-h", "--help"]}, epilog=_EXIT_CODES)
@click.version_option(VERSION, prog_name="jaxpaged")
def main() -> None:
    """Complete the prompts of Parquet tables with a language model, offline.

    \b
    Example:
      jaxpaged run jobs/eval.yaml
    """


@main.command()
@click.argument("job", type=click.Path())
@_OVERRIDE
@click.option("--quiet", is_flag=True, help="Print nothing but errors.")
@_ends_well
def run(job: str, overrides: tuple[str, ...], quiet: bool) -> int:
    """Run the job in the file JOB, or continue it where it was interrupted.

    \b
    Examples:
      jaxpaged run jobs/eval.yaml
      jaxpaged run jobs/eval.yaml --set sampling.max_tokens=16 --set output.path=../out/short

    Progress goes to stderr, the summary to stdout. Ctrl-C stops after the step that is running and
    keeps the finished parts; the same command continues behind them.
    """
    from jaxpaged.job import report_table
    from jaxpaged.job.interrupt import JobInterrupted, StopRequest
    from jaxpaged.job.runner import run_job
    from jaxpaged.job.spec import JobSpec

    spec = JobSpec.from_file(job, overrides)
    stop = StopRequest(on_first=_say_stopping)
    try:
        with stop:
            result = run_job(spec, progress=_progress(quiet), should_stop=stop)
    except JobInterrupted as error:
        click.echo(f"interrupted: {error}", err=True)
        return stop.exit_code
    if quiet:
        return 0
    if result.state == "already finished":
        click.echo(f"already finished, nothing to do: {result.output.path}")
    report_table.show(result, _console())
    return 0


@main.command()
@click.argument("job", type=click.Path())
@_OVERRIDE
@click.option(
    "--rows", default=3, show_default=True, type=click.IntRange(0), help="Prompts to show."
)
@_ends_well
def validate(job: str, overrides: tuple[str, ...], rows: int) -> int:
    """Check the job in the file JOB and show its columns and first prompts.

    \b
    Example:
      jaxpaged validate jobs/eval.yaml --rows 5

    Reads the input's schema and the model's tokenizer; loads no weights.
    """
    from jaxpaged.job import validate as validation
    from jaxpaged.job.spec import JobSpec

    found = validation.validate(JobSpec.from_file(job, overrides), rows)
    validation.show(found, _console())
    return found.exit_code


@main.command()
@_ends_well
def version() -> int:
    """Print the versions of jaxpaged and of what its results depend on.

    \b
    Example:
      jaxpaged version
    """
    from jaxpaged.job import versions

    for name, number in versions.installed().items():
        click.echo(f"{name} {number}")
    return 0


def _progress(quiet: bool) -> "Progress":
    import rich.console

    from jaxpaged.job import progress

    console = rich.console.Console(stderr=True)
    if quiet:
        return progress.SilentProgress()
    return progress.BarProgress(console) if console.is_terminal else progress.LineProgress(console)


def _console() -> "rich.console.Console":
    """Stdout; wide enough never to fold a line where it is no terminal."""
    import rich.console

    console = rich.console.Console()
    return console if console.is_terminal else rich.console.Console(width=1000)


def _say_stopping() -> None:
    click.echo("stopping after this step; once more to stop at once", err=True)
