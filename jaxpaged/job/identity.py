"""What makes two runs the same job: the result keys of the spec, the model, the input's files.

A job's identity is written into its output folder once; a rerun continues a folder only if its
own identity is the same.
"""

from collections.abc import Iterator, Mapping

from jaxpaged.job.input_plan import InputPlan
from jaxpaged.job.spec import JobSpec

FORMAT = 1
"""Of the record; raised when its sections change their meaning."""

RESULT_KEYS = frozenset(
    {
        "model",
        "input.prompt",
        "input.prompt_column",
        "input.prompt_ids_column",
        "input.messages",
        "input.messages_column",
        "input.columns",
        "input.allow_special_tokens",
        "input.max_prompt_bytes",
        "output.rows_per_part",
        "output.token_ids",
        "output.prompt",
        "sampling.max_tokens",
        "sampling.temperature",
        "sampling.top_k",
        "sampling.top_p",
        "sampling.min_p",
        "sampling.seed",
        "sampling.stop",
        "sampling.stop_token_ids",
        "sampling.include_stop",
        "sampling.min_tokens",
        "sampling.ignore_eos",
        "sampling.columns.max_tokens",
        "sampling.columns.temperature",
        "sampling.columns.seed",
        "engine.dtype",
        "engine.max_model_len",
        "eval.reference",
        "eval.metrics",
        "eval.by",
        "seed",
    }
)
"""Keys that decide what the rows are and how they are cut into parts."""

RUN_KEYS = frozenset(
    {
        "input.path",
        "output.path",
        "engine.max_num_seqs",
        "engine.max_num_batched_tokens",
        "engine.block_size",
        "engine.num_blocks",
        "engine.memory_utilization",
        "max_errors",
    }
)
"""Keys that change how a job runs and never what its rows are: they may differ on a rerun.

The input's path is one of them because the files behind it are compared instead.
"""


def record(spec: JobSpec, inputs: InputPlan, fingerprint: Mapping[str, str]) -> dict[str, object]:
    """What the output folder remembers of a job, in JSON's types.

    The sections `result_keys`, `model` (the checkpoint's `fingerprint`) and `input` are the job's
    identity; `run_keys` is for people.
    """
    return {
        "format": FORMAT,
        "result_keys": _pick(spec, RESULT_KEYS),
        "run_keys": _pick(spec, RUN_KEYS),
        "model": dict(fingerprint),
        "input": inputs.identity(),
    }


def differences(old: Mapping[str, object], new: Mapping[str, object]) -> list[str]:
    """How the identities in two records differ, a line for each key; empty if they are equal."""
    if old.get("format") != new.get("format"):
        # The sections of another format may mean something else.
        return [f"format of the record: {_show(old.get('format'))} -> {_show(new.get('format'))}"]
    lines = []
    for section, prefix in (("result_keys", ""), ("model", "the model's "), ("input", "")):
        before, after = _section(old, section), _section(new, section)
        lines += [
            f"{prefix}{key}: {_show(before.get(key))} -> {_show(after.get(key))}"
            for key in sorted(before.keys() | after.keys())
            if before.get(key) != after.get(key)
        ]
    return lines


def _section(job: Mapping[str, object], name: str) -> Mapping[str, object]:
    section = job.get(name)
    return section if isinstance(section, Mapping) else {}


def _pick(spec: JobSpec, keys: frozenset[str]) -> dict[str, object]:
    flat = dict(_flatten(spec.model_dump(mode="json"), ""))
    return {key: flat.get(key) for key in sorted(keys)}


def _flatten(section: Mapping[str, object], prefix: str) -> Iterator[tuple[str, object]]:
    for key, value in section.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _show(value: object) -> str:
    text = "none" if value is None else repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
