"""A step plan as padded arrays: which tokens of which lanes are computed and sampled behind.

token axis T   | decode queries | prefill segments, one after the other | padding |
samplers   B   | in the order of the plan | padding |

A prompt's token is computed by the prefill path and a sampled one by the decode path, whether for
the first time or again: the two round differently, and a token's keys and values must not depend
on when they were computed.
"""

import dataclasses
import itertools
import operator
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from jaxpaged.cache.capacity import PoolCapacity, blocks_for
from jaxpaged.scheduler.plan import Chunk, Sampler, StepPlan
from jaxpaged.shapes import AnyArray
from pallas_kernels import PrefillTiles
from pallas_kernels.xla import DECODE_QUERIES, TILE_QUERIES

ROW_TILE = 64
"""Rows of the smallest matrix product of a deterministic engine: XLA's products on CPU were
measured to give a row the same bits in every product of so many rows or more."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """The padded shape of a step: one executable each.

    Attributes:
        num_tokens: Length of the token axis.
        num_tiles: Prefill tiles; 0 in a step that only decodes.
    """

    num_tokens: int
    num_tiles: int


class StepBatch(NamedTuple):
    """What the forward pass of one step is told."""

    token_lanes: Int[AnyArray, " T"]
    """Lane of each token; out of range for padding."""
    positions: Int[AnyArray, " T"]
    """Position of each token in its sequence."""
    num_decodes: Int[AnyArray, ""]
    """Decode queries; they are the first tokens."""
    num_tokens: Int[AnyArray, ""]
    """Tokens of the step; those behind them are padding."""
    tiles: PrefillTiles | None
    """The prefill segments; None in a step without any."""
    sampled_tokens: Int[AnyArray, " B"]
    """Index on the token axis of each sampler's token; 0 for padding."""


