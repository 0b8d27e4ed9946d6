"""The command line. Imports what a command needs inside the command, so that help is instant."""

import dataclasses
import functools
import io
import json
import signal
import sys
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, ParamSpec

import click
from click.shell_completion import CompletionItem

from jaxpaged._version import VERSION
from jaxpaged.errors import ConfigError, JaxPagedError

if TYPE_CHECKING:
    import rich.console

    from jaxpaged.job.interrupt import StopRequest
    from jaxpaged.job.progress import Progress
    from jaxpaged.job.report import JobReport
    from jaxpaged.storage.options import StorageOptions
    from jaxpaged.storage.store import Store

    _Start = Callable[[Progress, StopRequest], JobReport | None]

_P = ParamSpec("_P")

_EXIT_CODES = """
\b
Exit codes:
  0 done                          4 more row errors than max_errors
  2 wrong usage, job or input     5 the model cannot fit into memory
  3 the output is another job's   6 the output is in use, damaged or not ours
  1 unexpected, or a failed disk  130, 143 interrupted; run again to continue
  (of diff: 1 the rows differ)
"""

_OVERRIDE = click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="KEY=VALUE",
    help="Replace a key of the job file, as in sampling.max_tokens=64, as if the file said so: "
    "the value is YAML, and a relative path is relative to the file. May be repeated.",
)

_STORAGE = click.option(
    "--storage",
    "settings",
    multiple=True,
    metavar="KEY=VALUE",
    help="How to reach s3:// and gs://, as the job file's section storage: "
    "s3.endpoint_url=http://localhost:9000. May be repeated.",
)

_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON.")

_QUIET = click.option("--quiet", is_flag=True, help="Print nothing but errors.")

_LOG_FORMAT = click.option(
    "--log-format",
    type=click.Choice(["text", "json"]),
    default="text",
    show_default=True,
    help="What progress and errors on stderr are: text for people, or one JSON object a line.",
)

_METRICS_PORT = click.option(
    "--metrics-port",
    type=click.IntRange(0, 65535),
    help="Serve live metrics for Prometheus on this port while the job runs; 0 takes a free one.",
)

_METRICS_HOST = click.option(
    "--metrics-host",
    help="The address to serve them on, by default 127.0.0.1; 0.0.0.0 shows them to everyone who "
    "reaches this machine.",
)

_STOPPING = "stopping after this step; once more to stop at once"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Show:
    """How a run is shown while it runs."""

    quiet: bool
    log_format: Literal["text", "json"]
    metrics_port: int | None
    metrics_host: str | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Failure:
    """What ended a command; the traceback is there if it should not have happened."""

    exit_code: int
    message: str
    traceback: str | None = None


def _failure(error: BaseException) -> _Failure | None:
    """What the error comes to; None for those that click knows how to end on."""
    if isinstance(error, JaxPagedError):
        return _Failure(exit_code=error.exit_code, message=str(error))
    if isinstance(error, KeyboardInterrupt):
        return _Failure(exit_code=128 + signal.SIGINT, message="interrupted")
    not_ours = (click.ClickException, click.exceptions.Exit, click.Abort, BrokenPipeError)
    if isinstance(error, not_ours) or not isinstance(error, Exception):
        return None
    message = f"a bug in jaxpaged {VERSION}; please report it with its traceback"
    return _Failure(
        exit_code=1,
        message=message,
        traceback="".join(traceback.format_exception(error)),
    )


