"""Tokens per second as a plan is told them: a figure, a range, or the report of an earlier run."""

import math

from jaxpaged.errors import ConfigError
from jaxpaged.job import report
from jaxpaged.job.output import output_view
from jaxpaged.storage.store import Store

_MARGIN = 0.2
"""A single figure stands for a fifth less to a fifth more."""


def speed(text: str | None, measured: Store | None) -> tuple[float, float] | None:
    """The slowest and the fastest; None if nothing is said.

    Args:
        text: A number, or two with a hyphen between them.
        measured: The output of an earlier run.

    Raises:
        ConfigError: The text is not such numbers, or the folder has no report with a speed.
    """
    if measured is not None:
        if text is not None:
            raise ConfigError("--speed and --speed-of exclude each other; leave one of them out")
        return _around(_of_report(measured))
    if text is None:
        return None
    try:
        numbers = [float(part) for part in text.split("-")]
    except ValueError:
        numbers = []
    is_rising = numbers == sorted(numbers) and all(map(math.isfinite, numbers))
    if not 1 <= len(numbers) <= 2 or not is_rising or numbers[0] <= 0:
        raise ConfigError(
            f"--speed: expected tokens per second such as 750, or a range such as 600-800; found "
            f"{text!r}"
        )
    return _around(numbers[0]) if len(numbers) == 1 else (numbers[0], numbers[1])


def _around(figure: float) -> tuple[float, float]:
    return figure * (1 - _MARGIN), figure * (1 + _MARGIN)


def _of_report(store: Store) -> float:
    """Tokens in and out per second of the last run, without loading and compiling."""
    found = report.from_json(output_view.read_json(store, output_view.REPORT))
    engine = found.run.engine if found else {}
    tokens = engine.get("prompt_tokens", 0) + engine.get("sampled_tokens", 0)
    seconds = engine.get("prefill_seconds", 0.0) + engine.get("decode_seconds", 0.0)
    if not tokens or not seconds:
        raise ConfigError(
            f"--speed-of: {store.url} has no report of a run that completed rows; give the output "
            "of one, or --speed"
        )
    return tokens / seconds
