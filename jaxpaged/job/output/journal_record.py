"""What stands in a unit's log: a head that says whose log it is, and records of finished rows.

Decoding is strict: a value that this module would not have written is no record. Knows nothing of
bytes and logs.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, get_args

from jaxpaged.job import token_logprobs
from jaxpaged.job.row_window import RowResult, SampleResult
from jaxpaged.job.token_logprobs import TokenLogprobs
from jaxpaged.job.units import Unit
from jaxpaged.request import ErrorCode

_FORMAT = 3

# These say something about the run; the next run may well complete the row.
_NO_VERDICTS = ("timeout", "cancelled")

_VERDICTS = tuple(code for code in get_args(ErrorCode) if code not in _NO_VERDICTS)

_INT32 = 2**31
_INT64 = 2**63


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RowAddress:
    """Where a row lies in the input.

    Attributes:
        file: The file's name in the plan.
        row_group: The row group's index in the file.
        index: The row's index in the row group.
    """

    file: str
    row_group: int
    index: int


def is_verdict(result: RowResult) -> bool:
    """Whether a run may take the result over from an earlier one.

    A row that failed before it had a prompt fails again for nothing.
    """
    return result.prompt_sha256 is not None and result.error_code not in _NO_VERDICTS


def head(unit: Unit) -> dict[str, Any]:
    """The first value of the unit's log."""
    return {"format": _FORMAT, **_values(unit)}


def encode(address: RowAddress, result: RowResult, params: str) -> dict[str, Any]:
    """The record of a finished row; `params` tells the parameters it was sampled with."""
    samples = [_json_values(sample) for sample in result.samples]
    values = _json_values(result) | {"samples": samples}
    return {"row": _values(address), "params": params, "result": values}


def decode(value: Any) -> tuple[RowAddress, RowResult, str] | None:  # noqa: ANN401  (JSON)
    """What a record says; None if the value is not a record of a verdict."""
    if not _fits(value, _RECORD):
        return None
    fields = dict(value["result"])
    fields["samples"] = tuple(_sample(sample) for sample in fields["samples"])
    fields["prompt_logprobs"] = _logprobs(fields["prompt_logprobs"])
    return RowAddress(**value["row"]), RowResult(**fields), value["params"]


def _sample(value: dict[str, Any]) -> SampleResult:
    fields = dict(value)
    fields["token_ids"] = tuple(value["token_ids"])
    fields["logprobs"] = _logprobs(value["logprobs"])
    for name in ("cumulative_logprob", "score"):
        fields[name] = _number(value[name])
    return SampleResult(**fields)


def _logprobs(value: object) -> TokenLogprobs | None:
    return None if value is None else token_logprobs.from_json(value)


def _number(value: Any) -> float | None:  # noqa: ANN401  (JSON)
    return None if value is None else float(value)


def _json_values(record: Any) -> dict[str, Any]:  # noqa: ANN401  (a dataclass)
    return {name: _to_json(value) for name, value in _values(record).items()}


def _to_json(value: object) -> object:
    if isinstance(value, TokenLogprobs):
        return value.to_json()
    # JSON has numbers only; a token that cannot be has a log-probability of minus infinity.
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def _values(record: Any) -> dict[str, Any]:  # noqa: ANN401  (a dataclass)
    return {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}


_Checks = dict[str, Callable[[Any], bool]]


def _fits(value: Any, checks: _Checks) -> bool:  # noqa: ANN401
    """Whether the value is an object with just these keys, each value as it must be."""
    return (
        type(value) is dict
        and value.keys() == checks.keys()
        and all(is_good(value[name]) for name, is_good in checks.items())
    )


def _is_result(value: Any) -> bool:  # noqa: ANN401
    # A row that was skipped has no prompt, and therefore no record.
    return _fits(value, _RESULT) and (value["error_code"] is None) == bool(value["samples"])


def _are_samples(value: object) -> bool:
    return type(value) is list and all(_fits(sample, _SAMPLE) for sample in value)


def _is_logprobs(value: object) -> bool:
    return token_logprobs.from_json(value) is not None


def _is_float(value: object) -> bool:
    return type(value) is float or value in ("inf", "-inf", "nan")


def _is_text(value: object) -> bool:
    return type(value) is str


def _is_flag(value: object) -> bool:
    return type(value) is bool


def _is_number(limit: int) -> Callable[[object], bool]:
    # True is an int to isinstance.
    return lambda value: type(value) is int and 0 <= value < limit


def _is_token_ids(value: object) -> bool:
    is_id = _is_number(_INT32)
    return type(value) is list and all(is_id(item) for item in value)


def _is_one_of(*choices: str) -> Callable[[object], bool]:
    return lambda value: type(value) is str and value in choices


def _or_none(is_good: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: value is None or is_good(value)


_ADDRESS: _Checks = {
    "file": _is_text,
    "row_group": _is_number(_INT32),
    "index": _is_number(_INT64),
}

_SAMPLE: _Checks = {
    "text": _is_text,
    "finish_reason": _is_one_of("stop", "length"),
    "stop_reason": _or_none(_is_text),
    "completion_tokens": _is_number(_INT32),
    "ends_in_partial_character": _is_flag,
    "token_ids": _is_token_ids,
    "cumulative_logprob": _or_none(_is_float),
    "score": _or_none(_is_float),
    "logprobs": _or_none(_is_logprobs),
}

_RESULT: _Checks = {
    "samples": _are_samples,
    "prompt_tokens": _or_none(_is_number(_INT32)),
    "cached_tokens": _is_number(_INT32),
    "error_code": _or_none(_is_one_of(*_VERDICTS)),
    "error_message": _or_none(_is_text),
    "skip_reason": lambda value: value is None,
    "seed": _or_none(_is_number(_INT64)),
    "prompt_sha256": _is_text,
    "prompt": _or_none(_is_text),
    "prompt_logprobs": _or_none(_is_logprobs),
    "truncated_tokens": _is_number(_INT32),
}

_RECORD: _Checks = {
    "row": lambda value: _fits(value, _ADDRESS),
    "params": _is_text,
    "result": _is_result,
}