def _complete_folder(
    ctx: click.Context, param: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Lets the shell complete an output: a folder's path, though it may be a URL, too."""
    return [CompletionItem(incomplete, type="dir")]


def _output(name: str) -> Callable[[Callable[..., object]], Callable[..., object]]:
    """The argument that names an output, which need not be there."""
    return click.argument(name, shell_complete=_complete_folder)


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
        except BaseException as error:
            failure = _failure(error)
            if failure is None:
                raise
            if failure.traceback is not None:
                click.echo(failure.traceback, err=True)
            prefix = "" if isinstance(error, KeyboardInterrupt) else "error: "
            click.echo(f"{prefix}{failure.message}", err=True)
            code = failure.exit_code
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
@click.option("--extend", is_flag=True, help="Take in input files that came since the job began.")
@click.option("--repair", is_flag=True, help="Make the parts again that `verify` rejects.")
@click.option(
    "--verify-weights", is_flag=True, help="Let every byte of the weights count, not the headers."
)
@_LOG_FORMAT
@_METRICS_PORT
@_METRICS_HOST
@_QUIET
@_ends_well
def run(
    job: str,
    overrides: tuple[str, ...],
    *,
    extend: bool,
    repair: bool,
    verify_weights: bool,
    log_format: Literal["text", "json"],
    metrics_port: int | None,
    metrics_host: str | None,
    quiet: bool,
) -> int:
    """Run the job in the file JOB, or continue it where it ended early.

    \b
    Examples:
      jaxpaged run jobs/eval.yaml
      jaxpaged run jobs/eval.yaml --set sampling.max_tokens=16 --set output.path=../out/short

    Progress goes to stderr, the summary to stdout. Ctrl-C stops after the step that is running and
    keeps all finished rows; the same command continues behind them, also after a crash.
    """
    from jaxpaged.job.planned_job import RunOptions
    from jaxpaged.job.runner import run_job
    from jaxpaged.job.spec import JobSpec

    options = RunOptions(extends=extend, repairs=repair, verifies_weights=verify_weights)

    def start(progress: "Progress", should_stop: "StopRequest") -> "JobReport":
        spec = JobSpec.from_file(job, overrides)
        return run_job(spec, progress=progress, should_stop=should_stop, options=options)

    return _run(
        start,
        _Show(
            quiet=quiet,
            log_format=log_format,
            metrics_port=metrics_port,
            metrics_host=metrics_host,
        ),
    )


@main.command()
@_output("out")
@click.option("--where", metavar="CONDITION", help="Which rows to redo.")
@click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="KEY=VALUE",
    help="Change a key of the job for these rows, as in sampling.max_tokens=4096.",
)
@_STORAGE
@_LOG_FORMAT
@_METRICS_PORT
@_METRICS_HOST
@_QUIET
@_ends_well
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
        place, storage = _place(out, settings)
        return retry_job(
            place,
            where=where,
            settings=overrides,
            storage=storage,
            progress=progress,
            should_stop=should_stop,
        )

    return _run(
        start,
        _Show(
            quiet=quiet,
            log_format=log_format,
            metrics_port=metrics_port,
            metrics_host=metrics_host,
        ),
    )


@main.command()
@_output("out")
@_STORAGE
@_JSON
@_ends_well
def status(out: str, settings: tuple[str, ...], *, as_json: bool) -> int:
    """Show how far the job in OUT is, running or not.

    \b
    Examples:
      jaxpaged status out/eval
      jaxpaged status out/eval --json
    """
    from jaxpaged.job.look import status as state
    from jaxpaged.job.look import status_table

    found = state.status(_store(out, settings))
    _show(found.to_json() if as_json else None, lambda console: status_table.show(found, console))
    return 0


@main.command()
@_output("out")
@_STORAGE
@_JSON
@_ends_well
def verify(out: str, settings: tuple[str, ...], *, as_json: bool) -> int:
    """Check every byte, row and address in OUT against what its records say.

    \b
    Example:
      jaxpaged verify out/eval

    Names what is wrong and ends with 6 then; `jaxpaged run JOB --repair` makes just that again.
    """
    from jaxpaged.job.look import verify as verification
    from jaxpaged.job.look import verify_table

    found = verification.verify(_store(out, settings))
    _show(found.to_json() if as_json else None, lambda console: verify_table.show(found, console))
    return found.exit_code


@main.command()
@_output("out_a")
@_output("out_b")
@_STORAGE
@_JSON
@_ends_well
def diff(out_a: str, out_b: str, settings: tuple[str, ...], *, as_json: bool) -> int:
    """Compare two outputs row by row: the same, changed, only in one.

    \b
    Example:
      jaxpaged diff out/eval out/eval-short

    Ends with 0 if all rows are the same, with 1 if not.
    """
    from jaxpaged.job.look import diff as comparison
    from jaxpaged.job.look import diff_table

    found = comparison.diff(_store(out_a, settings), _store(out_b, settings))
    _show(found.to_json() if as_json else None, lambda console: diff_table.show(found, console))
    return found.exit_code


@main.command()
@_output("out_a")
@_output("out_b")
@_STORAGE
@_JSON
@_ends_well
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

    found = comparison.compare(_store(out_a, settings), _store(out_b, settings))
    _show(found.to_json() if as_json else None, lambda console: compare_table.show(found, console))
    return 0


