import dataclasses
import pathlib

import pydantic
import pytest

from jaxpaged.config import EngineConfig
from jaxpaged.errors import ConfigError
from jaxpaged.job.output import identity
from jaxpaged.job.prompt.param_columns import param_type
from jaxpaged.job.sampling_section import SamplingColumns, SamplingSpec
from jaxpaged.job.sections import EngineSpec
from jaxpaged.job.spec import JobSpec
from jaxpaged.request import SamplingParams
from jaxpaged.storage.options import StorageOptions

JOB = """\
model: pkg://some-model/model.gguf
input:
  path: data/rows.parquet
  prompt_column: question
output: {path: ../out}
"""


@pytest.fixture
def write_job(tmp_path):
    def write(text: str) -> pathlib.Path:
        path = tmp_path / "jobs" / "job.yaml"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        return path

    return write


def test_a_file_and_its_defaults(write_job, tmp_path):
    spec = JobSpec.from_file(write_job(JOB))

    assert spec.input.path == (str(tmp_path / "jobs/data/rows.parquet"),)
    assert spec.output.path == str(tmp_path / "out")
    assert spec.model == "pkg://some-model/model.gguf"
    assert spec.input.prompt_source == "prompt_column"
    assert spec.sampling_params() == SamplingParams()
    assert spec.engine_config() == EngineConfig()
    assert spec.error_limit(1000) is None
    with pytest.raises(pydantic.ValidationError):
        spec.seed = 1


def test_every_value_reaches_the_engine(write_job):
    job = JOB + (
        "sampling: {max_tokens: 5, temperature: 1, top_k: 3, top_p: 5e-1, stop: [a, b],\n"
        "  stop_token_ids: 7, include_stop: true}\n"
        "engine: {max_model_len: 99, num_blocks: 8, dtype: bfloat16}\n"
        "seed: 11\n"
    )

    spec = JobSpec.from_file(write_job(job))

    assert spec.sampling_params() == SamplingParams(
        max_tokens=5,
        temperature=1.0,
        top_k=3,
        top_p=0.5,
        stop=("a", "b"),
        stop_token_ids=(7,),
        include_stop=True,
    )
    assert spec.engine_config() == EngineConfig(
        max_model_len=99, num_blocks=8, dtype="bfloat16", seed=11
    )


def test_every_new_way_to_sample_reaches_the_engine(write_job):
    job = JOB + (
        "sampling: {typical_p: 0.9, repetition_penalty: 1.5, presence_penalty: -1,\n"
        "  frequency_penalty: 0.25, logit_bias: {7: -inf, 5: 2, 0: -1.5}, bad_words: no,\n"
        "  logprobs: 0, prompt_logprobs: 3, n: 2, beam_width: 4, length_penalty: 0,\n"
        "  early_stopping: never}\n"
        "engine: {kv_dtype: int4, prefix_cache: false, preemption: swap, swap_space: 1,\n"
        "  deterministic: true}\n"
    )

    spec = JobSpec.from_file(write_job(job))

    assert spec.sampling_params() == SamplingParams(
        typical_p=0.9,
        repetition_penalty=1.5,
        presence_penalty=-1.0,
        frequency_penalty=0.25,
        logit_bias=((0, -1.5), (5, 2.0), (7, float("-inf"))),
        bad_words=("no",),
        logprobs=0,
        prompt_logprobs=3,
        n=2,
        beam_width=4,
        length_penalty=0.0,
        early_stopping="never",
    )
    assert spec.engine_config() == EngineConfig(
        kv_dtype="int4", prefix_cache=False, preemption="swap", swap_space=1.0, deterministic=True
    )
    sampled = "sampling: {n: 2, best_of: 4, temperature: 1}\noutput: {path: o, explode: true}"
    spec = JobSpec.from_file(write_job(JOB.replace("output: {path: ../out}\n", "") + sampled))
    assert spec.sampling_params() == SamplingParams(n=2, best_of=4, temperature=1.0)
    assert spec.output.explode


