"""What is added to logits, as job files and rows write it: from token ids to numbers.

`-inf` bans a token. Job files have it as text, since their values are kept as JSON, which has no
such number.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

BAN = "-inf"
MAX_BIAS = 10_000
"""Largest bias, in either direction."""

_MINUS_INFINITY = -float("inf")

# One spelling for each id, so that none is there twice unseen.
_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,9}")


def from_mapping(value: object) -> tuple[tuple[int, float], ...]:
    """Pairs of token id and bias, by rising id.

    Raises:
        ValueError: It is no mapping of token ids to numbers.
    """
    if not isinstance(value, Mapping):
        raise ValueError(f"expected token ids with numbers, as in {{50: -5}}, found {_kind(value)}")
    for key, bias in value.items():
        if bias == _MINUS_INFINITY:
            raise ValueError(f"token id {_shown(key)}: write {BAN}, without a dot, to ban it")
    return from_pairs(value.items())


def from_pairs(pairs: Iterable[tuple[object, object]]) -> tuple[tuple[int, float], ...]:
    """The same pairs, checked, by rising id.

    Raises:
        ValueError: A token id is none, or there twice; a bias is no number.
    """
    found: dict[int, float] = {}
    for key, bias in pairs:
        token_id = _token_id(key)
        if token_id in found:
            raise ValueError(f"token id {token_id} is there twice")
        found[token_id] = _bias(token_id, bias)
    return tuple(sorted(found.items()))


def to_mapping(pairs: Iterable[tuple[int, float]]) -> dict[str, float | str]:
    """The pairs as a job file has them; JSON can hold them."""
    return {str(token_id): BAN if bias == _MINUS_INFINITY else bias for token_id, bias in pairs}


def json_schema(max_tokens: int) -> dict[str, Any]:
    """What a job file may have, for so many tokens at most, in the words of JSON Schema."""
    number = {"type": "number", "minimum": -MAX_BIAS, "maximum": MAX_BIAS}
    return {
        "type": ["object", "null"],
        "patternProperties": {f"^({_TOKEN_ID.pattern})$": {"anyOf": [number, {"const": BAN}]}},
        "additionalProperties": False,
        "maxProperties": max_tokens,
    }


def _token_id(key: object) -> int:
    # The keys of YAML and JSON arrive as text.
    if isinstance(key, str) and _TOKEN_ID.fullmatch(key):
        return int(key)
    if isinstance(key, int) and not isinstance(key, bool) and key >= 0:
        return key
    raise ValueError(f"expected a token id, found {_shown(key)}")


def _bias(token_id: int, bias: object) -> float:
    if bias in (BAN, _MINUS_INFINITY):
        return _MINUS_INFINITY
    if isinstance(bias, int | float) and not isinstance(bias, bool) and abs(bias) <= MAX_BIAS:
        return float(bias)
    raise ValueError(
        f"token id {token_id}: expected a number from {-MAX_BIAS:,} to {MAX_BIAS:,}, or {BAN} to "
        f"ban the token, found {_shown(bias)}"
    )


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _kind(value: object) -> str:
    return "a list" if isinstance(value, list | tuple) else _shown(value)