@main.command()
@_output("out")
@click.option(
    "--html", type=click.Path(dir_okay=False), help="Write the page there, and nothing into OUT."
)
@_STORAGE
@_ends_well
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

    store = _store(out, settings)
    if html is None:
        found = rebuilt_report.write(store)
    else:
        found = rebuilt_report.write_page(store, pathlib.Path(html))
    report_table.show(found, _console())
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
@click.argument("job", type=click.Path())
@_OVERRIDE
@click.option(
    "--device",
    metavar="CARD",
    help="Plan for a GPU that need not be here: l4, rtx4090, a100, h100, h200, or a size as 24GiB.",
)
@click.option(
    "--rows",
    default=5000,
    show_default=True,
    type=click.IntRange(1),
    help="Most rows to look at; of more rows a sample stands for all.",
)
@click.option(
    "--new-tokens",
    type=click.IntRange(1),
    help="Tokens to assume of each completion, where it may have more.",
)
@click.option(
    "--speed",
    metavar="TOKENS",
    help="Tokens in and out per second, for a time: a number, or two as in 600-800.",
)
@click.option(
    "--speed-of",
    metavar="OUT",
    help="Take the speed from the report in this output folder.",
)
@click.option("--compile", "compiles", is_flag=True, help="Ask the compiler about memory, too.")
@_JSON
@_ends_well
def plan(
    job: str,
    overrides: tuple[str, ...],
    *,
    device: str | None,
    rows: int,
    new_tokens: int | None,
    speed: str | None,
    speed_of: str | None,
    compiles: bool,
    as_json: bool,
) -> int:
    """Show what the job in the file JOB would take: rows, memory, steps, time.

    \b
    Examples:
      jaxpaged plan jobs/eval.yaml
      jaxpaged plan jobs/eval.yaml --device l4 --set engine.kv_dtype=int8
      jaxpaged plan jobs/eval.yaml --speed-of out/eval --json

    Tokenizes the rows and runs the real scheduler over them without a model; loads no weights.
    Ends with 5 if the job cannot fit into memory.
    """
    import jax

    from jaxpaged.job.spec import JobSpec
    from jaxpaged.plan import cards, job_plan, plan_table, speed_option

    if device:
        # A GPU of this machine is not asked for, and its memory is left to those who use it.
        jax.config.update("jax_platforms", "cpu")
    options = job_plan.PlanOptions(
        card=cards.find(device) if device else None,
        max_rows=rows,
        new_tokens=new_tokens,
        speed=speed_option.speed(speed, _store(speed_of, ()) if speed_of else None),
        compiles=compiles,
    )
    found = job_plan.make(JobSpec.from_file(job, overrides), options)
    _show(found.to_json() if as_json else None, lambda console: plan_table.show(found, console))
    return found.exit_code


@main.command()
@_ends_well
def schema() -> int:
    """Print the JSON Schema of job files, by which editors complete, explain and check them.

    \b
    Example:
      jaxpaged schema > job.schema.json

    A job file beside it names it in its first line, for editors with a YAML language server:

    \b
      # yaml-language-server: $schema=job.schema.json
    """
    from jaxpaged.job import schema as job_file

    click.echo(json.dumps(job_file.job_schema(), indent=2, ensure_ascii=False))
    return 0


@main.command()
@click.argument("job", type=click.Path())
@_OVERRIDE
@click.option(
    "--requests", default=64, show_default=True, type=click.IntRange(1), help="Of each load."
)
@click.option(
    "--concurrency",
    default="16,32,64",
    show_default=True,
    metavar="N,N,...",
    help="Requests in flight at a time, one load for each.",
)
@click.option(
    "--prompt",
    "prompts",
    multiple=True,
    metavar="TOKENS[:WEIGHT]",
    help="Prompt lengths, as in 16-64:5; may be repeated. By default short, middle and long ones, "
    "5:3:2, by the model's length.",
)
@click.option("--new-tokens", metavar="TOKENS", help="Completion lengths, as in 8-64.")
@click.option(
    "--lengths",
    type=click.Path(exists=True),
    help="Take the lengths from Parquet with prompt_tokens and completion_tokens, such as the "
    "output of a job.",
)
@click.option(
    "--prefix-tokens", default=0, type=click.IntRange(0), help="Tokens that prompts share in front."
)
@click.option(
    "--prefix-share",
    default=1.0,
    show_default=True,
    type=click.FloatRange(0, 1),
    help="The share of the prompts that do.",
)
@click.option("--memory", metavar="SIZE", help="Of the KV pool, as in 256MiB, for all loads.")
@click.option("--no-static", is_flag=True, help="Do not try static reservation.")
@click.option(
    "--check",
    "checked",
    default=4,
    show_default=True,
    type=click.IntRange(0),
    help="Completions to compare with the decoder without a pool.",
)
@click.option("--out", type=click.Path(file_okay=False), help="Folder for stress.json and .html.")
@_JSON
@_ends_well
def stress(
    job: str,
    overrides: tuple[str, ...],
    *,
    requests: int,
    concurrency: str,
    prompts: tuple[str, ...],
    new_tokens: str | None,
    lengths: str | None,
    prefix_tokens: int,
    prefix_share: float,
    memory: str | None,
    no_static: bool,
    checked: int,
    out: str | None,
    as_json: bool,
) -> int:
    """Load-test the model and engine of the job in the file JOB, before it goes live.

    \b
    Examples:
      jaxpaged stress jobs/eval.yaml
      jaxpaged stress jobs/eval.yaml --concurrency 8,64 --memory 128MiB --out out/stress
      jaxpaged stress jobs/eval.yaml --lengths out/eval

    Random prompts of chosen lengths go through the engine, so many at a time, with blocks on demand
    and with engine.max_model_len reserved for each, in the same memory. A sample of the
    completions is compared with the decoder without a pool; ends with 1 if they differ (of
    fp8, int8 and int4 keys the differences are shown, and nothing is promised) or if no request
    of a load could be completed.
    """
    from jaxpaged.job.spec import JobSpec
    from jaxpaged.stress import stress_options, stress_page, stress_table, sweep

    spec = JobSpec.from_file(job, overrides)
    options = stress_options.options(
        requests=requests,
        concurrency=concurrency,
        prompts=prompts,
        new_tokens=new_tokens,
        lengths=lengths,
        prefix=(prefix_tokens, prefix_share),
        memory=memory,
        is_compared=not no_static,
        checked=checked,
    )
    place = stress_page.prepare(out) if out else None
    found = sweep.stress(spec, options, _progress(as_json).note)
    for path in stress_page.write(found, place) if place else ():
        click.echo(f"written: {path}", err=True)
    _show(found.to_json() if as_json else None, lambda console: stress_table.show(found, console))
    return found.exit_code


