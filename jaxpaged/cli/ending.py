"""How commands end: the exit code, and one message about what went wrong."""

import dataclasses
import functools
import io
import signal
import sys
import traceback
from collections.abc import Callable
from typing import ParamSpec

import click

from jaxpaged._version import VERSION
from jaxpaged.errors import JaxPagedError

_P = ParamSpec("_P")

EXIT_CODES = """
\b
Exit codes:
  0 done                          4 more row errors than max_errors
  2 wrong usage, job or input     5 the model cannot fit into memory
  3 the output is another job's   6 the output is in use, damaged or not ours
  1 unexpected, or a failed disk  130, 143 interrupted; run again to continue
  (of diff: 1 the rows differ)
"""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """What ended a command; the traceback is there if it should not have happened."""

    exit_code: int
    message: str
    traceback: str | None = None


def failure(error: BaseException) -> Failure | None:
    """What the error comes to; None for those that click knows how to end on."""
    if isinstance(error, JaxPagedError):
        return Failure(exit_code=error.exit_code, message=str(error))
    if isinstance(error, KeyboardInterrupt):
        return Failure(exit_code=128 + signal.SIGINT, message="interrupted")
    not_ours = (click.ClickException, click.exceptions.Exit, click.Abort, BrokenPipeError)
    if isinstance(error, not_ours) or not isinstance(error, Exception):
        return None
    message = f"a bug in jaxpaged {VERSION}; please report it with its traceback"
    return Failure(
        exit_code=1,
        message=message,
        traceback="".join(traceback.format_exception(error)),
    )


def ends_well(command: Callable[_P, int]) -> Callable[_P, None]:
    """Ends the process with the command's exit code, or with one message about what went wrong."""

    @functools.wraps(command)
    def wrapper(*args: _P.args, **kwargs: _P.kwargs) -> None:
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                # Row text may hold what the terminal's encoding does not.
                stream.reconfigure(errors="replace")
        try:
            code = command(*args, **kwargs)
        except BaseException as error:
            found = failure(error)
            if found is None:
                raise
            if found.traceback is not None:
                click.echo(found.traceback, err=True)
            prefix = "" if isinstance(error, KeyboardInterrupt) else "error: "
            click.echo(f"{prefix}{found.message}", err=True)
            code = found.exit_code
        sys.exit(code)

    return wrapper