def test_every_field_of_the_parameters_is_a_key_with_the_same_default():
    fields = {field.name: field.default for field in dataclasses.fields(SamplingParams)}
    keys = {name: field.default for name, field in SamplingSpec.model_fields.items()}

    assert {**fields, "columns": SamplingColumns()} == keys
    assert set(SamplingColumns.model_fields) < set(fields)
    fixed = ("n", "best_of", "beam_width", "logprobs", "prompt_logprobs")
    assert not set(fixed) & set(SamplingColumns.model_fields)


def test_every_column_that_sets_a_parameter_has_a_type():
    for name in SamplingColumns.model_fields:
        assert param_type(name).expected


def test_the_engine_s_defaults_are_those_of_its_keys():
    fields = {field.name: field.default for field in dataclasses.fields(EngineConfig)}

    keys = {name: field.default for name, field in EngineSpec.model_fields.items()}
    assert {name: fields[name] for name in keys} == keys
    others = {"watermark", "reservation", "compilation_cache", "seed"}
    assert fields.keys() - keys.keys() == others


def test_empty_sections_and_null_stops_mean_the_defaults(write_job):
    spec = JobSpec.from_file(write_job(JOB + "sampling: {stop: null}\nengine:\neval:\n"))

    assert spec.sampling.stop == ()
    assert spec.eval is None
    assert JobSpec.from_file(write_job(JOB + "sampling: {stop: []}")).sampling.stop == ()
    none = JobSpec.from_file(write_job(JOB + "sampling: {logit_bias: null, bad_words: null}"))
    assert none.sampling_params() == SamplingParams()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "sampling: {max_token: 3}",
            r":6: sampling.max_token: unknown key; did you mean max_tokens",
        ),
        ("max_num_seqs: 3", r"job.yaml:6: max_num_seqs: unknown key; it belongs under engine"),
        ("zzz: 3", r"job.yaml:6: zzz: unknown key; valid keys here: model, input"),
        ("seed: 010", r"job.yaml:6: seed: expected a whole number, found '010'; write 10"),
        ("seed: 1.5", r"seed: expected a whole number, found 1.5"),
        ("seed: -1", r"seed: expected greater than or equal to 0, found -1"),
        ("sampling: {ignore_eos: no}", r"expected true or false, found 'no'; write false"),
        ("sampling: {stop: ['']}", r"job.yaml:6: sampling.stop: must be non-empty strings"),
        ("sampling: {stop: 5}", r"sampling.stop\[0\]: expected text, found 5; put it in quotes"),
        ("sampling: {temperature: hot}", r"sampling.temperature: expected a number, found 'hot'"),
        ("sampling: {temperature: .inf}", r"sampling.temperature: must be from 0 to 10,000"),
        ("sampling: {min_p: .nan}", r"sampling.min_p: must be from 0 to 1, got nan"),
        ("sampling: {max_tokens: 0}", r"sampling.max_tokens: must be at least 1, got 0"),
        ("sampling: {max_tokens: 2, min_tokens: 3}", r"min_tokens 3 is above max_tokens 2"),
        ("sampling: {bad_words: ['']}", r"sampling.bad_words: must be non-empty strings"),
        ("sampling: {bad_words: [no, 5]}", r"bad_words\[1\]: expected text, found 5; put it in q"),
        ("sampling: {typical_p: 0}", r"sampling.typical_p: must be above 0 and at most 1, got 0"),
        (
            "sampling: {repetition_penalty: 0}",
            r"repetition_penalty: must be above 0 and at most 10,0",
        ),
        ("sampling: {presence_penalty: .nan}", r"presence_penalty: must be from -10,000 to 10,000"),
        ("sampling: {frequency_penalty: 1e5}", r"frequency_penalty: must be from -10,000 to"),
        ("sampling: {frequency_penalties: 1}", r"unknown key; did you mean frequency_penalty\?"),
        ("sampling: {logprobs: 21}", r"sampling.logprobs: must be from 0 to 20, got 21"),
        (
            "sampling: {prompt_logprobs: -1}",
            r"sampling.prompt_logprobs: must be from 0 to 20, got -1",
        ),
        ("sampling: {logprobs: true}", r"logprobs: expected a whole number, found true"),
        ("sampling: {logit_bias: [[5, 1]]}", r":6: sampling.logit_bias: expected token ids with n"),
        ("sampling: {logit_bias: {the: 1}}", r"logit_bias: expected a token id, found 'the'"),
        ("sampling: {logit_bias: {010: 1}}", r"logit_bias: expected a token id, found '010'"),
        ("sampling: {logit_bias: {-1: 1}}", r"logit_bias: expected a token id, found '-1'"),
        ("sampling: {logit_bias: {9999999999: 1}}", r"logit_bias: must be token ids with finite"),
        ("sampling: {logit_bias: {5: ban}}", r"token id 5: expected a number .* found 'ban'"),
        ("sampling: {logit_bias: {5: }}", r"token id 5: expected a number .* found None"),
        ("sampling: {logit_bias: {5: true}}", r"token id 5: expected a number .* found True"),
        ("sampling: {logit_bias: {5: -.inf}}", r"token id '5': write -inf, without a dot, to ban"),
        ("sampling: {logit_bias: {5: .nan}}", r"token id 5: expected a number .* found nan"),
        (
            f"sampling: {{logit_bias: {dict.fromkeys(range(321), 1)}}}",
            r"logit_bias: expected at most 320 tokens, found 321",
        ),
        (
            "sampling: {early_stopping: 1}",
            r'early_stopping: expected true, false or "never", found',
        ),
        ("sampling: {early_stopping: null}", r'expected true, false or "never", found None'),
        ("sampling: {n: 0}", r"sampling.n: must be from 1 to 256, got 0"),
        ("sampling: {n: 2, best_of: 0}", r"sampling.best_of: must be from n to 256, got 0"),
        ("sampling: {beam_width: 17}", r"sampling.beam_width: must be from n to 16, got 17"),
        (
            "sampling: {n: 3, best_of: 2, temperature: 1}",
            r":6: sampling: n is 3, but best_of is 2; n of them are kept, so best_of must be at l",
        ),
        ("sampling: {n: 3, beam_width: 2}", r"sampling: n is 3, but beam_width is 2"),
        (
            "sampling: {n: 3}",
            r"n is 3 and temperature 0, .* set temperature above 0, or beam_width",
        ),
        ("sampling: {best_of: 3}", r"best_of is 3 and temperature 0, .* above 0, or beam_width"),
        ("sampling: {beam_width: 2, temperature: 1}", r"beam_width 2 and temperature exclude each"),
        (
            "sampling: {beam_width: 2, best_of: 2}",
            r"beam_width 2 and best_of exclude each other; leave one of them out",
        ),
        (
            "sampling: {beam_width: 2, columns: {temperature: t}}",
            r"beam_width 2 and columns.temperature exclude each other",
        ),
        ("sampling: {length_penalty: 2}", r"length_penalty is of beam search alone; set beam_wid"),
        ("sampling: {early_stopping: true}", r"early_stopping is of beam search alone"),
        (
            "sampling: {columns: {n: x}}",
            r":6: sampling.columns.n: unknown key; it belongs under sampl",
        ),
        ("sampling: {columns: {logprobs: x}}", r"sampling.columns.logprobs: unknown key; it belo"),
        ("sampling: {columns: {top_p: 5}}", r"sampling.columns.top_p: expected text, found 5"),
        ("engine: {weight_dtype: int5}", r"engine.weight_dtype: .* found 'int5'"),
        ("engine: {kv_dtype: int5}", r"engine.kv_dtype: .* found 'int5'; did you mean int8\?"),
        ("engine: {preemption: swop}", r"engine.preemption: .* found 'swop'; did you mean swap\?"),
        ("engine: {swap_space: -1}", r"engine.swap_space: must be from 0 to 1,000,000 GiB, got -1"),
        (
            "engine: {prefix_cache: on}",
            r"prefix_cache: expected true or false, found 'on'; write t",
        ),
        ("engine: {deterministic: 1}", r"engine.deterministic: expected true or false, found 1"),
        ("explode: true", r"job.yaml:6: explode: unknown key; it belongs under output"),
        ("engine: {dtype: bfloat}", r"found 'bfloat'; did you mean bfloat16\?"),
        ("engine: {block_size: 0}", r"engine.block_size: must be at least 1, got 0"),
        ("engine: 5", r"engine: expected a group of keys, found 5"),
        ("max_errors: many", r"max_errors: expected a number of rows or a share"),
        ("max_errors: -1", r"max_errors: expected a number of rows or a share"),
        ("eval: {metrics: [contains]}", r"job.yaml:6: eval.reference: required key is missing"),
        ("eval: {reference: a, metrics: []}", r"eval.metrics: expected at least one metric"),
        ("eval: {reference: a, metrics: [contain]}", r"metrics\[0\]: .*did you mean contains\?"),
        ("eval: {reference: a, metrics: [contains, contains]}", r"'contains' is listed twice"),
    ],
)
def test_a_wrong_key_is_named_with_line_and_remedy(write_job, text, message):
    with pytest.raises(ConfigError, match=message):
        JobSpec.from_file(write_job(JOB + text + "\n"))


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ("{path: a, prompt: x, prompt_column: q}", r"one of .*; found prompt and prompt_column"),
        ("{path: a}", r"exactly one of .*; found none of them"),
        ("{path: a, messages: []}", r"input.messages: expected at least one message"),
        ("{path: a, messages: [{role: user}]}", r"messages\[0\].content: required key is missing"),
        ("{path: [], prompt: x}", r"input.path: expected at least one path"),
        ("{path: 5, prompt: x}", r"input.path: expected a list, found 5"),
        (
            "{path: 'ftp://b/k', prompt: x}",
            r"a local path, or a URL that begins with s3:// or gs://",
        ),
        ("{path: a, prompt: x, on_too_long: truncate}", r"on_too_long: .*; did you mean truncate_"),
        (
            "{path: a, prompt: x, on_null: drop}",
            r"input.on_null: expected 'error' or 'skip', found",
        ),
        (
            "{path: a, prompt: x, system_role: join}",
            r"system_role: expected 'keep' or 'merge', fou",
        ),
        ("{path: a, prompt: x, columns: [q, q]}", r"input.columns: 'q' is listed twice"),
    ],
)
def test_a_wrong_input_is_named(write_job, section, message):
    job = f"model: m\noutput: {{path: o}}\ninput: {section}\n"

    with pytest.raises(ConfigError, match=r"job.yaml:3: .*" + message):
        JobSpec.from_file(write_job(job))


