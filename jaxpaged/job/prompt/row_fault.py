"""The signal that a row cannot be completed; it ends as an output row, never as a failed job."""

from jaxpaged.request import ErrorCode

_MAX_CHARS = 300


class RowFault(Exception):
    """A row is at fault: which code of the closed list, and the reason in words.

    The reason is bounded and made printable; whoever raises it leaves the prompt's text out.
    """

    def __init__(self, code: ErrorCode, reason: str) -> None:
        printable = "".join(char if char.isprintable() else " " for char in reason)
        self.code: ErrorCode = code
        self.reason = printable if len(printable) <= _MAX_CHARS else f"{printable[:_MAX_CHARS]}..."
        super().__init__(f"{code}: {self.reason}")
