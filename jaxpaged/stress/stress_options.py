"""Options of a load test as texts, made into values."""

import pathlib
from collections.abc import Sequence

from jaxpaged.errors import ConfigError
from jaxpaged.plan import cards
from jaxpaged.stress import workload
from jaxpaged.stress.sweep import StressOptions


def options(
    *,
    requests: int,
    concurrency: str,
    prompts: Sequence[str],
    new_tokens: str | None,
    lengths: str | None,
    prefix: tuple[int, float],
    memory: str | None,
    is_compared: bool,
    checked: int,
) -> StressOptions:
    """The options.

    Raises:
        ConfigError: One of them is not what it should be, or two exclude each other.
    """
    if lengths is not None and (prompts or new_tokens):
        raise ConfigError("--lengths says how long prompts and completions are; leave out --prompt")
    in_flight = _concurrency(concurrency)
    if lengths is None and requests < in_flight[-1]:
        raise ConfigError(
            f"--requests {requests:,} are fewer than --concurrency {in_flight[-1]:,}: they could "
            "never be in flight at once; ask for more requests"
        )
    return StressOptions(
        shape=_shape(prompts, new_tokens, prefix),
        lengths=None if lengths is None else pathlib.Path(lengths),
        requests=requests,
        concurrency=in_flight,
        pool_bytes=None if memory is None else cards.parse_size(memory, "--memory"),
        is_compared=is_compared,
        checked=checked,
    )


def _shape(
    prompts: Sequence[str], new_tokens: str | None, prefix: tuple[int, float]
) -> workload.Shape:
    """What is said of the requests; what is not is the usual, which needs the model's length."""
    ranges = tuple(workload.parse_range(text, "--prompt") for text in prompts)
    new = None if new_tokens is None else workload.parse_range(new_tokens, "--new-tokens")
    return workload.Shape(
        prompts=ranges, new_tokens=new, prefix_tokens=prefix[0], prefix_share=prefix[1]
    )


def _concurrency(text: str) -> tuple[int, ...]:
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError:
        numbers = ()
    if not numbers or min(numbers) < 1:
        raise ConfigError(f"--concurrency: expected numbers such as 16,32,64; found {text!r}")
    return tuple(sorted(set(numbers)))
