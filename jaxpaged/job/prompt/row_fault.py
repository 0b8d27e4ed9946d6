"""The signals that a row is not completed; it ends as an output row, never as a failed job."""

from typing import Literal

from jaxpaged.request import ErrorCode

_MAX_CHARS = 300

SkipCode = Literal["null_prompt", "prompt_too_long"]
"""Why a job may be told to pass over a row; each is the error code it would be otherwise."""


class RowFault(Exception):
    """A row is at fault: which code of the closed list, and the reason in words.

    The reason is bounded and made printable; whoever raises it leaves the prompt's text out.
    """

    def __init__(self, code: ErrorCode, reason: str) -> None:
        self.code: ErrorCode = code
        self.reason = _bounded(reason)
        super().__init__(f"{code}: {self.reason}")


class RowSkipped(Exception):
    """A row is passed over, as its job wants it: the code, and the reason as that of a fault.

    Neither an error nor a completion: its output row has `finish_reason` "skipped" and the code
    as `stop_reason`, and `max_errors` does not count it.
    """

    def __init__(self, code: SkipCode, reason: str) -> None:
        self.code: SkipCode = code
        self.reason = _bounded(reason)
        super().__init__(f"skipped, {code}: {self.reason}")


def _bounded(reason: str) -> str:
    printable = "".join(char if char.isprintable() else " " for char in reason)
    return printable if len(printable) <= _MAX_CHARS else f"{printable[:_MAX_CHARS]}..."
