"""What a column must be to set a parameter row by row, and what one of its cells says.

Knows types and cells one by one, neither rows nor how parameters go together.
"""

import dataclasses
import json
from collections.abc import Callable

import pyarrow as pa
import pyarrow.types as pt

from jaxpaged.job import column_types, logit_bias


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ParamType:
    """A kind of parameter.

    Attributes:
        fits: Whether a column of a type can set it.
        expected: What such a column is, in words.
        read: The parameter's value in a cell that is not null; raises ValueError if there is none,
            with what was expected.
    """

    fits: Callable[[pa.DataType], bool]
    expected: str
    read: Callable[[object], object]


def param_type(name: str) -> ParamType:
    """The kind of the parameter that a key of `sampling.columns` names."""
    return _TYPES[name]


def _is_texts(kind: pa.DataType) -> bool:
    return column_types.is_text(kind) or (
        column_types.is_list(kind) and column_types.is_text(kind.value_type)
    )


def _is_bias(kind: pa.DataType) -> bool:
    if pt.is_map(kind):
        return pt.is_integer(kind.key_type) and column_types.is_number(kind.item_type)
    return column_types.is_text(kind)


def _integer(cell: object) -> int:
    if isinstance(cell, int) and not isinstance(cell, bool):
        return cell
    raise ValueError(f"expected an integer, found {_kind(cell)}")


def _number(cell: object) -> float:
    if isinstance(cell, int | float) and not isinstance(cell, bool):
        return float(cell)
    raise ValueError(f"expected a number, found {_kind(cell)}")


def _truth(cell: object) -> bool:
    if isinstance(cell, bool):
        return cell
    raise ValueError(f"expected a truth value, found {_kind(cell)}")


def _texts(cell: object) -> tuple[str, ...]:
    texts = cell if isinstance(cell, list | tuple) else [cell]
    return tuple(map(_text, texts))


def _text(cell: object) -> str:
    if isinstance(cell, str):
        return cell
    raise ValueError(f"expected text or a list of texts, found {_kind(cell)} in it")


def _token_ids(cell: object) -> tuple[int, ...]:
    if not isinstance(cell, list | tuple):
        raise ValueError(f"expected a list of integers, found {_kind(cell)}")
    return tuple(map(_integer, cell))


def _bias(cell: object) -> tuple[tuple[int, float], ...]:
    if not isinstance(cell, str):
        # Arrow gives a map as pairs.
        if isinstance(cell, list) and all(isinstance(pair, tuple) for pair in cell):
            return logit_bias.from_pairs(cell)
        raise ValueError(f"expected a map from token ids to numbers, found {_kind(cell)}")
    try:
        pairs = json.loads(cell, object_pairs_hook=_Pairs)
    except (ValueError, RecursionError):
        raise ValueError('expected JSON text such as {"50": -5}, found other text') from None
    if not isinstance(pairs, _Pairs):
        raise ValueError(f'expected JSON text such as {{"50": -5}}, found {_kind(pairs)} in it')
    return logit_bias.from_pairs(pairs)


class _Pairs(list[tuple[str, object]]):
    """A JSON object, keys that are there twice included."""


def _kind(value: object) -> str:
    names = {
        type(None): "a null",
        bool: "a truth value",
        int: "a number",
        float: "a number",
        str: "text",
        list: "a list",
    }
    return names.get(type(value), "another type")


_INTEGER = ParamType(fits=pt.is_integer, expected="an integer", read=_integer)
_NUMBER = ParamType(fits=column_types.is_number, expected="a number", read=_number)
_TEXTS = ParamType(fits=_is_texts, expected="text or a list of texts", read=_texts)

_TYPES = {
    "max_tokens": _INTEGER,
    "min_tokens": _INTEGER,
    "temperature": _NUMBER,
    "top_k": _INTEGER,
    "top_p": _NUMBER,
    "min_p": _NUMBER,
    "typical_p": _NUMBER,
    "repetition_penalty": _NUMBER,
    "presence_penalty": _NUMBER,
    "frequency_penalty": _NUMBER,
    "seed": _INTEGER,
    "ignore_eos": ParamType(fits=pt.is_boolean, expected="a truth value", read=_truth),
    "stop": _TEXTS,
    "stop_token_ids": ParamType(
        fits=column_types.is_token_ids, expected="a list of integers", read=_token_ids
    ),
    "bad_words": _TEXTS,
    "logit_bias": ParamType(
        fits=_is_bias, expected="a map from token ids to numbers, or JSON text of one", read=_bias
    ),
}
