"""The command line. Imports what a command needs inside the command, so that help is instant."""

import click

from jaxpaged._version import VERSION
from jaxpaged.cli import job, load_test, machine, model, output
from jaxpaged.cli.ending import EXIT_CODES


@click.group(context_settings={"help_option_names": ["-h", "--help"]}, epilog=EXIT_CODES)
@click.version_option(VERSION, prog_name="jaxpaged")
def main() -> None:
    """Complete the prompts of Parquet tables with a language model, offline.

    \b
    Example:
      jaxpaged run jobs/eval.yaml
    """


for _command in (
    job.run,
    job.validate,
    job.plan,
    job.schema,
    load_test.stress,
    output.status,
    output.report,
    output.verify,
    output.diff,
    output.compare,
    output.retry,
    model.convert,
    machine.doctor,
    machine.version,
):
    main.add_command(_command)
