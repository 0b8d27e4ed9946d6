"""A step plan as padded arrays: the only place where sequences become arrays.

token axis T   | decode tokens, one per lane | prefill segments, one after the other | padding |
lanes      B   | decodes                     | prefills | padding |
"""

import dataclasses
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from jaxpaged.cache.capacity import PoolCapacity, blocks_for
from jaxpaged.engine.sampling import MAX_BANNED, SamplingBatch
from jaxpaged.model.attention import AttentionBatch
from jaxpaged.scheduler.plan import Chunk, StepPlan
from jaxpaged.shapes import AnyArray
from pallas_kernels import PrefillTiles
from pallas_kernels.xla import DECODE_LANES, TILE_QUERIES


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """The padded shape of a step: one executable each.

    Attributes:
        num_tokens: Length of the token axis.
        num_lanes: Lanes; at most `num_tokens`.
        num_tiles: Prefill tiles; 0 in a step that only decodes.
    """

    num_tokens: int
    num_lanes: int
    num_tiles: int


class StepBatch(NamedTuple):
    """All arrays of one step."""

    token_ids: Int[AnyArray, " T"]
    """Tokens to compute; 0 for padding."""
    positions: Int[AnyArray, " T"]
    """Position of each token in its sequence."""
    sampled_tokens: Int[AnyArray, " B"]
    """Index on the token axis of each lane's last token."""
    attention: AttentionBatch
    """What attention needs."""
    sampling: SamplingBatch
    """Sampling parameters per lane."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BatchShapes:
    """The sizes all batches of one engine share.

    Attributes:
        lane_buckets: Lane counts of decode steps, rising; the last one serves mixed steps too.
        token_buckets: Token counts of mixed steps, rising.
        table_width: Blocks of a padded block table.
        block_size: Tokens per block.
        num_slots: Slots of the pool; also the slot that padding is "written" to.
        vocab_size: Marks an unused banned id.
    """

    lane_buckets: tuple[int, ...]
    token_buckets: tuple[int, ...]
    table_width: int
    block_size: int
    num_slots: int
    vocab_size: int

    def buckets(self) -> list[Bucket]:
        """Every bucket a step can take: the most executables the engine will ever hold."""
        decode = [Bucket(num_tokens=n, num_lanes=n, num_tiles=0) for n in self.lane_buckets]
        return decode + [self._mixed(n) for n in self.token_buckets]

    def bucket(self, plan: StepPlan) -> Bucket:
        """The smallest bucket that holds the plan."""
        if not plan.prefills:
            lanes = next(n for n in self.lane_buckets if n >= len(plan.decodes))
            return Bucket(num_tokens=lanes, num_lanes=lanes, num_tiles=0)
        return self._mixed(next(n for n in self.token_buckets if n >= plan.num_tokens))

    def _mixed(self, num_tokens: int) -> Bucket:
        # Each segment may leave one tile partly filled, and a segment has two tokens or more.
        lanes = self.lane_buckets[-1]
        tiles = num_tokens // TILE_QUERIES + min(lanes, num_tokens // 2)
        return Bucket(num_tokens=num_tokens, num_lanes=lanes, num_tiles=tiles)


def batch_shapes(
    *,
    max_num_seqs: int,
    token_budget: int,
    max_model_len: int,
    capacity: PoolCapacity,
    vocab_size: int,
) -> BatchShapes:
    """Few buckets, a factor of two to four apart, the largest ones the limits themselves."""
    most_lanes = _round_up(max_num_seqs, DECODE_LANES)
    most_tokens = max(_round_up(token_budget, TILE_QUERIES), most_lanes)
    block_size = capacity.block_size
    return BatchShapes(
        lane_buckets=_ladder(DECODE_LANES, most_lanes, factor=4),
        token_buckets=_ladder(max(most_lanes, 2 * TILE_QUERIES), most_tokens, factor=2),
        table_width=blocks_for(max_model_len, block_size),
        block_size=block_size,
        num_slots=capacity.num_tokens,
        vocab_size=vocab_size,
    )


def build(plan: StepPlan, bucket: Bucket, shapes: BatchShapes) -> StepBatch:
    """The plan's arrays, padded to the bucket.

    Lanes keep the plan's order of chunks, but decodes are sorted by falling context length, so
    that the lanes of an attention tile need about the same work: `lane_order` gives the order.
    """
    chunks = lane_order(plan)
    num_decodes = len(plan.decodes)
    token_ids = np.zeros(bucket.num_tokens, np.int32)
    positions = np.zeros(bucket.num_tokens, np.int32)
    slots = np.full(bucket.num_tokens, shapes.num_slots, np.int32)
    tables = np.zeros((bucket.num_lanes, shapes.table_width), np.int32)
    ends = np.zeros(bucket.num_lanes, np.int32)
    context_lens = np.zeros(bucket.num_lanes, np.int32)
    at = 0
    for lane, chunk in enumerate(chunks):
        table, stop = chunk.sequence.block_table, chunk.start + chunk.length
        tables[lane, : len(table)] = table
        span = slice(at, at + chunk.length)
        token_ids[span] = chunk.sequence.token_ids[chunk.start : stop]
        positions[span] = where = np.arange(chunk.start, stop)
        slots[span] = (
            tables[lane, where // shapes.block_size] * shapes.block_size + where % shapes.block_size
        )
        at += chunk.length
        ends[lane] = at - 1
        context_lens[lane] = stop
    attention = AttentionBatch(
        slot_mapping=slots,
        block_tables=tables,
        context_lens=context_lens,
        num_decodes=np.asarray(num_decodes, np.int32),
        tiles=_prefill_tiles(chunks, num_decodes, bucket),
    )
    sampling = _sampling(chunks, bucket.num_lanes, shapes.vocab_size)
    return StepBatch(token_ids, positions, ends, attention, sampling)


def lane_order(plan: StepPlan) -> list[Chunk]:
    """The plan's chunks in the order of their lanes."""
    return [*sorted(plan.decodes, key=lambda c: -c.start), *plan.prefills]


