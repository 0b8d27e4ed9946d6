"""The command that load-tests an engine: stress."""

import click

from jaxpaged.cli import options, terminal
from jaxpaged.cli.ending import ends_well


@click.command()
@click.argument("job", type=click.Path())
@options.OVERRIDE
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
@options.JSON
@ends_well
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
    found = sweep.stress(spec, options, terminal.progress(as_json).note)
    for path in stress_page.write(found, place) if place else ():
        click.echo(f"written: {path}", err=True)
    terminal.show(
        found.to_json() if as_json else None, lambda console: stress_table.show(found, console)
    )
    return found.exit_code
