import copy
import dataclasses
import pathlib
import tempfile
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpaged.errors import IdentityError
from jaxpaged.job import spec_file
from jaxpaged.job.input.file_record import FileRecord
from jaxpaged.job.output import history, identity
from jaxpaged.job.output.history import History, JobRecord
from jaxpaged.job.output.output_view import PRIVATE
from jaxpaged.job.sampling_section import SamplingColumns
from jaxpaged.job.spec import JobSpec
from jaxpaged.storage.local_store import LocalStore

JOB: dict[str, Any] = {
    "model": "/m",
    "input": {"path": "/a", "prompt_column": "q"},
    "output": {"path": "/o"},
    "eval": {"reference": "r", "metrics": ["contains"]},
}

# Where a key means something for chats alone.
CHAT_JOB: dict[str, Any] = JOB | {"input": {"path": "/a", "messages_column": "c"}}
CHAT_KEYS = {"input.chat_template", "input.template_kwargs", "input.continue_final_message"}

# Another value for every key of a job file; and what has to change with it.
OTHERS: dict[str, Any] = {
    "model": "/n",
    "adapters": {"a": "/a"},
    "adapter": "a",
    "adapter_column": "q",
    "input.prompt": "{{ q }}",
    "input.prompt_column": "p",
    "input.prompt_ids_column": "ids",
    "input.messages": [{"role": "user", "content": "x"}],
    "input.messages_column": "chat",
    "input.columns": ["q"],
    "input.allow_special_tokens": True,
    "input.max_prompt_bytes": 5,
    "input.on_too_long": "skip",
    "input.on_null": "skip",
    "input.system_role": "merge",
    "input.chat_template": "tool_use",
    "input.template_kwargs": {"enable_thinking": False},
    "input.continue_final_message": True,
    "input.path": "/b",
    "output.path": "/p",
    "output.rows_per_part": 7,
    "output.token_ids": True,
    "output.prompt": True,
    "output.explode": True,
    "output.durability": "process",
    "output.journal_interval": 1.0,
    "output.report_samples": False,
    "sampling.max_tokens": 7,
    "sampling.temperature": 0.5,
    "sampling.top_k": 3,
    "sampling.top_p": 0.5,
    "sampling.min_p": 0.5,
    "sampling.typical_p": 0.5,
    "sampling.repetition_penalty": 1.5,
    "sampling.presence_penalty": -0.5,
    "sampling.frequency_penalty": 0.5,
    "sampling.logit_bias": {"5": 1.5, "7": "-inf"},
    "sampling.bad_words": ["x"],
    "sampling.logprobs": 0,
    "sampling.prompt_logprobs": 2,
    "sampling.n": 2,
    "sampling.best_of": 2,
    "sampling.beam_width": 2,
    "sampling.length_penalty": 0.5,
    "sampling.early_stopping": "never",
    "sampling.seed": 3,
    "sampling.stop": ["x"],
    "sampling.stop_token_ids": [3],
    "sampling.include_stop": True,
    "sampling.stop_after": "</think>",
    "sampling.min_tokens": 2,
    "sampling.ignore_eos": True,
    **{f"sampling.columns.{name}": "x" for name in SamplingColumns.model_fields},
    "engine.dtype": "bfloat16",
    "engine.weight_dtype": "int4",
    "engine.kv_dtype": "int8",
    "engine.attention": "triton",
    "engine.deterministic": False,
    "engine.max_model_len": 99,
    "engine.max_num_seqs": 3,
    "engine.max_num_batched_tokens": 512,
    "engine.block_size": 8,
    "engine.num_blocks": 99,
    "engine.memory_utilization": 0.7,
    "engine.prefix_cache": False,
    "engine.preemption": "swap",
    "engine.swap_space": 0.5,
    "engine.rope": {"rope_type": "yarn", "factor": 2.0},
    "eval.reference": "s",
    "eval.metrics": ["exact_match"],
    "eval.by": "kind",
    "eval.answer_after": "</think>",
    "storage.s3.endpoint_url": "http://localhost:1",
    "storage.s3.region": "x",
    "storage.s3.profile": "x",
    "storage.s3.anonymous": True,
    "storage.s3.key": "${ENV:A}",
    "storage.s3.secret": "${ENV:B}",
    "storage.s3.token": "${ENV:C}",
    "storage.gs.endpoint_url": "http://localhost:1",
    "storage.gs.project": "x",
    "storage.gs.anonymous": True,
    "storage.gs.token": "${ENV:A}",
    "seed": 1,
    "max_errors": "5%",
}
ALONG: dict[str, dict[str, Any]] = {
    **{
        key: {"input.prompt_column": None}
        for key in OTHERS
        if key.startswith(("input.prompt", "input.messages"))
    },
    "input.prompt_column": {},
    "adapters": {"adapter": "a"},
    "adapter": {"adapters": {"a": "/a"}},
    "adapter_column": {"adapters": {"a": "/a"}},
    "sampling.n": {"sampling.temperature": 1.0},
    "sampling.best_of": {"sampling.temperature": 1.0},
    "sampling.length_penalty": {"sampling.beam_width": 2},
    "sampling.early_stopping": {"sampling.beam_width": 2},
    "storage.s3.key": {"storage.s3.secret": "${ENV:B}"},
    "storage.s3.secret": {"storage.s3.key": "${ENV:A}"},
    "storage.s3.token": {"storage.s3.key": "${ENV:A}", "storage.s3.secret": "${ENV:B}"},
}


