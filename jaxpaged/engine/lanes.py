"""The lane state: what the device knows of each running sequence, so that steps need little.

A lane is a row of these arrays. It is set as a whole when a sequence is admitted, and changes with
each step by what the step samples and by single entries of its block table. So the host sends a
step only what is new, and tokens that were just sampled need not come back before the next step.
"""

import collections.abc
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jaxpaged.engine import lane_params
from jaxpaged.engine.sampling import LaneParams
from jaxpaged.scheduler.plan import TableUpdate
from jaxpaged.sequence import Sequence
from jaxpaged.shapes import AnyArray

SET_ROWS = 8
"""Lanes that one call sets."""

UPDATE_ROWS = 64
"""Table entries that one call changes."""


class LaneState(NamedTuple):
    """Donated to what changes it, and handed back."""

    tokens: Int[AnyArray, "B C"]
    """Token ids of each lane's sequence, prompt and sampled ones."""
    tables: Int[AnyArray, "B W"]
    """Pool block of each logical block."""
    params: LaneParams
    """How each lane samples."""
    adapters: Int[AnyArray, " B"] | None = None
    """The number of each lane's adapter, 0 for none; None where the model has no adapters."""


def allocate(
    num_lanes: int,
    *,
    max_model_len: int,
    table_width: int,
    vocab_size: int,
    has_adapters: bool = False,
) -> LaneState:
    """The state of lanes that were not set yet."""
    # One place more than a sequence has: the token behind the last one has nowhere else to go.
    return LaneState(
        tokens=jnp.zeros((num_lanes, max_model_len + 1), jnp.int32),
        tables=jnp.zeros((num_lanes, table_width), jnp.int32),
        params=jax.tree.map(jnp.asarray, lane_params.empty(num_lanes, vocab_size)),
        adapters=jnp.zeros(num_lanes, jnp.int32) if has_adapters else None,
    )


def set_lanes(state: LaneState, lanes: Int[AnyArray, " R"], rows: LaneState) -> LaneState:
    """The state with whole lanes replaced; lanes out of range are padding."""
    return jax.tree.map(
        lambda old, new: jnp.asarray(old).at[lanes].set(new, mode="drop"), state, rows
    )


def update_tables(
    state: LaneState,
    lanes: Int[AnyArray, " R"],
    indexes: Int[AnyArray, " R"],
    block_ids: Int[AnyArray, " R"],
) -> LaneState:
    """The state with single table entries replaced; lanes out of range are padding."""
    return state._replace(
        tables=jnp.asarray(state.tables).at[lanes, indexes].set(block_ids, mode="drop")
    )


def rows(
    sequences: collections.abc.Sequence[Sequence], state: LaneState, *, vocab_size: int
) -> tuple[np.ndarray, LaneState]:
    """Lanes and their whole rows for up to `SET_ROWS` sequences, padded, as NumPy arrays."""
    num_lanes, width = state.tokens.shape
    lanes = np.full(SET_ROWS, num_lanes, np.int32)
    tokens = np.zeros((SET_ROWS, width), np.int32)
    tables = np.zeros((SET_ROWS, state.tables.shape[1]), np.int32)
    params = lane_params.empty(SET_ROWS, vocab_size)
    adapters = np.zeros(SET_ROWS, np.int32)
    for row, sequence in enumerate(sequences):
        assert sequence.lane is not None, "an admitted sequence has a lane"
        lanes[row] = sequence.lane
        adapters[row] = sequence.adapter
        tokens[row, : len(sequence.token_ids)] = sequence.token_ids
        table = [block or 0 for block in sequence.block_table]
        tables[row, : len(table)] = table
        one = lane_params.lane_params(
            sequence.request.params,
            key=sequence.key,
            num_prompt=sequence.num_prompt,
            stop_ids=sequence.stop_ids,
            bad_word_ids=sequence.bad_word_ids,
            vocab_size=vocab_size,
        )
        for target, value in zip(params, one, strict=True):
            target[row] = value
    return lanes, LaneState(tokens, tables, params, None if state.adapters is None else adapters)


def table_updates(
    updates: collections.abc.Sequence[TableUpdate], num_lanes: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The arguments of `update_tables` for up to `UPDATE_ROWS` updates, padded."""
    lanes = np.full(UPDATE_ROWS, num_lanes, np.int32)
    indexes = np.zeros(UPDATE_ROWS, np.int32)
    blocks = np.zeros(UPDATE_ROWS, np.int32)
    if updates:
        lanes[: len(updates)], indexes[: len(updates)], blocks[: len(updates)] = zip(
            *updates, strict=True
        )
    return lanes, indexes, blocks


def slots(
    tables: Int[Array, "B W"],
    token_lanes: Int[AnyArray, " T"],
    positions: Int[AnyArray, " T"],
    *,
    block_size: int,
    num_slots: int,
) -> Int[Array, " T"]:
    """The pool slot of each token; lanes out of range are padding and get `num_slots`."""
    lanes = jnp.minimum(jnp.asarray(token_lanes), tables.shape[0] - 1)
    blocks = tables[lanes, positions // block_size]
    found = blocks * block_size + positions % block_size
    return jnp.where(token_lanes < tables.shape[0], found, num_slots)
