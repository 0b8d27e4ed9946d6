import io

import pytest
import rich.console
from tiny import write_tiny_llama

from jaxpaged.errors import CheckpointError, ConfigError
from jaxpaged.job import validate
from jaxpaged.job.runner import run_job


def shown(found: validate.Validation) -> str:
    text = io.StringIO()
    validate.show(found, rich.console.Console(file=text, width=200))
    return text.getvalue()


def test_the_first_prompts_are_shown_as_the_model_sees_them(write_rows, make_spec):
    write_rows(q=["one", None, "three", "four"], row_group_size=1)
    messages = [{"role": "user", "content": "{{ q }}?"}]

    found = validate.validate(make_spec(input={"messages": messages}), 3)

    assert [(p.text, p.num_tokens) for p in found.prompts] == [
        ("<s><user>one?\n<assistant>", 21),
        ("", None),
        ("<s><user>three?\n<assistant>", 23),
    ]
    assert found.prompts[0].row == "rows.parquet, row group 0, row 0"
    assert found.warnings == (
        "rows.parquet, row group 1, row 0: null_prompt: input.messages[0].content would write a "
        "null of column 'q'",
    )
    assert found.job.max_model_len == 256
    assert found.exit_code == 0
    text = shown(found)
    assert "files: 1, rows: 4, parts: 1" in text
    assert r"'<s><user>one?\n<assistant>'" in text
    assert "21 tokens" in text
    assert "completion" in text


def test_prompts_without_room_for_a_completion_are_warned_of(write_rows, make_spec):
    write_rows(q=["x" * 6, "x" * 7, "x" * 8])
    sections = {"input": {"prompt_column": "q"}, "engine": {"max_model_len": 8}}

    found = validate.validate(make_spec(**sections), 3)

    assert [p.problem is None for p in found.prompts] == [True, False, False]
    assert "8 tokens leave no room for a completion; engine.max_model_len is 8" in found.warnings[0]


def test_prompts_that_the_pool_cannot_hold_are_warned_of(write_rows, make_spec):
    write_rows(q=["x" * 6, "x" * 7])
    sections = {
        "input": {"prompt_column": "q"},
        "sampling": {"max_tokens": 10},
        "engine": {"num_blocks": 2, "block_size": 8},
    }

    found = validate.validate(make_spec(**sections), 2)

    assert found.prompts[0].problem is None
    assert found.prompts[1].problem == (
        "8 tokens and 10 new ones need 3 blocks; engine.num_blocks is 2"
    )


def test_settings_and_weights_that_a_run_would_refuse_are_refused(write_rows, make_spec, tmp_path):
    write_rows(q=["a"])
    column = {"input": {"prompt_column": "q"}}
    config = write_tiny_llama(tmp_path / "other", layers=1) / "config.json"
    config.write_bytes((write_tiny_llama(tmp_path / "two") / "config.json").read_bytes())

    with pytest.raises(ConfigError, match=r"max_model_len is 100000, .* at most 256"):
        validate.validate(make_spec(engine={"max_model_len": 100_000}, **column), 1)
    with pytest.raises(CheckpointError, match=r"model.layers.1.* missing"):
        validate.validate(make_spec(model=str(config.parent), **column), 1)


def test_rows_that_would_be_cut_or_passed_over_are_told(write_rows, make_spec):
    write_rows(q=["x" * 6, "x" * 9, None])
    source = {"prompt_column": "q", "on_null": "skip"}
    sections = {"engine": {"max_model_len": 8}, "sampling": {"max_tokens": 3}}

    cut = validate.validate(
        make_spec(input=source | {"on_too_long": "truncate_left"}, **sections), 3
    )
    skipped = validate.validate(make_spec(input=source | {"on_too_long": "skip"}, **sections), 3)

    assert [p.problem for p in cut.prompts] == [
        None,
        "5 of 10 tokens would be cut (truncate_left)",
        "skipped, null_prompt: column 'q' is null",
    ]
    assert cut.prompts[1].text == "x" * 9
    assert skipped.prompts[1].problem == (
        "skipped, prompt_too_long: the prompt has 10 tokens; with room for one more at most 7 fit "
        "max_model_len 8"
    )


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        ({"stop_token_ids": [3, 272]}, "sampling.stop_token_ids: token id 272 is not in the model"),
        ({"logit_bias": {300: 1}}, "sampling.logit_bias: token id 300 is not in the model's vocab"),
    ],
)
def test_tokens_that_the_model_does_not_have_are_refused(write_rows, make_spec, sampling, message):
    write_rows(q=["a"])

    with pytest.raises(ConfigError, match=message):
        validate.validate(make_spec(input={"prompt_column": "q"}, sampling=sampling), 1)


def test_fewer_rows_than_asked_for_are_fine(write_rows, make_spec):
    write_rows(q=["a"])
    spec = make_spec(input={"prompt_column": "q"})

    assert len(validate.validate(spec, 10).prompts) == 1
    assert validate.validate(spec, 0).prompts == ()


def test_what_a_run_would_refuse_is_told(write_rows, make_spec, tmp_path):
    write_rows(q=["a"])
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "other.txt").write_text("x")

    found = validate.validate(make_spec(input={"prompt_column": "q"}), 1)

    assert "a run would be refused: output.path" in found.warnings[0]
    assert found.exit_code == 6
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["other.txt"]


def test_the_output_of_this_job_and_of_another_are_told_apart(write_rows, make_spec, engine, out):
    write_rows(q=["a"])
    spec = make_spec(input={"prompt_column": "q"})
    run_job(spec, engine=engine())
    files = {path: path.stat().st_mtime_ns for path in out.rglob("*")}

    finished = validate.validate(spec, 1)
    changed = validate.validate(make_spec(input={"prompt_column": "q"}, seed=1), 1)
    write_rows("more.parquet", q=["b"])
    grown = validate.validate(spec, 1)
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == files
    (out / "_jaxpaged/job.json").write_text("{")
    damaged = validate.validate(spec, 1)

    assert (len(finished.warnings), finished.exit_code) == (1, 0)
    assert finished.warnings[0].endswith("already holds this job, finished: a run would do nothing")
    assert "seed: 0 -> 1" in changed.warnings[0]
    assert (changed.exit_code, grown.exit_code, damaged.exit_code) == (3, 3, 6)
    assert "input file more.parquet: is new, 1 rows" in grown.warnings[0]
    assert "job.json cannot be used" in damaged.warnings[0]
    assert len(damaged.prompts) == 1


def test_a_model_that_is_not_there_is_named(write_rows, make_spec, tmp_path):
    write_rows(q=["a"])
    (tmp_path / "empty").mkdir()

    with pytest.raises(ConfigError, match="does not exist"):
        validate.validate(make_spec(model=str(tmp_path / "no"), input={"prompt_column": "q"}), 1)
    with pytest.raises(CheckpointError):
        validate.validate(make_spec(model=str(tmp_path / "empty"), input={"prompt_column": "q"}), 1)
