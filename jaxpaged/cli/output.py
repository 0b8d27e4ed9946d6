"""The commands that take the output of a job: status, report, verify, diff, compare, retry."""

from typing import TYPE_CHECKING, Literal

import click

from jaxpaged.cli import live, options, place, terminal
from jaxpaged.cli.ending import ends_well

if TYPE_CHECKING:
    from jaxpaged.job.interrupt import StopRequest
    from jaxpaged.job.progress import Progress
    from jaxpaged.job.report import JobReport


@click.command()
@options.output("out")
@options.STORAGE
@options.JSON
@ends_well
def status(out: str, settings: tuple[str, ...], *, as_json: bool) -> int:
    """Show how far the job in OUT is, running or not.

    \b
    Examples:
      jaxpaged status out/eval
      jaxpaged status out/eval --json
    """
    from jaxpaged.job.look import status as state
    from jaxpaged.job.look import status_table

    found = state.status(place.store(out, settings))
    terminal.show(
        found.to_json() if as_json else None, lambda console: status_table.show(found, console)
    )
    return 0


@click.command()
@options.output("out")
@click.option(
    "--html", type=click.Path(dir_okay=False), help="Write the page there, and nothing into OUT."
)
@options.STORAGE
@ends_well
def report(out: str, settings: tuple[str, ...], html: str | None) -> int:
    """Make the report of the job in OUT again, as report.json and report.html in OUT/_jaxpaged.

    \b
    Examples:
      jaxpaged report out/eval
      jaxpaged report s3://bucket/out --html eval.html

    A run writes both when it ends. Here they are counted from the commit records; what only the run
    knew stays as its report says. Needs neither the job file nor the input nor the model.
    """
    import pathlib

    from jaxpaged.job import rebuilt_report, report_table

    store = place.store(out, settings)
    if html is None:
        found = rebuilt_report.write(store)
    else:
        found = rebuilt_report.write_page(store, pathlib.Path(html))
    report_table.show(found, terminal.console())
    return 0


@click.command()
@options.output("out")
@options.STORAGE
@options.JSON
@ends_well
def verify(out: str, settings: tuple[str, ...], *, as_json: bool) -> int:
    """Check every byte, row and address in OUT against what its records say.

    \b
    Example:
      jaxpaged verify out/eval

    Names what is wrong and ends with 6 then; `jaxpaged run JOB --repair` makes just that again.
    """
    from jaxpaged.job.look import verify as verification
    from jaxpaged.job.look import verify_table

    found = verification.verify(place.store(out, settings))
    terminal.show(
        found.to_json() if as_json else None, lambda console: verify_table.show(found, console)
    )
    return found.exit_code


@click.command()
@options.output("out_a")
@options.output("out_b")
@options.STORAGE
@options.JSON
@ends_well
def diff(out_a: str, out_b: str, settings: tuple[str, ...], *, as_json: bool) -> int:
    """Compare two outputs row by row: the same, changed, only in one.

    \b
    Example:
      jaxpaged diff out/eval out/eval-short

    Ends with 0 if all rows are the same, with 1 if not.
    """
    from jaxpaged.job.look import diff as comparison
    from jaxpaged.job.look import diff_table

    found = comparison.diff(place.store(out_a, settings), place.store(out_b, settings))
    terminal.show(
        found.to_json() if as_json else None, lambda console: diff_table.show(found, console)
    )
    return found.exit_code


@click.command()
@options.output("out_a")
@options.output("out_b")
@options.STORAGE
@options.JSON
@ends_well
def compare(out_a: str, out_b: str, settings: tuple[str, ...], *, as_json: bool) -> int:
    """Show two runs side by side: what differs in their jobs, rows, scores, speed, memory.

    \b
    Example:
      jaxpaged compare out/eval out/eval-short

    Goes by the report that each one's last run left, finished or not. Does not compare rows:
    `jaxpaged diff` does.
    """
    from jaxpaged.job.look import compare as comparison
    from jaxpaged.job.look import compare_table

    found = comparison.compare(place.store(out_a, settings), place.store(out_b, settings))
    terminal.show(
        found.to_json() if as_json else None, lambda console: compare_table.show(found, console)
    )
    return 0


@click.command()
@options.output("out")
@click.option("--where", metavar="CONDITION", help="Which rows to redo.")
@click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="KEY=VALUE",
    help="Change a key of the job for these rows, as in sampling.max_tokens=4096.",
)
@options.STORAGE
@options.LOG_FORMAT
@options.METRICS_PORT
@options.METRICS_HOST
@options.QUIET
@ends_well
def retry(
    out: str,
    where: str | None,
    overrides: tuple[str, ...],
    settings: tuple[str, ...],
    *,
    log_format: Literal["text", "json"],
    metrics_port: int | None,
    metrics_host: str | None,
    quiet: bool,
) -> int:
    """Redo chosen rows of the finished job in OUT as a new revision; all others stay bit for bit.

    \b
    Examples:
      jaxpaged retry out/eval --where "finish_reason = 'length'" --set sampling.max_tokens=4096
      jaxpaged retry out/eval --where "error_code IN ('timeout', 'nonfinite_logits')"

    CONDITION compares columns of the output with = <> < <= > >=, IN, LIKE, IS NULL, AND, OR, NOT.
    Ctrl-C stops; `jaxpaged retry OUT` continues. Replaced parts are kept in _jaxpaged/superseded.
    """
    from jaxpaged.job.retry import retry_job

    def start(progress: "Progress", should_stop: "StopRequest") -> "JobReport | None":
        url, storage = place.locate(out, settings)
        return retry_job(
            url,
            where=where,
            settings=overrides,
            storage=storage,
            progress=progress,
            should_stop=should_stop,
        )

    return live.run(
        start,
        live.Show(
            quiet=quiet,
            log_format=log_format,
            metrics_port=metrics_port,
            metrics_host=metrics_host,
        ),
    )
