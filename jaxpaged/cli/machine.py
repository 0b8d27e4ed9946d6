"""The commands about what is here: doctor, version."""

import click

from jaxpaged.cli.ending import ends_well


@click.command()
@ends_well
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


@click.command()
@ends_well
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
