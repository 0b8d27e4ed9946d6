"""The requests of a load test: how long prompts and completions are, and what prompts share.

Prompts are random tokens: only their lengths matter. The same seed gives the same requests.
"""

import dataclasses
import itertools
import pathlib
import random
import re
from collections.abc import Sequence

import pyarrow as pa
import pyarrow.dataset as ds

from jaxpaged.errors import ConfigError, InputSchemaError
from jaxpaged.request import Request, SamplingParams

_RANGE = re.compile(r"(\d+)(?:-(\d+))?(?::(\d+(?:\.\d+)?))?")
_COLUMNS = ("prompt_tokens", "completion_tokens")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LenRange:
    """Lengths from `least` to `most` tokens, all equally likely.

    Attributes:
        least: The shortest.
        most: The longest.
        weight: How many requests are of this range, beside the weights of others.
    """

    least: int
    most: int
    weight: float = 1.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What requests look like.

    Attributes:
        prompts: Ranges of prompt lengths, mixed by their weights; none takes the usual mix.
        new_tokens: Completions' lengths; None takes the usual ones.
        prefix_tokens: Tokens that prompts begin with alike.
        prefix_share: The share of the requests whose prompts do.
    """

    prompts: tuple[LenRange, ...] = ()
    new_tokens: LenRange | None = None
    prefix_tokens: int = 0
    prefix_share: float = 1.0


def parse_range(text: str, option: str) -> LenRange:
    """A range such as 16-64, or 16-64:5 with a weight.

    Raises:
        ConfigError: It is none.
    """
    found = _RANGE.fullmatch(text.strip())
    least, most = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    weight = float(found[3] or 1) if found else 0.0
    if not 1 <= least <= most or weight <= 0:
        raise ConfigError(
            f"{option}: expected tokens such as 128 or 16-64, or with a weight 16-64:5; found "
            f"{text!r}"
        )
    return LenRange(least=least, most=most, weight=weight)


def usual_prompts(max_model_len: int) -> tuple[LenRange, ...]:
    """Many short prompts, some of middle length, a few long ones; all fit the model's length."""
    ends = [max(1, max_model_len * part // 32) for part in (1, 4, 10, 22)]
    weights = (5.0, 3.0, 2.0)
    return tuple(
        LenRange(least=least, most=most, weight=weight)
        for (least, most), weight in zip(itertools.pairwise(ends), weights, strict=True)
    )


def usual_new_tokens(max_model_len: int) -> LenRange:
    """From a 32nd to a quarter of the model's length."""
    return LenRange(least=max(1, max_model_len // 32), most=max(1, max_model_len // 4))


def from_shape(
    shape: Shape, count: int, *, token_ids: Sequence[int], max_model_len: int, seed: int
) -> list[Request]:
    """Requests of such lengths; a completion that would not fit is shorter.

    Args:
        shape: The lengths.
        count: How many.
        token_ids: Prompts are drawn from them.
        max_model_len: Most tokens of prompt and completion.
        seed: Of all that is random.

    Raises:
        ConfigError: A prompt leaves no room for a token.
    """
    draw = random.Random(seed)
    prompts = shape.prompts or usual_prompts(max_model_len)
    new_tokens = shape.new_tokens or usual_new_tokens(max_model_len)
    lens = []
    for part in draw.choices(prompts, [part.weight for part in prompts], k=count):
        prompt = draw.randint(part.least, part.most)
        lens.append((prompt, draw.randint(new_tokens.least, new_tokens.most)))
    return _requests(lens, shape, draw, token_ids=token_ids, max_model_len=max_model_len)


def read(path: pathlib.Path, count: int) -> list[tuple[int, int]]:
    """Prompts' and completions' lengths of the first rows of Parquet, such as a job's output.

    Args:
        path: A file or a folder with columns `prompt_tokens` and `completion_tokens`.
        count: How many; rows without a completion are passed over.

    Raises:
        InputSchemaError: There is no such table, or no usable row in it.
    """
    try:
        dataset = ds.dataset(path, format="parquet")
        for name in _COLUMNS:
            kind = dataset.schema.field(name).type
            if not pa.types.is_integer(kind):
                raise InputSchemaError(
                    f"--lengths: column {name} of {path} is {kind}, not integers"
                )
        has_tokens = (ds.field(_COLUMNS[0]) > 0) & (ds.field(_COLUMNS[1]) > 0)
        table = dataset.scanner(columns=list(_COLUMNS), filter=has_tokens).head(count)
    except (OSError, pa.ArrowInvalid, KeyError) as error:
        reason = str(error).splitlines()[0]
        raise InputSchemaError(
            f"--lengths: {path} is no Parquet with columns prompt_tokens and completion_tokens "
            f"({reason}); give such a file, or the output folder of a job"
        ) from None
    if not table.num_rows:
        raise InputSchemaError(f"--lengths: {path} has no row with tokens in both columns")
    prompts, completions = (table.column(name).to_pylist() for name in _COLUMNS)
    return list(zip(prompts, completions, strict=True))


def from_lens(
    lens: Sequence[tuple[int, int]],
    *,
    shape: Shape,
    token_ids: Sequence[int],
    max_model_len: int,
    seed: int,
) -> list[Request]:
    """Requests with the lengths of prompts and completions.

    Args:
        lens: The lengths.
        shape: What prompts share.
        token_ids: Prompts are drawn from them.
        max_model_len: Most tokens of prompt and completion.
        seed: Of all that is random.

    Raises:
        ConfigError: A prompt leaves no room for a token.
    """
    draw = random.Random(seed)
    return _requests(lens, shape, draw, token_ids=token_ids, max_model_len=max_model_len)


def _requests(
    lens: Sequence[tuple[int, int]],
    shape: Shape,
    draw: random.Random,
    *,
    token_ids: Sequence[int],
    max_model_len: int,
) -> list[Request]:
    prefix = tuple(draw.choices(token_ids, k=shape.prefix_tokens))
    requests = []
    for index, (num_prompt, num_new) in enumerate(lens):
        if num_prompt >= max_model_len:
            raise ConfigError(
                f"a prompt of {num_prompt:,} tokens leaves no room for a new one: "
                f"engine.max_model_len is {max_model_len:,}; ask for shorter prompts"
            )
        is_shared = draw.random() < shape.prefix_share
        beginning = prefix[: num_prompt - 1] if is_shared else ()
        rest = draw.choices(token_ids, k=num_prompt - len(beginning))
        params = SamplingParams(
            max_tokens=min(num_new, max_model_len - num_prompt), ignore_eos=True
        )
        requests.append(
            Request(request_id=index, prompt_ids=(*beginning, *rest), params=params, address=index)
        )
    return requests
