"""How long steps take, where the host works on one while the device works on the next."""

import time


class StepClock:
    """Splits the time while there is work into steps."""

    def __init__(self) -> None:
        self._ended: float | None = None
        self._dispatched = 0.0

    def dispatched(self) -> None:
        """A step was handed to the device."""
        self._dispatched = time.perf_counter()
        if self._ended is None:
            self._ended = self._dispatched

    def collected(self, compiled: float) -> tuple[float, float]:
        """A step's result is there.

        Args:
            compiled: Seconds of compilation since the last result.

        Returns:
            Seconds since the result before it, compilation left out, and how many of them the
            host only waited.
        """
        now = time.perf_counter()
        ended = now if self._ended is None else self._ended
        waited = max(0.0, now - max(self._dispatched, ended))
        self._ended = now
        return max(0.0, now - ended - compiled), waited

    def rest(self) -> None:
        """Nothing is left to do: the time until the next step is not the engine's."""
        self._ended = None