@main.command()
@click.argument("src")
@click.argument("dst", type=click.Path(file_okay=False))
@click.option(
    "--dtype",
    type=click.Choice(["bfloat16", "float16", "float32"]),
    help="Of the weights; by default the one they are stored in, and bfloat16 if quantised.",
)
@_QUIET
@_ends_well
def convert(
    src: str, dst: str, dtype: Literal["bfloat16", "float16", "float32"] | None, *, quiet: bool
) -> int:
    """Write the model SRC as a checkpoint in Orbax's format, in the new folder DST.

    \b
    Examples:
      jaxpaged convert path/to/model ckpt/model
      jaxpaged convert model.Q4_K_M.gguf ckpt/model --dtype float32

    SRC is anything `model:` of a job file names: a folder, a .gguf file, pkg://, hf://. A job with
    `model: ckpt/model` then runs as one with SRC, by the same tokenizer and chat template. DST must
    not exist, or be empty; it appears when all of it is written.
    """
    import pathlib

    from jaxpaged import convert as conversion

    target = conversion.convert(src, pathlib.Path(dst), dtype=dtype, note=_progress(quiet).note)
    if not quiet:
        click.echo(f"written: {target}")
    return 0


@main.command()
@_ends_well
def doctor() -> int:
    """Show what an engine would use on this machine and why, and what to install if a GPU is idle.

    \b
    Example:
      jaxpaged doctor
    """
    from jaxpaged import doctor as machine

    for name, value in machine.findings():
        click.echo(f"{name}: {value}")
    return 0


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


def _run(start: "_Start", show: _Show) -> int:
    """Runs a job until it ends or is interrupted; prints what it gave; returns the exit code."""
    return _run_in_json(start, show) if show.log_format == "json" else _run_in_text(start, show)


def _run_in_text(start: "_Start", show: _Show) -> int:
    from jaxpaged.job.interrupt import JobInterrupted, StopRequest

    stop = StopRequest(on_first=lambda: click.echo(_STOPPING, err=True))
    try:
        result = _watched(start, show, _progress(show.quiet), stop)
    except JobInterrupted as error:
        click.echo(f"interrupted: {error}", err=True)
        return stop.exit_code
    _show_result(result, quiet=show.quiet)
    return _exit_code(result)


def _run_in_json(start: "_Start", show: _Show) -> int:
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
            failure = _failure(error)
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
    start: "_Start", show: _Show, progress: "Progress", stop: "StopRequest"
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
        report_table.show(result, _console())


def _exit_code(result: "JobReport | None") -> int:
    return 6 if result is not None and result.state == "retry unfinished" else 0


def _place(out: str, settings: tuple[str, ...]) -> "tuple[str, StorageOptions | None]":
    """An output's absolute path or URL, and how it is reached if that is said."""
    import pathlib

    from jaxpaged.job.spec import parse_storage
    from jaxpaged.storage import access

    place = out if access.split(out) else str(pathlib.Path(out).resolve())
    return place, parse_storage(settings) if settings else None


def _store(out: str, settings: tuple[str, ...]) -> "Store":
    from jaxpaged.job.output.output_view import PRIVATE
    from jaxpaged.storage import access
    from jaxpaged.storage.options import StorageOptions

    place, storage = _place(out, settings)
    return access.open_store(place, storage or StorageOptions(), private=PRIVATE)


def _show(as_json: object, show: "Callable[[rich.console.Console], None]") -> None:
    if as_json is None:
        show(_console())
    else:
        click.echo(json.dumps(as_json, indent=1, allow_nan=False))


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