def file_record(name: str, **changes: object) -> FileRecord:
    record = FileRecord(
        name=name,
        bytes=100,
        content=f"sha256:{'a' * 64}",
        footer="b" * 64,
        row_groups=((4, 1),),
        modified="",
        stamp="",
        hashed_at=0,
    )
    values: dict[str, Any] = changes
    return dataclasses.replace(record, **values)


def record_of(
    job: dict[str, Any], files: tuple[FileRecord, ...] = (), model: str = "abc"
) -> JobRecord:
    spec = JobSpec.from_dict(job)
    return history.job_record(
        result_keys=identity.result_keys(spec),
        run_keys=identity.run_keys(spec),
        model={"weights": model},
        files=files,
        schema=[],
    )


def check(known: JobRecord | History, here: JobRecord, *, extends: bool = False) -> None:
    known = known if isinstance(known, History) else History(job=known)
    identity.check_same(known, here, place="/out", extends=extends)


def test_every_key_has_another_value_here():
    assert OTHERS.keys() == identity.RESULT_KEYS | identity.RUN_KEYS


@pytest.mark.parametrize("key", sorted(OTHERS))
def test_a_result_key_may_not_change_and_a_run_key_may(key):
    job = CHAT_JOB if key in CHAT_KEYS else JOB
    changed = copy.deepcopy(job)
    for name, value in {**ALONG.get(key, {}), key: OTHERS[key]}.items():
        spec_file.put(changed, name, value)
    known, here = record_of(job), record_of(changed)

    if key in identity.RUN_KEYS:
        check(known, here)
        assert here.fingerprint == known.fingerprint
        assert here.run_keys != known.run_keys
        return
    with pytest.raises(IdentityError) as caught:
        check(known, here)
    was, now = known.result_keys[key], here.result_keys[key]
    shown = ["none" if value is None else repr(value) for value in (was, now)]
    assert f"\n  {key}: {shown[0]} -> {shown[1]}\n" in str(caught.value)
    assert here.fingerprint != known.fingerprint


def test_a_refusal_says_what_was_what_is_and_what_to_do():
    files = (file_record("a"), file_record("b"), file_record("c"))
    known = record_of(JOB, files)
    changed = (
        file_record("a", content=f"sha256:{'c' * 64}"),
        file_record("c", row_groups=((2, 1), (3, 1)), bytes=90),
        file_record("d"),
    )

    with pytest.raises(IdentityError) as caught:
        check(known, record_of(JOB | {"seed": 5, "model": "/" + "x" * 200}, changed, model="xyz"))

    assert caught.value.exit_code == 3
    assert str(caught.value).splitlines() == [
        "output.path: /out holds the results of a job that differs from this one (there -> here):",
        f"  model: '/m' -> '/{'x' * 75}...",
        "  seed: 0 -> 5",
        "  the model's weights: 'abc' -> 'xyz'",
        f"  input file a: content 'sha256:{'a' * 64}' -> 'sha256:{'c' * 64}'",
        "  input file b: 4 rows -> is gone; put it back",
        "  input file c: rows 4 -> 5",
        "  input file c: row groups [[4, 1]] -> [[2, 1], [3, 1]]",
        "  input file c: bytes 100 -> 90",
        "  input file d: is new, 4 rows",
        "Change that back to continue the job, or choose another output.path; `jaxpaged run JOB "
        "--extend` takes new input files in",
    ]


def test_a_long_list_of_differences_is_cut():
    known = record_of(JOB, tuple(file_record(f"{i:03d}") for i in range(30)))

    with pytest.raises(IdentityError) as caught:
        check(known, record_of(JOB))

    lines = str(caught.value).splitlines()
    assert len(lines) == 13
    assert lines[-2:] == [
        "  and 20 more",
        "Change that back to continue the job, or choose another output.path",
    ]


def test_new_files_pass_where_they_are_taken_in_and_nothing_else_does():
    known = History(job=record_of(JOB, (file_record("b"),)))
    known = known.followed_by(known.extension([file_record("c")]))
    grown = record_of(JOB, (file_record("b"), file_record("c"), file_record("a")))

    check(known, grown, extends=True)
    assert [file.name for file in identity.new_files(known, grown)] == ["a"]
    check(known, record_of(JOB, (file_record("b"), file_record("c"))), extends=True)
    for here in (
        record_of(JOB, (file_record("b"), file_record("a"))),
        record_of(JOB, (file_record("b", footer="c" * 64), file_record("c"), file_record("a"))),
        record_of(JOB | {"seed": 1}, (file_record("b"), file_record("c"), file_record("a"))),
    ):
        with pytest.raises(IdentityError) as caught:
            check(known, here, extends=True)
        assert "is new" not in str(caught.value)