class SampleBatch(NamedTuple):
    """Who samples behind the first of the step's sampled tokens."""

    lanes: Int[AnyArray, " B"]
    """Lane that samples; out of range for padding."""
    num_tokens: Int[AnyArray, " B"]
    """Tokens of the lane's sequence so far: the place of the new one."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BatchShapes:
    """The sizes all batches of one engine share.

    Attributes:
        num_lanes: Lanes of the lane state, as many as the largest decode bucket has.
        max_decodes: Decode queries of a step, at most.
        decode_buckets: Token counts of steps that only decode, rising.
        token_buckets: Token counts of steps that prefill, rising.
        sample_buckets: Sampler counts, rising.
        table_width: Blocks of a padded block table.
        block_size: Tokens per block.
        num_slots: Slots of the pool; also the slot that padding is "written" to.
        growth: Fitted token buckets are at most this factor apart, or one tile.
    """

    num_lanes: int
    max_decodes: int
    decode_buckets: tuple[int, ...]
    token_buckets: tuple[int, ...]
    sample_buckets: tuple[int, ...]
    table_width: int
    block_size: int
    num_slots: int
    growth: float

    @property
    def most_tokens(self) -> int:
        """Tokens of the largest bucket."""
        return max(self.decode_buckets[-1], self.token_buckets[-1])

    def buckets(self) -> list[Bucket]:
        """Every bucket a step can take."""
        decode = [Bucket(num_tokens=n, num_tiles=0) for n in self.decode_buckets]
        return decode + [self._mixed(n) for n in self.token_buckets]

    def bucket(self, layout: "Layout") -> Bucket:
        """The smallest bucket that holds the step."""
        if not layout.segments and layout.num_tokens <= self.decode_buckets[-1]:
            size = next(n for n in self.decode_buckets if n >= layout.num_tokens)
            return Bucket(num_tokens=size, num_tiles=0)
        return self._mixed(next(n for n in self.token_buckets if n >= layout.num_tokens))

    def sample_bucket(self, num_samplers: int) -> int:
        """The smallest bucket that holds so many samplers."""
        return next(n for n in self.sample_buckets if n >= num_samplers)

    def _mixed(self, num_tokens: int) -> Bucket:
        # Each segment may leave one tile partly filled; there is at most one per lane.
        tiles = num_tokens // TILE_QUERIES + min(self.num_lanes, num_tokens)
        return Bucket(num_tokens=num_tokens, num_tiles=tiles)


def batch_shapes(
    *,
    max_num_seqs: int,
    token_budget: int,
    max_model_len: int,
    capacity: PoolCapacity,
    is_deterministic: bool,
    growth: float = 4.0,
) -> BatchShapes:
    """Few buckets, a factor of two to four apart, the largest ones the limits themselves.

    A deterministic engine has none below `ROW_TILE` rows. `growth` is for `fit`.
    """
    least = ROW_TILE if is_deterministic else DECODE_QUERIES
    most_lanes = _round_up(max_num_seqs, least)
    most_tokens = max(_round_up(token_budget, TILE_QUERIES), most_lanes)
    lanes = _ladder(least, most_lanes, factor=4)
    return BatchShapes(
        num_lanes=most_lanes,
        max_decodes=max_decodes(max_num_seqs),
        decode_buckets=lanes,
        token_buckets=_ladder(max(most_lanes, 2 * TILE_QUERIES), most_tokens, factor=2),
        sample_buckets=lanes,
        table_width=blocks_for(max_model_len, capacity.block_size),
        block_size=capacity.block_size,
        num_slots=capacity.num_tokens,
        growth=growth,
    )


def fit(shapes: BatchShapes, prompts: Sequence[tuple[int, ...]], *, is_shared: bool) -> BatchShapes:
    """The shapes with token buckets for steps that take in such prompts.

    A usual step of a busy engine takes in one prompt beside the lanes that decode: there is a
    bucket for a prompt of the middle length and one for a long one (the 9th decile), and between
    them and the largest step others, so that neighbours are not too far apart (`shapes.growth`).

    Args:
        shapes: Of the engine; the largest bucket stays.
        prompts: Token ids of prompts as they come; without any, nothing changes.
        is_shared: Whether a beginning that another prompt has too is computed only once.
    """
    if not prompts:
        return shapes
    lens = sorted(_fresh_lens(prompts, shapes.block_size) if is_shared else map(len, prompts))
    most, lanes = shapes.token_buckets[-1], shapes.decode_buckets[-1]
    typical = {lens[len(lens) // 2], lens[len(lens) * 9 // 10]}
    fitted = {min(most, _round_up(lanes + length, TILE_QUERIES)) for length in typical}
    buckets = set(fitted)
    for size, larger in itertools.pairwise(sorted({*fitted, most})):
        while size < larger:
            buckets.add(size)
            size = max(
                size + TILE_QUERIES, int(size * shapes.growth) // TILE_QUERIES * TILE_QUERIES
            )
    return dataclasses.replace(shapes, token_buckets=tuple(sorted({*buckets, most})))


def _fresh_lens(prompts: Sequence[tuple[int, ...]], block_size: int) -> list[int]:
    """Tokens of each prompt behind the whole blocks it has in common with another one."""
    lens: list[int] = []
    before: tuple[int, ...] = ()
    for prompt in sorted(prompts):
        equal = itertools.starmap(operator.eq, zip(before, prompt, strict=False))
        common = sum(itertools.takewhile(bool, equal))
        # At least the last token is computed.
        lens.append(len(prompt) - min(common, len(prompt) - 1) // block_size * block_size)
        before = prompt
    return lens


def max_decodes(max_num_seqs: int) -> int:
    """Decode queries of a step: one for each sequence, and some of those computed again."""
    return max(2 * max_num_seqs, ROW_TILE)


class Segment(NamedTuple):
    """Consecutive tokens of one chunk on the token axis that go the prefill path."""

    chunk: Chunk
    length: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Where a plan's tokens lie on the token axis.

    Attributes:
        decode_lanes: Lane of each decode query, by falling context.
        decode_positions: Position of each decode query.
        segments: The prefill segments, in order, behind the decode queries.
        samplers: Each sampler with the index of its token on the axis and its token count.
    """

    decode_lanes: np.ndarray
    decode_positions: np.ndarray
    segments: tuple[Segment, ...]
    samplers: tuple[tuple[Sampler, int, int], ...]

    @property
    def num_tokens(self) -> int:
        """Tokens of the step."""
        return len(self.decode_lanes) + sum(segment.length for segment in self.segments)