def _prefill_tiles(chunks: list[Chunk], num_decodes: int, bucket: Bucket) -> PrefillTiles | None:
    if not bucket.num_tiles:
        return None
    lanes, starts, lens, positions = (np.zeros(bucket.num_tiles, np.int32) for _ in range(4))
    at, tile = num_decodes, 0
    for lane in range(num_decodes, len(chunks)):
        chunk = chunks[lane]
        for offset in range(0, chunk.length, TILE_QUERIES):
            lanes[tile] = lane
            starts[tile] = at + offset
            lens[tile] = min(TILE_QUERIES, chunk.length - offset)
            positions[tile] = chunk.start + offset
            tile += 1
        at += chunk.length
    return PrefillTiles(lanes, starts, lens, positions, np.asarray(tile, np.int32))


def _sampling(chunks: list[Chunk], num_lanes: int, vocab_size: int) -> SamplingBatch:
    batch = SamplingBatch(
        temperature=np.zeros(num_lanes, np.float32),
        top_k=np.zeros(num_lanes, np.int32),
        top_p=np.ones(num_lanes, np.float32),
        min_p=np.zeros(num_lanes, np.float32),
        keys=np.zeros((num_lanes, 2), np.uint32),
        draws=np.zeros(num_lanes, np.int32),
        banned_ids=np.full((num_lanes, MAX_BANNED), vocab_size, np.int32),
    )
    for lane, chunk in enumerate(chunks):
        sequence = chunk.sequence
        if not chunk.samples:
            continue
        params = sequence.request.params
        batch.temperature[lane] = params.temperature
        batch.top_k[lane] = max(0, params.top_k)
        batch.top_p[lane] = params.top_p
        batch.min_p[lane] = params.min_p
        batch.keys[lane] = sequence.key
        batch.draws[lane] = sequence.num_sampled
        if sequence.num_sampled < params.min_tokens:
            batch.banned_ids[lane, : len(sequence.stop_ids)] = sequence.stop_ids
    return batch


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