def test_touched_and_copied_files_pass():
    known = record_of(JOB, (file_record("a"),))

    here = record_of(JOB, (file_record("a", modified="x", stamp="y", hashed_at=9),))
    check(known, here)
    assert here.input != known.input
    assert here.fingerprint == known.fingerprint


# What a job file may say; text of every kind, and numbers at their limits.
_TEXT = st.text(min_size=1, max_size=12)
_NAME = st.text("ab ü*[]{}.-_'\"", min_size=1, max_size=8).map(lambda text: f"/x{text}x")
_LARGE = st.integers(0, 2**63 - 1)


def _section(required: dict[str, Any], **optional: st.SearchStrategy) -> st.SearchStrategy:
    return st.fixed_dictionaries(required, optional=optional)


_PROMPTS = st.one_of(
    st.fixed_dictionaries({"prompt": st.text(max_size=20)}),
    *(
        st.fixed_dictionaries({name: _TEXT})
        for name in ("prompt_column", "prompt_ids_column", "messages_column")
    ),
    st.fixed_dictionaries(
        {
            "messages": st.lists(
                st.fixed_dictionaries({"role": _TEXT, "content": st.text(max_size=20)}),
                min_size=1,
                max_size=3,
            )
        }
    ),
)
_COLUMNS = st.lists(_TEXT, unique=True, max_size=3)
_INPUT = st.builds(
    lambda prompt, others: prompt | others,
    _PROMPTS,
    _section(
        {"path": st.one_of(_NAME, st.lists(_NAME, min_size=1, max_size=3), st.just("s3://b/k"))},
        columns=st.none() | _COLUMNS,
        allow_special_tokens=st.booleans(),
        max_prompt_bytes=st.integers(1, 10**12),
    ),
)
_JOBS = _section(
    {
        "model": st.one_of(_NAME, st.just("pkg://a/b.gguf")),
        "input": _INPUT,
        "output": _section(
            {"path": st.one_of(st.just("/o/u t"), st.just("gs://bucket/a b"))},
            rows_per_part=st.integers(1, 10**9),
            token_ids=st.booleans(),
            durability=st.sampled_from(["machine", "process"]),
            journal_interval=st.floats(0, 3600) | st.integers(0, 3600),
            report_samples=st.booleans(),
        ),
    },
    sampling=st.none()
    | _section(
        {},
        temperature=st.floats(0, 1e4) | st.integers(0, 3),
        top_p=st.floats(1e-300, 1),
        top_k=st.integers(-1, 2**31 - 1),
        seed=st.none() | _LARGE,
        stop=st.one_of(st.none(), _TEXT, st.lists(_TEXT, max_size=3)),
        stop_token_ids=st.lists(st.integers(0, 2**31 - 1), max_size=3),
        include_stop=st.booleans(),
        logit_bias=st.none()
        | st.dictionaries(
            st.integers(0, 2**31 - 1), st.floats(-1e4, 1e4) | st.just("-inf"), max_size=3
        ),
        bad_words=st.one_of(st.none(), _TEXT, st.lists(_TEXT, max_size=3)),
        logprobs=st.none() | st.integers(0, 20),
        typical_p=st.floats(1e-300, 1),
        columns=_section({}, max_tokens=_TEXT, top_p=st.none() | _TEXT, logit_bias=_TEXT),
    ),
    engine=st.none()
    | _section(
        {},
        dtype=st.sampled_from([None, "float32", "bfloat16"]),
        kv_dtype=st.sampled_from([None, "fp8", "int4"]),
        swap_space=st.floats(0, 100) | st.integers(0, 9),
        attention=st.sampled_from(["auto", "xla", "triton", "mosaic"]),
        deterministic=st.none() | st.booleans(),
        max_model_len=st.integers(2, 10**6),
        memory_utilization=st.floats(0.1, 0.9),
    ),
    storage=st.none()
    | _section(
        {},
        s3=_section({}, region=_TEXT, anonymous=st.just(True)),
        gs=_section({}, project=_TEXT, token=st.just("${ENV:TOKEN}")),
    ),
    eval=st.none()
    | _section(
        {"reference": _TEXT, "metrics": st.just(["contains", "exact_match"])}, by=st.none() | _TEXT
    ),
    seed=_LARGE,
    max_errors=st.one_of(st.none(), st.integers(0, 10**6), st.just("2.5%")),
)


@settings(deadline=None)
@given(_JOBS)
def test_a_record_gives_back_its_job(job):
    spec = JobSpec.from_dict(job)
    record = record_of(job)

    with tempfile.TemporaryDirectory() as folder:
        store = LocalStore(pathlib.Path(folder), private=PRIVATE, durability="process")
        assert store.lock()
        assert store.create(history.JOB, history.to_bytes(record))
        read = history.read(store)
        store.unlock()

    assert read == History(job=record)
    assert read is not None
    again = JobSpec.from_dict(identity.spec_of(read.job))
    assert again == spec
    assert record_of(identity.spec_of(read.job)).fingerprint == record.fingerprint