def lay_out(plan: StepPlan) -> Layout:
    """The plan's tokens in order: decode queries by falling context, then prefill segments."""
    lanes: list[int] = []
    positions: list[int] = []
    owners: list[Chunk] = []
    segments: list[Segment] = []
    for chunk in plan.chunks:
        num_prefill = min(chunk.length, max(0, chunk.sequence.num_prompt - chunk.start))
        if num_prefill:
            segments.append(Segment(chunk, num_prefill))
        for position in range(chunk.start + num_prefill, chunk.start + chunk.length):
            lanes.append(chunk.lane)
            positions.append(position)
            owners.append(chunk)
    where = np.asarray(positions, np.int32)
    # Queries of one attention tile then need about the same work.
    order = np.argsort(-where, kind="stable")
    samplers: list[tuple[Sampler, int, int]] = []
    for index, place in enumerate(order):
        chunk = owners[place]
        if chunk.samplers and where[place] == chunk.start + chunk.length - 1:
            samplers += [(s, index, chunk.start + chunk.length) for s in chunk.samplers]
    at = len(order)
    for chunk, length in segments:
        at += length
        if chunk.samplers and length == chunk.length:
            samplers += [(s, at - 1, chunk.start + length) for s in chunk.samplers]
    return Layout(
        decode_lanes=np.asarray(lanes, np.int32)[order],
        decode_positions=where[order],
        segments=tuple(segments),
        samplers=tuple(samplers),
    )


def build(layout: Layout, bucket: Bucket, shapes: BatchShapes) -> StepBatch:
    """The arrays of the forward pass, padded to the bucket."""
    token_lanes = np.full(bucket.num_tokens, shapes.num_lanes, np.int32)
    positions = np.zeros(bucket.num_tokens, np.int32)
    at = len(layout.decode_lanes)
    token_lanes[:at] = layout.decode_lanes
    positions[:at] = layout.decode_positions
    for chunk, length in layout.segments:
        token_lanes[at : at + length] = chunk.lane
        positions[at : at + length] = np.arange(chunk.start, chunk.start + length)
        at += length
    sampled = np.zeros(shapes.sample_buckets[-1], np.int32)
    sampled[: len(layout.samplers)] = [token for _, token, _ in layout.samplers]
    num_decodes = np.asarray(len(layout.decode_lanes), np.int32)
    num_tokens = np.asarray(layout.num_tokens, np.int32)
    tiles = _prefill_tiles(layout, bucket)
    return StepBatch(token_lanes, positions, num_decodes, num_tokens, tiles, sampled)


def build_samples(layout: Layout, shapes: BatchShapes) -> SampleBatch:
    """The arrays of the sampler, padded to its bucket."""
    size = shapes.sample_bucket(len(layout.samplers))
    lanes = np.full(size, shapes.num_lanes, np.int32)
    counts = np.zeros(size, np.int32)
    lanes[: len(layout.samplers)] = [sampler.lane for sampler, _, _ in layout.samplers]
    counts[: len(layout.samplers)] = [count for _, _, count in layout.samplers]
    return SampleBatch(lanes, counts)


def _prefill_tiles(layout: Layout, bucket: Bucket) -> PrefillTiles | None:
    if not bucket.num_tiles:
        return None
    lanes, starts, lens, positions = (np.zeros(bucket.num_tiles, np.int32) for _ in range(4))
    at, tile = len(layout.decode_lanes), 0
    for chunk, length in layout.segments:
        for offset in range(0, length, TILE_QUERIES):
            lanes[tile] = chunk.lane
            starts[tile] = at + offset
            lens[tile] = min(TILE_QUERIES, length - offset)
            positions[tile] = chunk.start + offset
            tile += 1
        at += length
    return PrefillTiles(lanes, starts, lens, positions, np.asarray(tile, np.int32))


def _ladder(least: int, most: int, *, factor: int) -> tuple[int, ...]:
    """Sizes from `least` up, each `factor` times the last, ending in `most`."""
    sizes = [most]
    size = least
    while size < most:
        sizes.append(size)
        size *= factor
    return tuple(sorted(sizes))


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