def test_all_problems_are_listed_in_the_order_of_the_file(write_job):
    job = "input: {path: a, promt: b}\nsampling:\n  top_p: 2\n  top_k: x\nseed: no\n"

    with pytest.raises(ConfigError) as caught:
        JobSpec.from_file(write_job(job))

    lines = str(caught.value).splitlines()
    assert lines[0].endswith("job.yaml has 6 problems:")
    assert [line.split("job.yaml:")[1].split(":")[0].strip() for line in lines[1:]] == [
        "model",
        "output",
        "1",
        "3",
        "4",
        "5",
    ]


def test_overrides_replace_and_add_keys(write_job, tmp_path):
    overrides = (
        "sampling.max_tokens=7",
        "sampling.stop=[x, y]",
        "input.prompt_column=null",
        "input.prompt={{ a }}: b",
        "sampling.columns.seed=s",
        "output.path=elsewhere",
    )

    spec = JobSpec.from_file(write_job(JOB + "sampling: {max_tokens: 3}\n"), overrides)

    assert spec.sampling.max_tokens == 7
    assert spec.sampling.stop == ("x", "y")
    assert spec.input.prompt == "{{ a }}: b"
    assert spec.sampling.columns.seed == "s"
    assert spec.output.path == str(tmp_path / "jobs" / "elsewhere")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("seed", r"--set seed: expected key=value"),
        ("=5", r"--set : expected key=value"),
        ("seed.x=5", r"--set seed.x: seed has no keys inside"),
        ("sampling.max_tokns=5", r"--set sampling.max_tokns: .*did you mean max_tokens\?"),
        ("sampling.max_tokens=x", r"--set sampling.max_tokens: .*a whole number, found 'x'"),
        ("sampling.max_tokens=[1", r"--set sampling.max_tokens: .*a whole number, found '\[1'"),
        ("model=~nosuchuser/x", r"~nosuchuser/x: no such user's folder"),
    ],
)
def test_a_wrong_override_is_named(write_job, override, message):
    with pytest.raises(ConfigError, match=message):
        JobSpec.from_file(write_job(JOB + "seed: 1\n"), [override])


