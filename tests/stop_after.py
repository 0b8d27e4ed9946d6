"""Who is asked before every step of a job: looks around, and ends the job after some steps."""

from collections.abc import Callable


class StopAfter:
    """Says stop once it was asked so often.

    Args:
        num_steps: How many steps the job may take.
        look: Called each time before it answers.
    """

    def __init__(self, num_steps: float, look: Callable[[], object] = lambda: None) -> None:
        self._left = num_steps
        self._look = look

    def __call__(self) -> bool:
        self._look()
        self._left -= 1
        return self._left < 0


NEVER = float("inf")
