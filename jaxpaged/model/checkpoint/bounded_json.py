"""JSON of untrusted files, parsed in time and memory that are known before.

Knows nothing of what it means, nor of files.
"""

import json
from typing import Any

# Every value but the first stands behind one of these. They are counted in texts too, where they
# mean nothing: the bound has room for that.
_SIGNS = (b"{", b"[", b",")


def parse(content: bytes, *, max_values: int, unique: bool = False) -> Any:  # noqa: ANN401
    """The value that `content` spells.

    Args:
        content: UTF-8.
        max_values: Most values, those inside others counted too.
        unique: A name that occurs twice in an object is an error.

    Raises:
        ValueError: Not JSON, nested too deeply, or with too many values.
    """
    if sum(content.count(sign) for sign in _SIGNS) > max_values:
        raise ValueError(f"it has more than {max_values} values")
    try:
        return json.loads(
            content.decode("utf-8-sig"), object_pairs_hook=_unique if unique else None
        )
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        raise ValueError("a name occurs twice")
    return values