@pytest.mark.parametrize("text", ["", "- a", "5", "text"])
def test_a_file_without_keys_is_refused(write_job, text):
    with pytest.raises(ConfigError, match=r"job.yaml: expected keys such as model, input"):
        JobSpec.from_file(write_job(text))


def test_samples_of_rows_with_their_own_temperature_are_checked_row_by_row(write_job):
    job = JOB + "sampling: {n: 2, columns: {temperature: t}}\n"

    assert JobSpec.from_file(write_job(job)).sampling.n == 2


def test_a_bias_may_be_given_for_numbers_and_on_the_command_line(write_job):
    job = {"model": "m", "input": {"path": "a", "prompt": "b"}, "output": {"path": "c"}}
    spec = JobSpec.from_dict(job | {"sampling": {"logit_bias": {5: 1, 3: "-inf"}}})

    assert spec.sampling.logit_bias == ((3, float("-inf")), (5, 1.0))
    for override in ("sampling.logit_bias={5: 1, 3: -inf}", "sampling.logit_bias.5=1"):
        start = JOB + "sampling: {logit_bias: {3: -inf}}\n"
        found = JobSpec.from_file(write_job(start), [override])
        assert found.sampling.logit_bias == spec.sampling.logit_bias
    with pytest.raises(ConfigError, match="token id 5 is there twice"):
        JobSpec.from_dict(job | {"sampling": {"logit_bias": {5: 1, "5": 2}}})


