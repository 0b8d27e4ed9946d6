"""How rows can end: a closed list, so that what counts by it never grows."""

from typing import get_args

from jaxpaged.request import ErrorCode, FinishReason

Outcome = tuple[FinishReason, ErrorCode | None]
"""A row's finish reason and, if that is "error", its error code."""


def zeros() -> dict[Outcome, int]:
    """No row yet, for each way to end."""
    counts: dict[Outcome, int] = {
        (end, None): 0 for end in get_args(FinishReason) if end != "error"
    }
    counts |= {("error", code): 0 for code in get_args(ErrorCode)}
    return counts
