import pathlib

import pytest

from jaxpaged.errors import ConfigError, InputSchemaError
from jaxpaged.job.input import input_files
from jaxpaged.storage.files import SourceFiles


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


def names(*paths: object, known: tuple[str, ...] = ()) -> list[str]:
    return list(input_files.find([str(path) for path in paths], SourceFiles(), known))


def test_files_folders_globs_and_lists_are_expanded_in_order(folder):
    assert names(folder / "b.parquet") == ["b.parquet"]
    assert names(folder) == ["a.parquet", "b.parquet", "deep/c.pq"]
    assert names(folder / "*.parquet") == ["a.parquet", "b.parquet"]
    assert names(folder / "**/*.p*q*") == ["a.parquet", "b.parquet", "deep/c.pq"]
    assert names(folder / "deep", folder / "a.parquet") == ["deep/c.pq", "a.parquet"]


def test_places_are_absolute_whatever_the_working_folder(folder, monkeypatch):
    monkeypatch.chdir(folder)

    for path in ("a.parquet", "./a.parquet", "a.p*", "../in/a.parquet", f"{folder}/a.parquet"):
        assert input_files.find([path], SourceFiles()) == {"a.parquet": f"{folder}/a.parquet"}
    assert names(".") == ["a.parquet", "b.parquet", "deep/c.pq"]


def test_a_name_with_wildcards_that_exists_is_a_file(write_rows):
    path = write_rows("data[1].parquet", q=["a"])

    assert names(path) == ["data[1].parquet"]


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
    with pytest.raises(InputSchemaError, match=r"a.parquet/x: Not a directory"):
        names(folder / "a.parquet/x")


def test_a_linked_folder_is_not_skipped_in_silence(folder):
    (folder / "link").symlink_to(folder / "deep")

    with pytest.raises(InputSchemaError, match=r"link is a link to a folder"):
        names(folder)


def test_a_linked_file_keeps_the_name_of_the_link(folder):
    (folder / "deep" / "link.pq").symlink_to(folder / "a.parquet")

    assert names(folder / "deep") == ["c.pq", "link.pq"]
    assert names(folder / "deep/link.pq") == ["link.pq"]


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (["in/deep"], ["in/deep", "in/a.parquet"], ["c.pq", "../a.parquet"]),
        (["in/a.parquet"], ["in/a.parquet", "in/deep/c.pq"], ["a.parquet", "deep/c.pq"]),
        (["in/deep/*"], ["in/*/*.pq", "more"], ["c.pq", "../../more/d.pq"]),
        (["in/deep", "more"], ["in/deep"], ["in/deep/c.pq"]),
        (["more"], ["in/deep"], ["c.pq"]),
    ],
)
def test_names_stay_when_the_input_grows_or_shrinks(folder, write_rows, before, after, expected):
    write_rows("../more/d.pq", q=["d"])
    root = folder.parent
    known = tuple(names(*(root / path for path in before)))

    assert names(*(root / path for path in after), known=known) == expected


def test_files_that_share_their_last_name_keep_their_names(write_rows):
    first = write_rows("x/one.pq", q=["a"]).parent
    write_rows("y/one.pq", q=["b"])
    write_rows("y/two.pq", q=["c"])

    # Both folders have a one.pq; only y has all that was known.
    known = ("one.pq", "two.pq")

    assert names(first, first.parent / "y", known=known) == ["../x/one.pq", "one.pq", "two.pq"]


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        (["in/a.parquet", "s3://bucket/b.parquet"], r"in/a.parquet and s3://bucket/b.parquet lie"),
        (["s3://bucket/a.parquet", "gs://bucket/a.parquet"], r"different kinds of storage; copy"),
    ],
)
def test_kinds_of_storage_are_not_mixed(paths, message):
    with pytest.raises(ConfigError, match=message):
        names(*paths)


def test_a_bucket_cannot_be_a_wildcard():
    with pytest.raises(InputSchemaError, match=r"s3://\[b\]/x has a wildcard in its bucket"):
        input_files.check_output_apart(["s3://[b]/x"], "s3://b/y", UnaskedFiles())


class UnaskedFiles(SourceFiles):
    """Knows of nothing and asks no store."""

    def folder(self, path: str) -> str:
        return path.rstrip("/")

    def stat(self, place: str):
        raise FileNotFoundError(place)


@pytest.mark.parametrize(
    ("source", "output", "verb"),
    [
        ("in/a.parquet", "in/a.parquet", "is"),
        ("in/a.parquet", "in", "holds"),
        ("in", "in", "is"),
        ("in", "in/out", "lies inside"),
        ("in", "", "holds"),
        ("in/*.parquet", "in", "holds"),
        ("in/**/*.parquet", "in/x/out", "lies inside"),
        ("in/*/*.parquet", "in/out", "lies inside"),
        ("in/*.parquet", "in/out", None),
        ("in/a.parquet", "in/out", None),
        ("in", "out", None),
        ("in", "in2", None),
    ],
)
@pytest.mark.parametrize("kind", ["local", "s3"])
def test_output_and_input_must_lie_apart(folder, kind, source, output, verb):
    root = "s3://bucket/" if kind == "s3" else f"{folder.parent}/"
    files = UnaskedFiles() if kind == "s3" else SourceFiles()
    arguments = ([root + source], root + output, files)

    if verb is None:
        input_files.check_output_apart(*arguments)
    else:
        with pytest.raises(ConfigError, match=rf"output.path: .* {verb} the input .*; choose a"):
            input_files.check_output_apart(*arguments)


def test_what_lies_in_different_storage_lies_apart(folder):
    files = UnaskedFiles()

    input_files.check_output_apart([str(folder)], "s3://bucket/in", SourceFiles())
    input_files.check_output_apart(["s3://bucket/in"], "gs://bucket/in", files)
    input_files.check_output_apart(["s3://bucket/in"], "s3://other/in", files)
    input_files.check_output_apart(["s3://bucket/in"], "/bucket/in", files)


def test_a_link_does_not_hide_that_the_output_is_the_input(folder):
    link = folder.parent / "link"
    link.symlink_to(folder)

    with pytest.raises(ConfigError, match="is the input"):
        input_files.check_output_apart([str(folder)], str(link), SourceFiles())