def test_a_share_of_errors_counts_rows():
    job = {"model": "m", "input": {"path": "a", "prompt": "b"}, "output": {"path": "c"}}

    assert JobSpec.from_dict(job | {"max_errors": "5%"}).error_limit(50) == 2
    assert JobSpec.from_dict(job | {"max_errors": "29%"}).error_limit(100) == 29
    assert JobSpec.from_dict(job | {"max_errors": 3}).error_limit(50) == 3
    assert JobSpec.from_dict(job | {"max_errors": 0}).error_limit(50) == 0


def test_from_dict_lists_problems_without_a_file():
    with pytest.raises(ConfigError, match="job: model: required key is missing"):
        JobSpec.from_dict({"input": {"path": "a", "prompt": "b"}, "output": {"path": "c"}})


def test_every_key_is_either_a_result_key_or_a_run_key():
    def keys(model: type[pydantic.BaseModel], prefix: str = "") -> set[str]:
        found = set()
        for name, field in model.model_fields.items():
            arguments = getattr(field.annotation, "__args__", (field.annotation,))
            inner = [
                a for a in arguments if isinstance(a, type) and issubclass(a, pydantic.BaseModel)
            ]
            found |= keys(inner[0], f"{prefix}{name}.") if inner else {f"{prefix}{name}"}
        return found

    everything = keys(JobSpec)
    # Compared as a whole.
    wholes = {"input.messages", "engine.rope"}
    inner = {key for key in everything for whole in wholes if key.startswith(f"{whole}.")}

    assert (everything - inner) | wholes == (identity.RESULT_KEYS | identity.RUN_KEYS)
    assert not identity.RESULT_KEYS & identity.RUN_KEYS


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("prompt", "Say {{ q }} # not a comment"),
        ("prompt", "[INST] {{ q }} [/INST]"),
        ("prompt", "Q: {{ q }}"),
        ("prompt", "{{ q }}: {{ q }}"),
        ("prompt", "*{{ q }}*"),
        ("path", "*.parquet"),
    ],
)
def test_text_of_an_override_is_taken_as_it_is(write_job, key, text):
    overrides = ["input.prompt_column=null", "input.prompt=x", f"input.{key}={text}"]

    spec = JobSpec.from_file(write_job(JOB), overrides)

    found = spec.input.prompt if key == "prompt" else spec.input.path[0].rpartition("/")[2]
    assert found == text


def test_a_quoted_override_is_unquoted_and_a_lone_mark_is_text(write_job):
    path = write_job(JOB)
    assert JobSpec.from_file(path, ["sampling.stop='null'"]).sampling.stop == ("null",)
    assert JobSpec.from_file(path, ["sampling.stop=#"]).sampling.stop == ("#",)
    assert JobSpec.from_file(path, ["sampling.stop=null"]).sampling.stop == ()


