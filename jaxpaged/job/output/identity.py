"""What makes two runs the same job: the result keys of the spec, the model, the input's files.

A job's identity is written into its output folder once; a rerun continues a folder only if its
own identity is the same, but for new input files it is told to take in.
"""

from collections.abc import Iterator, Mapping, Sequence

from jaxpaged.errors import IdentityError
from jaxpaged.job.input.file_record import FileRecord
from jaxpaged.job.output.history import History, JobRecord
from jaxpaged.job.spec import JobSpec

RESULT_KEYS = frozenset(
    {
        "model",
        "adapters",
        "adapter",
        "adapter_column",
        "input.prompt",
        "input.prompt_column",
        "input.prompt_ids_column",
        "input.messages",
        "input.messages_column",
        "input.columns",
        "input.allow_special_tokens",
        "input.max_prompt_bytes",
        "input.on_too_long",
        "input.on_null",
        "input.system_role",
        "input.template_kwargs",
        "input.continue_final_message",
        "output.rows_per_part",
        "output.token_ids",
        "output.prompt",
        "output.explode",
        "sampling.max_tokens",
        "sampling.temperature",
        "sampling.top_k",
        "sampling.top_p",
        "sampling.min_p",
        "sampling.typical_p",
        "sampling.repetition_penalty",
        "sampling.presence_penalty",
        "sampling.frequency_penalty",
        "sampling.logit_bias",
        "sampling.bad_words",
        "sampling.seed",
        "sampling.stop",
        "sampling.stop_token_ids",
        "sampling.include_stop",
        "sampling.stop_after",
        "sampling.min_tokens",
        "sampling.ignore_eos",
        "sampling.logprobs",
        "sampling.prompt_logprobs",
        "sampling.n",
        "sampling.best_of",
        "sampling.beam_width",
        "sampling.length_penalty",
        "sampling.early_stopping",
        "sampling.columns.max_tokens",
        "sampling.columns.min_tokens",
        "sampling.columns.temperature",
        "sampling.columns.top_k",
        "sampling.columns.top_p",
        "sampling.columns.min_p",
        "sampling.columns.typical_p",
        "sampling.columns.repetition_penalty",
        "sampling.columns.presence_penalty",
        "sampling.columns.frequency_penalty",
        "sampling.columns.seed",
        "sampling.columns.ignore_eos",
        "sampling.columns.stop",
        "sampling.columns.stop_token_ids",
        "sampling.columns.bad_words",
        "sampling.columns.logit_bias",
        "engine.dtype",
        "engine.weight_dtype",
        "engine.kv_dtype",
        "engine.max_model_len",
        "engine.attention",
        "engine.deterministic",
        "engine.rope",
        "eval.reference",
        "eval.metrics",
        "eval.by",
        "eval.answer_after",
        "seed",
    }
)
"""Keys that decide what the rows are and how they are cut into parts."""

RUN_KEYS = frozenset(
    {
        "input.path",
        "input.chat_template",
        "output.path",
        "output.durability",
        "output.journal_interval",
        "output.report_samples",
        "storage.s3.endpoint_url",
        "storage.s3.region",
        "storage.s3.profile",
        "storage.s3.anonymous",
        "storage.s3.key",
        "storage.s3.secret",
        "storage.s3.token",
        "storage.gs.endpoint_url",
        "storage.gs.project",
        "storage.gs.anonymous",
        "storage.gs.token",
        "engine.max_num_seqs",
        "engine.max_num_batched_tokens",
        "engine.block_size",
        "engine.num_blocks",
        "engine.memory_utilization",
        "engine.prefix_cache",
        "engine.preemption",
        "engine.swap_space",
        "max_errors",
    }
)
"""Keys that change how a job runs and never what its rows are: they may differ on a rerun.

The input's path and the chat template's are among them because what is behind them is compared
instead.
"""

_SHOWN = 10


def result_keys(spec: JobSpec) -> dict[str, object]:
    """The keys that decide what the rows are, by dotted name."""
    return _pick(spec, RESULT_KEYS)


