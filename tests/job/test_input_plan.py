import pathlib
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jaxpaged.errors import ConfigError, InputSchemaError
from jaxpaged.job import input_files, input_plan


@pytest.fixture
def folder(write_rows) -> pathlib.Path:
    """b.parquet, a.parquet, deep/c.pq, and what readers of Parquet folders skip."""
    root = write_rows("b.parquet", q=["b0", "b1"], row_group_size=1).parent
    write_rows("a.parquet", q=["a0"])
    write_rows("deep/c.pq", q=["c0"])
    write_rows("_hidden.parquet", q=["x"])
    write_rows(".tmp/y.parquet", q=["x"])
    (root / "README.md").write_text("not Parquet")
    return root


def names(*paths: object) -> list[str]:
    return [file.name for file in input_plan.plan([str(path) for path in paths]).files]


def test_files_folders_globs_and_lists_are_expanded_in_order(folder):
    assert names(folder / "b.parquet") == ["b.parquet"]
    assert names(folder) == ["a.parquet", "b.parquet", "deep/c.pq"]
    assert names(folder / "*.parquet") == ["a.parquet", "b.parquet"]
    assert names(folder / "**/*.p*q*") == ["a.parquet", "b.parquet", "deep/c.pq"]
    assert names(folder / "deep", folder / "a.parquet") == ["deep/c.pq", "a.parquet"]


def test_a_name_with_wildcards_that_exists_is_a_file(write_rows):
    path = write_rows("data[1].parquet", q=["a"])

    assert names(path) == ["data[1].parquet"]


def test_the_plan_counts_rows_over_files_and_row_groups(folder):
    plan = input_plan.plan([str(folder)])

    assert plan.num_rows == 4
    assert [(g.file.name, g.index, g.start, g.num_rows) for g in plan.row_groups()] == [
        ("a.parquet", 0, 0, 1),
        ("b.parquet", 0, 1, 1),
        ("b.parquet", 1, 2, 1),
        ("deep/c.pq", 0, 3, 1),
    ]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"x.parquet: not a Parquet file, or one that was cut off \(0 bytes"),
        (b"question,answer\n1,2\n", r"x.parquet: not a Parquet file"),
        (b"PAR1" + b"\x00" * 20 + b"\xff\xff\xff\x7fPAR1", r"not a Parquet file, or one"),
        (b"PAR1" + b"\x00" * 20 + b"\x08\x00\x00\x00PAR1", r"cannot read it as Parquet"),
        (b"PAR1" + b"\x00" * 20 + b"\x08\x00\x00\x00PARE", r"encrypted Parquet files are not"),
    ],
)
def test_a_broken_file_is_named(tmp_path, content, message):
    path = tmp_path / "x.parquet"
    path.write_bytes(content)

    with pytest.raises(InputSchemaError, match=message):
        input_plan.plan([str(path)])


def test_a_file_cut_off_anywhere_is_refused(write_rows):
    path = write_rows(q=["a"] * 100)
    data = path.read_bytes()

    for length in (1, 4, 12, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:length])
        with pytest.raises(InputSchemaError, match=r"rows.parquet"):
            input_plan.plan([str(path)])


def test_paths_that_lead_to_nothing_are_named(folder):
    (folder / "empty").mkdir()

    with pytest.raises(InputSchemaError, match=r"missing.parquet does not exist"):
        names(folder / "missing.parquet")
    with pytest.raises(InputSchemaError, match=r"no file matches .*\*.csv"):
        names(folder / "*.csv")
    with pytest.raises(InputSchemaError, match=r"no .parquet or .parq or .pq file in the folder"):
        names(folder / "empty")
    with pytest.raises(InputSchemaError, match=r"a.parquet is listed twice"):
        names(folder / "a.parquet", folder)
    with pytest.raises(InputSchemaError, match=r"not a regular file"):
        names("/dev/null")


def test_a_linked_folder_is_not_skipped_in_silence(folder):
    (folder / "link").symlink_to(folder / "deep")

    with pytest.raises(InputSchemaError, match=r"link is a link to a folder"):
        names(folder)


def test_no_permission_is_one_message(folder):
    # As nobody, because root may read everything.
    script = (
        "import os, sys\n"
        "from jaxpaged.job import input_plan\n"
        "if os.geteuid() == 0: os.setuid(65534)\n"
        "try: input_plan.plan(sys.argv[1:])\n"
        "except Exception as error: sys.stdout.write(f'{type(error).__name__}: {error}')\n"
    )
    for parent in folder.parents[:3]:
        parent.chmod(0o755)
    (folder / "a.parquet").chmod(0o000)
    (folder / "deep").chmod(0o000)

    def message(path: pathlib.Path) -> str:
        command = [sys.executable, "-c", script, str(path)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    assert message(folder / "a.parquet").startswith("InputSchemaError")
    assert message(folder / "a.parquet").endswith(
        "a.parquet: cannot read it as Parquet: Permission denied"
    )
    assert message(folder / "deep").endswith("deep: Permission denied")
    (folder / "deep").chmod(0o755)


def test_a_column_name_that_occurs_twice_is_refused(tmp_path):
    table = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["prompt", "prompt"])
    pq.write_table(table, tmp_path / "x.parquet")

    with pytest.raises(InputSchemaError, match=r"2 columns are named 'prompt'"):
        input_plan.plan([str(tmp_path / "x.parquet")])


@pytest.mark.parametrize(
    ("source", "output", "verb"),
    [
        ("in/a.parquet", "in/a.parquet", "is"),
        ("in/a.parquet", "in", "holds"),
        ("in", "in", "is"),
        ("in", "in/out", "lies inside"),
        ("in", ".", "holds"),
        ("in/*.parquet", "in", "holds"),
        ("in/**/*.parquet", "in/x/out", "lies inside"),
        ("in/*/*.parquet", "in/out", "lies inside"),
        ("in/*.parquet", "in/out", None),
        ("in/a.parquet", "in/out", None),
        ("in", "out", None),
        ("in", "in2", None),
    ],
)
def test_output_and_input_must_lie_apart(folder, source, output, verb):
    root = folder.parent
    arguments = ([str(root / source)], root / output)

    if verb is None:
        input_files.check_output_apart(*arguments)
    else:
        with pytest.raises(ConfigError, match=rf"output.path: .* {verb} the input .*; choose a"):
            input_files.check_output_apart(*arguments)


def test_a_link_does_not_hide_that_the_output_is_the_input(folder):
    link = folder.parent / "link"
    link.symlink_to(folder)

    with pytest.raises(ConfigError, match="is the input"):
        input_files.check_output_apart([str(folder)], link)
