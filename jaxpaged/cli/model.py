"""The command that takes a model: convert."""

from typing import Literal

import click

from jaxpaged.cli import options, terminal
from jaxpaged.cli.ending import ends_well


@click.command()
@click.argument("src")
@click.argument("dst", type=click.Path(file_okay=False))
@click.option(
    "--dtype",
    type=click.Choice(["bfloat16", "float16", "float32"]),
    help="Of the weights; by default the one they are stored in, and bfloat16 if quantised.",
)
@options.QUIET
@ends_well
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

    note = terminal.progress(quiet).note
    target = conversion.convert(src, pathlib.Path(dst), dtype=dtype, note=note)
    if not quiet:
        click.echo(f"written: {target}")
    return 0