def run_keys(spec: JobSpec) -> dict[str, object]:
    """The other keys, by dotted name."""
    return _pick(spec, RUN_KEYS)


def spec_of(record: JobRecord) -> dict[str, object]:
    """A record's keys as a job file has them, for `JobSpec.from_dict`."""
    job: dict[str, object] = {}
    for key, value in {**record.result_keys, **record.run_keys}.items():
        if value is None:
            continue
        *sections, last = key.split(".")
        target = job
        for section in sections:
            target = target.setdefault(section, {})
            assert isinstance(target, dict), "sections and keys have different names"
        target[last] = value
    return job


def check_same(known: History, here: JobRecord, *, place: str, extends: bool) -> None:
    """Refuses to continue the folder of a job that differs.

    Args:
        known: What the folder remembers.
        here: This job, as it would begin now.
        place: The folder, for the message.
        extends: New input files are welcome.

    Raises:
        IdentityError: Something differs; the message says what it was, what it is, what to do.
    """
    changes = list(_changed_keys(known.job.result_keys, here.result_keys, ""))
    changes += _changed_keys(known.job.model, here.model, "the model's ")
    changes += _changed_files(known.files, here.input)
    advice = "Change that back to continue the job, or choose another output.path"
    added = new_files(known, here)
    if added and not extends:
        changes += [f"input file {file.name}: is new, {file.num_rows:,} rows" for file in added]
        advice += "; `jaxpaged run JOB --extend` takes new input files in"
    if not changes:
        return
    more = [f"and {len(changes) - _SHOWN:,} more"] if len(changes) > _SHOWN else []
    listed = "".join(f"\n  {change}" for change in [*changes[:_SHOWN], *more])
    raise IdentityError(
        f"output.path: {place} holds the results of a job that differs from this one "
        f"(there -> here):{listed}\n{advice}"
    )


def new_files(known: History, here: JobRecord) -> list[FileRecord]:
    """The input files that the folder does not remember."""
    names = {file.name for file in known.files}
    return [file for file in here.input if file.name not in names]


def _changed_keys(
    old: Mapping[str, object], new: Mapping[str, object], prefix: str
) -> Iterator[str]:
    for key in sorted(old.keys() | new.keys()):
        if old.get(key) != new.get(key):
            yield f"{prefix}{key}: {_show(old.get(key))} -> {_show(new.get(key))}"


def _changed_files(old: Sequence[FileRecord], new: Sequence[FileRecord]) -> Iterator[str]:
    here = {file.name: file for file in new}
    for file in old:
        found = here.get(file.name)
        if found is None:
            yield f"input file {file.name}: {file.num_rows:,} rows -> is gone; put it back"
            continue
        was, now = _facts(file), _facts(found)
        for fact in (fact for fact in was if was[fact] != now[fact]):
            yield f"input file {file.name}: {fact} {_show(was[fact])} -> {_show(now[fact])}"


def _facts(file: FileRecord) -> dict[str, object]:
    """What of a file counts; one that was only touched or copied is the same."""
    return {
        "rows": file.num_rows,
        "row groups": [list(run) for run in file.row_groups],
        "bytes": file.bytes,
        "footer": file.footer,
        "content": file.content,
    }


def _pick(spec: JobSpec, keys: frozenset[str]) -> dict[str, object]:
    flat = dict(_flatten(spec.model_dump(mode="json"), "", keys))
    return {key: flat.get(key) for key in sorted(keys)}


def _flatten(
    section: Mapping[str, object], prefix: str, keys: frozenset[str]
) -> Iterator[tuple[str, object]]:
    """Keys by dotted name; what is inside a value of one of `keys` belongs to that value."""
    for name, value in section.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict) and key not in keys:
            yield from _flatten(value, f"{key}.", keys)
        else:
            yield key, value


def _show(value: object) -> str:
    text = "none" if value is None else repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
