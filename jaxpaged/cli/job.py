"""The commands that take a job file: run, validate, plan, schema."""

import json
from typing import TYPE_CHECKING, Literal

import click

from jaxpaged.cli import live, options, place, terminal
from jaxpaged.cli.ending import ends_well

if TYPE_CHECKING:
    from jaxpaged.job.interrupt import StopRequest
    from jaxpaged.job.progress import Progress
    from jaxpaged.job.report import JobReport


@click.command()
@click.argument("job", type=click.Path())
@options.OVERRIDE
@click.option("--extend", is_flag=True, help="Take in input files that came since the job began.")
@click.option("--repair", is_flag=True, help="Make the parts again that `verify` rejects.")
@click.option(
    "--verify-weights", is_flag=True, help="Let every byte of the weights count, not the headers."
)
@options.LOG_FORMAT
@options.METRICS_PORT
@options.METRICS_HOST
@options.QUIET
@ends_well
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

    return live.run(
        start,
        live.Show(
            quiet=quiet,
            log_format=log_format,
            metrics_port=metrics_port,
            metrics_host=metrics_host,
        ),
    )


@click.command()
@click.argument("job", type=click.Path())
@options.OVERRIDE
@click.option(
    "--rows", default=3, show_default=True, type=click.IntRange(0), help="Prompts to show."
)
@ends_well
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
    validation.show(found, terminal.console())
    return found.exit_code


@click.command()
@click.argument("job", type=click.Path())
@options.OVERRIDE
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
@options.JSON
@ends_well
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
        speed=speed_option.speed(speed, place.store(speed_of, ()) if speed_of else None),
        compiles=compiles,
    )
    found = job_plan.make(JobSpec.from_file(job, overrides), options)
    terminal.show(
        found.to_json() if as_json else None, lambda console: plan_table.show(found, console)
    )
    return found.exit_code


@click.command()
@ends_well
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
