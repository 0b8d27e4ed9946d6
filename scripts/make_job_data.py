"""Convert the sample data of `jobs/` from its readable source to Parquet.

The source of truth is the tab-separated text in `jobs/data/*.tsv`: edit it there, then run

    python scripts/make_job_data.py

and commit both. A test fails when a Parquet file is not the conversion of its source. A `.tsv` is
plain UTF-8: one row per line, tabs between the cells, no quoting, the column names on line 1. The
column `id` becomes int32, every other column string.
"""

import pathlib

import click
import pyarrow as pa
from pyarrow import parquet

DATA = pathlib.Path(__file__).resolve().parent.parent / "jobs" / "data"


def read_table(path: pathlib.Path) -> pa.Table:
    """The table that the `.tsv` file at `path` holds.

    Raises:
        click.ClickException: A line has not as many cells as line 1, an empty cell, or an id that
            is not a number; the message names the line.
    """
    header, *lines = path.read_text(encoding="utf-8").rstrip("\n").split("\n")
    names = header.split("\t")
    rows = [line.split("\t") for line in lines]
    for number, row in enumerate(rows, start=2):
        if len(row) != len(names) or not all(row) or not row[0].isdecimal():
            raise click.ClickException(
                f"{path}, line {number}: expected {len(names)} filled cells ({', '.join(names)}) "
                f"with a number first and one tab between them, found {row}"
            )
    columns = dict(zip(names, zip(*rows, strict=True), strict=True))
    schema = pa.schema([(name, pa.int32() if name == "id" else pa.string()) for name in names])
    return pa.table({**columns, "id": [int(cell) for cell in columns["id"]]}, schema=schema)


@click.command()
@click.option(
    "--data",
    type=click.Path(path_type=pathlib.Path, exists=True, file_okay=False),
    default=DATA,
    help="Folder of the .tsv files; the Parquet files are written beside them.",
)
def main(data: pathlib.Path) -> None:
    """Write a .parquet file beside every .tsv file.

    Example: python scripts/make_job_data.py
    """
    for source in sorted(data.glob("*.tsv")):
        table = read_table(source)
        parquet.write_table(table, source.with_suffix(".parquet"))
        print(f"{source.with_suffix('.parquet')}: {table.num_rows} rows")


if __name__ == "__main__":
    main()
