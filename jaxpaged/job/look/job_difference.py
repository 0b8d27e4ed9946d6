"""What differs between two jobs, as their output folders remember them, in a few lines."""

from collections.abc import Iterator, Mapping

from jaxpaged.job.output.history import History, Revision

_MAX_CHARS = 80
_MAX_FILES = 10


def differences(a: History, b: History) -> list[str]:
    """A line for each result key, file of the model, retry and input file that differs.

    Each says what it is in the first job and in the second one.
    """
    return [*_changed(_facts(a), _facts(b)), *changed_files(a, b)]


def describe(retry: Revision) -> str:
    """What a retry was asked, on one line."""
    settings = "".join(f", {key}={value!r}" for key, value in retry.settings.items())
    return f"retry where {retry.where}{settings}"


def _facts(known: History) -> dict[str, object]:
    facts: dict[str, object] = dict(known.job.result_keys)
    facts |= {f"the model's {part}": value for part, value in known.job.model.items()}
    for retry in known.retries:
        facts[f"revision {retry.number}"] = describe(retry)
    return facts


def _changed(a: Mapping[str, object], b: Mapping[str, object]) -> Iterator[str]:
    for key in sorted(a.keys() | b.keys()):
        if a.get(key) != b.get(key):
            yield f"{key}: {_show(a.get(key))} -> {_show(b.get(key))}"


def changed_files(a: History, b: History) -> list[str]:
    """A line for each input file of one name whose rows have the same addresses and may yet be
    other rows; the first few."""
    others = {file.name: file.content for file in b.files}
    changed = [
        f"input file {file.name}: other bytes"
        for file in a.files
        if _differ(file.content, others.get(file.name, file.content))
    ]
    more = len(changed) - _MAX_FILES
    return changed[:_MAX_FILES] + ([f"and {more:,} more input files"] if more > 0 else [])


def _differ(content: str, other: str) -> bool:
    """Whether two digests tell of other bytes; an ETag and a SHA-256 tell nothing together."""
    is_same_kind = content.partition(":")[0] == other.partition(":")[0]
    return is_same_kind and content != other


def _show(value: object) -> str:
    text = "none" if value is None else repr(value)
    return text if len(text) <= _MAX_CHARS else f"{text[: _MAX_CHARS - 3]}..."
