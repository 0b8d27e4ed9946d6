"""A run as it is watched from the command line: signals, progress, live metrics, its end."""

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

import click

from jaxpaged.cli import ending, terminal
from jaxpaged.errors import ConfigError

if TYPE_CHECKING:
    from jaxpaged.job.interrupt import StopRequest
    from jaxpaged.job.progress import Progress
    from jaxpaged.job.report import JobReport

    _Start = Callable[[Progress, StopRequest], JobReport | None]

_STOPPING = "stopping after this step; once more to stop at once"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Show:
    """How a run is shown while it runs."""

    quiet: bool
    log_format: Literal["text", "json"]
    metrics_port: int | None
    metrics_host: str | None


def run(start: "_Start", show: Show) -> int:
    """Runs a job until it ends or is interrupted; prints what it gave; returns the exit code."""
    return _run_in_json(start, show) if show.log_format == "json" else _run_in_text(start, show)


def _run_in_text(start: "_Start", show: Show) -> int:
    from jaxpaged.job.interrupt import JobInterrupted, StopRequest

    stop = StopRequest(on_first=lambda: click.echo(_STOPPING, err=True))
    try:
        result = _watched(start, show, terminal.progress(show.quiet), stop)
    except JobInterrupted as error:
        click.echo(f"interrupted: {error}", err=True)
        return stop.exit_code
    _show_result(result, quiet=show.quiet)
    return _exit_code(result)


def _run_in_json(start: "_Start", show: Show) -> int:
    from jaxpaged.job.interrupt import JobInterrupted, StopRequest
    from jaxpaged.job.json_log import JsonLog, JsonProgress
    from jaxpaged.job.progress import SilentProgress
    from jaxpaged.job.run import end_state

    log = JsonLog(lambda line: click.echo(line, err=True))
    stop = StopRequest(on_first=lambda: log.write("note", {"message": _STOPPING}))
    progress = SilentProgress() if show.quiet else JsonProgress(log)
    with log.takes_warnings():
        try:
            result = _watched(start, show, progress, stop)
        except BaseException as error:
            failure = ending.failure(error)
            if failure is None:
                raise
            code = stop.exit_code if isinstance(error, JobInterrupted) else failure.exit_code
            log.fails(
                end_state(error),
                exit_code=code,
                message=failure.message,
                traceback=failure.traceback,
            )
            return code
        if not show.quiet:
            log.ends(result, exit_code=_exit_code(result))
    _show_result(result, quiet=show.quiet)
    return _exit_code(result)


def _watched(
    start: "_Start", show: Show, progress: "Progress", stop: "StopRequest"
) -> "JobReport | None":
    """Runs a job that signals can stop and whose metrics can be looked at, if that is wanted."""
    from jaxpaged.job import metrics_server
    from jaxpaged.job.metrics_progress import MetricsProgress

    with stop:
        if show.metrics_port is not None:
            watched = MetricsProgress(progress)
            host = show.metrics_host or "127.0.0.1"
            with metrics_server.serve(watched, host=host, port=show.metrics_port) as url:
                watched.note(f"live metrics at {url}")
                return start(watched, stop)
        if show.metrics_host is not None:
            raise ConfigError("--metrics-host shows nothing without --metrics-port; give both")
        return start(progress, stop)


def _show_result(result: "JobReport | None", *, quiet: bool) -> None:
    from jaxpaged.job import report_table

    if result is None:
        click.echo("no row is chosen, nothing to do")
    elif not quiet:
        if result.state == "already finished":
            click.echo(f"already finished, nothing to do: {result.output.path}")
        report_table.show(result, terminal.console())


def _exit_code(result: "JobReport | None") -> int:
    return 6 if result is not None and result.state == "retry unfinished" else 0
