import pytest

from jaxpaged.errors import ConfigError
from jaxpaged.job import yaml_file


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 0.001),
        ("1e3", 1000.0),
        (".5", 0.5),
        ("-7", -7),
        ("0x1F", 31),
        ("0o17", 15),
        ("true", True),
        ("False", False),
        ("~", None),
        ("", None),
        ("no", "no"),
        ("on", "on"),
        ("010", "010"),
        ("1:30", "1:30"),
        ("1_000", "1_000"),
        ("2024-01-01", "2024-01-01"),
        ("'5'", "5"),
        (".inf", float("inf")),
        ("-.INF", float("-inf")),
        ("[1, a, {b: c}]", [1, "a", {"b": "c"}]),
        ("<<", "<<"),
    ],
)
def test_scalars_follow_yaml_1_2(text, value):
    parsed = yaml_file.parse(f"key: {text}", "job.yaml").value

    assert parsed == {"key": value}
    assert type(parsed["key"]) is type(value)


def test_every_key_and_item_has_its_line():
    text = "a: 1\nb:\n  c: |\n    x\n    y\n  d:\n    - 1\n    - e: 2\n"

    places = yaml_file.parse(text, "job.yaml").places

    assert places[("a",)] == "job.yaml:1"
    assert places[("b", "c")] == "job.yaml:3"
    assert places[("b", "d", 1)] == "job.yaml:8"
    assert places[("b", "d", 1, "e")] == "job.yaml:8"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: 2\na: 3", r"job.yaml:3: duplicate key 'a'; first at job.yaml:1"),
        ("a: &x [1]\nb: *x", r"job.yaml:1: anchors \(&\) and aliases \(\*\) are not supported"),
        ("a: !!python/object:os.system x", r"job.yaml:1: tags are not supported"),
        ("a: !env HOME", r"job.yaml:1: tags are not supported"),
        ("a: {{ question }}", r"job.yaml:1: a key must be a plain word; quote template braces"),
        ("a: [1,\n  2,\n b", r"job.yaml:3: .*expected ',' or ']'"),
        ("a: 1\n---\nb: 2", r"job.yaml:2: .*another document"),
        ("a: " + "[" * 50 + "]" * 50, r"job.yaml:1: nested deeper than 32 levels"),
        ("a:\n\tb: 1", r"job.yaml:2: .*'\\t'"),
        ("a: \0", r"job.yaml: not YAML text"),
    ],
)
def test_what_is_no_plain_yaml_is_refused_with_its_line(text, message):
    with pytest.raises(ConfigError, match=message):
        yaml_file.parse(text, "job.yaml")


def test_files_that_cannot_be_job_files_are_refused(tmp_path):
    too_large = tmp_path / "large.yaml"
    too_large.write_text("a: " + "x" * 1_000_001)
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"PAR1\xff\xfe")

    with pytest.raises(ConfigError, match="larger than 1,000,000 bytes"):
        yaml_file.load(too_large)
    with pytest.raises(ConfigError, match="not UTF-8 text"):
        yaml_file.load(binary)
    with pytest.raises(ConfigError, match=r"missing.yaml: cannot read the job file: No such file"):
        yaml_file.load(tmp_path / "missing.yaml")
    with pytest.raises(ConfigError, match="cannot read the job file: Is a directory"):
        yaml_file.load(tmp_path)
