"""Whether completions of the paged engine are those of the decoder without a pool."""

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxpaged.config import KVDType
from jaxpaged.model import unpaged
from jaxpaged.model.llama import Llama
from jaxpaged.request import Completion, Request
from jaxpaged.shapes import AnyArray

_TOLERANCES: dict[str, float] = {"float32": 1e-3, "bfloat16": 0.5, "float16": 0.5}
"""How far the logit of a greedy token may be below the largest one, by the dtype of weights or of
keys and values: sums in another order, and the rounding of narrow formats. For narrower ones
nothing is promised."""

# Lengths are padded to multiples of it: few programs serve all.
_PADDING = 256
_ROWS = 64


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """What was compared.

    Attributes:
        requests: Requests whose completions were looked at.
        tokens: Their tokens.
        equal: Tokens that are the likeliest of the unpaged decoder, too.
        largest_gap: How far the logit of a token was below the likeliest one's, at most; infinite
            where logits are not finite.
        tolerance: What counts as equal up to rounding; None where nothing is promised.
    """

    requests: int
    tokens: int
    equal: int
    largest_gap: float
    tolerance: float | None

    @property
    def is_good(self) -> bool | None:
        """Whether all tokens are the unpaged decoder's, up to rounding; None without a promise."""
        return None if self.tolerance is None else self.largest_gap <= self.tolerance

    def to_json(self) -> dict[str, Any]:
        """The figures in JSON's types, without infinity."""
        gap = self.largest_gap if math.isfinite(self.largest_gap) else None
        return dataclasses.asdict(self) | {"largest_gap": gap, "is_good": self.is_good}


def check(model: Llama, kv_dtype: KVDType, pairs: Iterable[tuple[Request, Completion]]) -> Check:
    """Compares greedy completions with the likeliest tokens of the unpaged decoder.

    Each token is judged behind the completion's own beginning, so that one tie does not spoil what
    follows.
    """
    graph, weights = nnx.split(model)
    gaps_of = jax.jit(_gaps, static_argnums=0)
    requests = tokens = equal = 0
    largest = 0.0
    for request, completion in pairs:
        ids = (*request.prompt_ids, *completion.token_ids)
        padded = np.zeros(-(-len(ids) // _PADDING) * _PADDING, np.int32)
        padded[: len(ids)] = ids
        first, count = len(request.prompt_ids) - 1, len(completion.token_ids)
        rows = np.minimum(np.arange(first, first + padded.size), padded.size - 2)
        adapter = _number(model, request.adapter)
        gaps = gaps_of(graph, weights, padded, rows[: _most_rows(count)], adapter)
        gaps = np.asarray(gaps)[:count]
        gaps = np.where(np.isfinite(gaps), gaps, np.inf)
        requests += 1
        tokens += len(gaps)
        equal += int(np.sum(gaps == 0))
        largest = max(largest, float(gaps.max(initial=0.0)))
    return Check(
        requests=requests,
        tokens=tokens,
        equal=equal,
        largest_gap=largest,
        tolerance=_tolerance(str(model.dtype), kv_dtype),
    )


def _number(model: Llama, adapter: str | None) -> np.ndarray | None:
    """An adapter's number; None in a model without adapters."""
    if not model.adapter_names:
        return None
    names = (None, *model.adapter_names)
    return np.asarray(names.index(adapter), np.int32)


def _tolerance(dtype: str, kv_dtype: KVDType) -> float | None:
    """The wider one of both; None where nothing is promised."""
    if kv_dtype not in _TOLERANCES:
        return None
    return max(_TOLERANCES[dtype], _TOLERANCES[kv_dtype])


def _gaps(
    graph: nnx.GraphDef,
    weights: nnx.State,
    token_ids: Int[AnyArray, " T"],
    rows: Int[AnyArray, " R"],
    adapter: Int[AnyArray, ""] | None,
) -> Float[Array, " R"]:
    """How far the logit of the token behind each row is below the largest one."""
    behind = unpaged.logits(graph, weights, token_ids, rows, adapter)
    chosen = jnp.asarray(token_ids)[jnp.asarray(rows) + 1]
    own = jnp.take_along_axis(behind, chosen[:, None], axis=1)[:, 0]
    return jnp.max(behind, axis=1) - own


def _most_rows(count: int) -> int:
    return -(-count // _ROWS) * _ROWS


def sample(
    requests: Sequence[Request], completions: Sequence[Completion], count: int
) -> list[tuple[Request, Completion]]:
    """So many of the completed requests, evenly spread from the shortest to the longest."""
    done = [pair for pair in zip(requests, completions, strict=True) if pair[1].error_code is None]
    done.sort(key=lambda pair: len(pair[0].prompt_ids))
    if len(done) <= count:
        return done
    if count < 2:
        return done[:count]
    return [done[at * (len(done) - 1) // (count - 1)] for at in range(count)]