def test_paths_to_the_same_model_are_one_path(write_job):
    path = write_job(JOB)
    one, other = (JobSpec.from_file(path, [f"model={m}"]) for m in ("m/tiny", "m/../m/tiny"))
    assert one.model == other.model


@pytest.mark.parametrize(
    "override",
    ["sampling.top_k=3000000000", "sampling.temperature=1e300", "sampling.stop_token_ids=[1e12]"],
)
def test_numbers_that_the_device_cannot_hold_are_refused(write_job, override):
    with pytest.raises(ConfigError, match=override.partition("=")[0]):
        JobSpec.from_file(write_job(JOB), [override.replace("1e12", str(10**12))])


def test_input_and_output_may_be_urls_and_stay_as_they_are(write_job):
    overrides = ["input.path=[s3://b/in/, 'gs://b/x/*.parquet', ~/x]", "output.path=s3://b/out/"]

    spec = JobSpec.from_file(write_job(JOB), overrides)

    assert spec.input.path[:2] == ("s3://b/in", "gs://b/x/*.parquet")
    assert spec.input.path[2].endswith("/x")
    assert spec.output.path == "s3://b/out"


STORAGE = """\
storage:
  s3:
    endpoint_url: http://127.0.0.1:9000
    key: ${ENV:JOB_KEY}
    secret: ${ENV:JOB_SECRET}
"""


def test_how_stores_are_reached_names_secrets_without_looking_at_them(write_job, monkeypatch):
    monkeypatch.setenv("JOB_KEY", "hush")
    monkeypatch.delenv("JOB_SECRET", raising=False)

    spec = JobSpec.from_file(write_job(JOB + STORAGE))

    assert spec.storage.s3.endpoint_url == "http://127.0.0.1:9000"
    assert spec.storage.s3.key == "${ENV:JOB_KEY}"
    assert "hush" not in spec.model_dump_json()
    assert JobSpec.from_file(write_job(JOB + "storage:\n")).storage == StorageOptions()
    assert JobSpec.from_file(write_job(JOB + "storage: {s3: }\n")).storage == StorageOptions()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("storage: {s3: {key: hush}}", r"job.yaml:6: storage.s3.key: expected the name of an env"),
        ("storage: {s3: {secret: 4711}}", r"storage.s3.secret: .* as \$\{ENV:NAME\}; secrets are"),
        ("storage: {s3: {key: '${ENV:A}'}}", r"storage.s3: key and secret go together"),
        ("storage: {s3: hush}", r"job.yaml:6: storage.s3: expected a group of keys$"),
        ("storage: hush", r"job.yaml:6: storage: expected a group of keys$"),
        ("storage: {s3: {kex: hush}}", r"storage.s3.kex: unknown key; did you mean key\?"),
        ("storage: {endpoint_url: http://x}", r"unknown key; it belongs under storage.s3"),
        ("storage: {gs: {endpoint_url: 'http://a:hush@h'}}", r"storage.gs.endpoint_url: .*without"),
        ("output: {path: 's3://a:hush@b/x'}", r"output.path: expected a URL without user and pas"),
        ("output: {path: 's3://b/x?hush=4711'}", r"output.path: expected a URL without \? and #"),
        ("input: {path: ['x', 's3://a:hush@b'], prompt: p}", r"input.path: .* without user and"),
        ("output: {path: 'http://hush@b/x'}", r"output.path: expected a local path, or a URL th"),
    ],
)
def test_secrets_in_a_job_file_are_refused_and_not_repeated(write_job, text, message):
    lines = [line for line in JOB.splitlines() if not line.startswith(text.split(":")[0] + ":")]
    if text.startswith("input"):
        lines = [line for line in lines if not line.startswith("  ")]
    job = "\n".join([*lines, *[""] * (5 - len(lines)), text])

    with pytest.raises(ConfigError, match=message) as caught:
        JobSpec.from_file(write_job(job))

    assert "hush" not in str(caught.value)
    assert "4711" not in str(caught.value)


def test_a_value_in_the_wrong_place_is_not_shown_by_pydantic_either():
    with pytest.raises(pydantic.ValidationError) as caught:
        JobSpec.model_validate({"storage": {"s3": {"key": "hush", "secret": 4711}}, "seed": "hush"})

    assert "hush" not in str(caught.value)
    assert "4711" not in str(caught.value)
