"""How much of the memory's speed decode attention reaches, beside others that do the same.

Decode attention reads every live key and value once: that many bytes over the time it takes, as a
share of what a copy on the same device reads and writes per second. Each call takes the result of
the call before as its queries, several in one program, so that neither starting a program counts
nor can the compiler leave a call out.

Compared with are the kernel that ships with JAX (`jax.experimental.pallas.ops.gpu`, with its
default tiles, and its keys in its own layout) and paged attention of cuDNN, where this JAX and this
device have them. The first and the last lane of every result are held against float64; what is not
right is not fast.
"""

import dataclasses
import functools
import importlib
import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

import copy_rate
import float64_attention
import jax
import jax.numpy as jnp
import numpy as np
from case_stream import Case, LeftOut
from check_kernels import has_hopper, int32

import pallas_kernels
from jaxpaged.engine import memory
from pallas_kernels import NO_WINDOW, KVRows

BLOCK_SIZE = 16
CONTEXTS = (1024, 4096, 256, 16384)
BATCHES = (64, 8, 256, 1)
"""In order of importance, both."""
MODELS = {"llama-8b": 128, "llama-1b": 64}
"""Head width; 32 query heads and 8 key/value heads."""
CALLS = 16
"""In one program, of calls that are short."""
CALL_BYTES = 2**30
"""Beyond these, a program has fewer calls."""
CACHED_BYTES = 2**27
"""Less than so many may stay in a cache from one call to the next, and say nothing of memory."""
MOST_XLA_TOKENS = 2**17
"""Plain XLA goes over so many live tokens at most: more take too long."""

Attention = Literal["triton", "triton_interpreted", "mosaic", "xla", "jax", "cudnn"]
BASELINES = ("jax", "cudnn")
"""What this project's kernels are compared with."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A call of decode attention: one query for each lane, all contexts alike.

    Attributes:
        model: Whose heads they are.
        batch: Lanes.
        context: Tokens of each lane.
        head_dim: Numbers of a head.
        num_heads: Query heads.
        num_kv_heads: Key/value heads.
    """

    model: str
    batch: int
    context: int
    head_dim: int
    num_heads: int = 32
    num_kv_heads: int = 8

    @property
    def name(self) -> str:
        """Tells it from all others."""
        return f"{self.model}, {self.batch} x {self.context}"

    @property
    def table_width(self) -> int:
        """Blocks of a lane."""
        return -(-self.context // BLOCK_SIZE)

    @property
    def num_tokens(self) -> int:
        """Live tokens."""
        return self.batch * self.context

    @property
    def num_bytes(self) -> int:
        """Live keys and values in bfloat16."""
        return 2 * self.num_tokens * self.num_kv_heads * self.head_dim * 2

    @property
    def num_calls(self) -> int:
        """Calls of a program."""
        return max(2, min(CALLS, CALL_BYTES * 4 // self.num_bytes))


class Inputs(NamedTuple):
    """What every implementation gets, in its own layout."""

    q: Any
    """`[B, H, D]`."""
    k: Any
    v: Any
    tables: Any
    """`[B, W]`."""
    lens: Any
    """`[B]`."""


def layout(shape: Shape, attention: Attention) -> tuple[int, ...]:
    """Axes of keys, or of values, of all blocks."""
    blocks = (shape.batch * shape.table_width, BLOCK_SIZE)
    if attention == "jax":
        return (shape.num_kv_heads, *blocks, shape.head_dim)
    return (*blocks, shape.num_kv_heads, shape.head_dim)


def abstract_inputs(
    shape: Shape, attention: Attention, of: Callable[..., Any] = jax.ShapeDtypeStruct
) -> Inputs:
    """Shapes and dtypes of the inputs."""
    rows = of(layout(shape, attention), jnp.bfloat16)
    return Inputs(
        q=of((shape.batch, shape.num_heads, shape.head_dim), jnp.bfloat16),
        k=rows,
        v=rows,
        tables=of((shape.batch, shape.table_width), jnp.int32),
        lens=of((shape.batch,), jnp.int32),
    )


def repeated(shape: Shape, attention: Attention, num_calls: int) -> Callable[[Inputs], jax.Array]:
    """So many calls, one after the other.

    Raises:
        LeftOut: The implementation is not there.
    """
    call = one_call(shape, attention)

    def program(inputs: Inputs) -> jax.Array:
        def body(q: jax.Array, _: None) -> tuple[jax.Array, None]:
            return call(inputs._replace(q=q)), None

        return jax.lax.scan(body, inputs.q, length=num_calls)[0]

    return program


def one_call(shape: Shape, attention: Attention) -> Callable[[Inputs], jax.Array]:
    """Decode attention by one of the implementations.

    Raises:
        LeftOut: It is not there.
    """
    if attention == "jax":
        return _bundled(shape)
    if attention == "cudnn":
        return _cudnn(shape)

    def ours(inputs: Inputs) -> jax.Array:
        return pallas_kernels.decode_attention(
            inputs.q,
            KVRows(inputs.k[None], None),
            KVRows(inputs.v[None], None),
            layer=jnp.int32(0),
            block_tables=inputs.tables,
            token_lanes=jnp.arange(shape.batch, dtype=jnp.int32),
            context_lens=inputs.lens,
            num_queries=jnp.int32(shape.batch),
            window=jnp.int32(NO_WINDOW),
            scale=shape.head_dim**-0.5,
            implementation=attention,
        )

    return ours


def _bundled(shape: Shape) -> Callable[[Inputs], jax.Array]:
    with warnings.catch_warnings():
        # Newer ones say on loading that they are deprecated.
        warnings.simplefilter("ignore", DeprecationWarning)
        try:
            module = importlib.import_module("jax.experimental.pallas.ops.gpu.paged_attention")
        except ImportError as error:
            raise LeftOut(f"JAX {jax.__version__} has no such kernel: {error}") from error
    # Its defaults are 16 splits and 8 pages a tile, and both have to divide the table.
    splits = math.gcd(16, shape.table_width)
    pages = math.gcd(8, shape.table_width // splits)

    def call(inputs: Inputs) -> jax.Array:
        return module.paged_attention(
            # It does not scale.
            inputs.q * jnp.bfloat16(shape.head_dim**-0.5),
            inputs.k,
            inputs.v,
            inputs.tables,
            inputs.lens,
            k_splits=splits,
            pages_per_compute_block=pages,
        )

    return call


def _cudnn(shape: Shape) -> Callable[[Inputs], jax.Array]:
    try:
        # Not public: the public function does not take block tables.
        module = importlib.import_module("jax._src.cudnn.fused_attention_stablehlo")
        paged_attention, padding = module.paged_attention, module.MaskType.PADDING
    except (ImportError, AttributeError) as error:
        raise LeftOut(f"JAX {jax.__version__} has no paged attention by cuDNN: {error}") from error

    def call(inputs: Inputs) -> jax.Array:
        tables = inputs.tables[:, None, :, None]
        return paged_attention(
            inputs.q[:, None],
            inputs.k,
            inputs.v,
            jnp.ones(shape.batch, jnp.int32),
            inputs.lens,
            tables,
            tables,
            scale=shape.head_dim**-0.5,
            mask_type=padding,
        )[:, 0]

    return call


def fill(shape: Shape, attention: Attention) -> Inputs:
    """Inputs of unit variance, made on the device; every lane has its own blocks, shuffled."""
    rng = np.random.default_rng(0)
    blocks = rng.permutation(shape.batch * shape.table_width).reshape(shape.batch, -1)
    abstract = abstract_inputs(shape, attention)
    normal = jax.jit(
        lambda seed, like: jax.random.normal(jax.random.key(seed), like, jnp.bfloat16),
        static_argnames="like",
    )
    q, k, v = (normal(seed, like=abstract[seed].shape) for seed in range(3))
    return Inputs(q, k, v, int32(blocks), int32([shape.context] * shape.batch))


def error_share(shape: Shape, attention: Attention, inputs: Inputs, result: jax.Array) -> float:
    """The error of the first and the last lane against float64, as a share of what is tolerated."""
    shares = []
    for lane in {0, shape.batch - 1}:
        blocks = inputs.tables[lane]
        rows = [x[:, blocks] if attention == "jax" else x[blocks] for x in (inputs.k, inputs.v)]
        k, v = (np.asarray(x.astype(jnp.float32)) for x in rows)
        if attention == "jax":
            k, v = (x.transpose(1, 2, 0, 3) for x in (k, v))
        expected = float64_attention.attend(
            np.asarray(inputs.q[lane : lane + 1].astype(jnp.float32)),
            *(x.reshape(-1, *x.shape[2:])[: shape.context] for x in (k, v)),
            positions=np.asarray([shape.context - 1]),
            window=NO_WINDOW,
            scale=shape.head_dim**-0.5,
        )
        got = np.asarray(result[lane : lane + 1].astype(jnp.float32))
        shares.append(float64_attention.error_share(got, expected, "bfloat16"))
    return max(shares)


@functools.cache
def copy_bytes_per_second() -> float:
    """Of the device; measured once in a process."""
    available = memory.available_bytes()
    on_cpu = jax.default_backend() == "cpu"
    return copy_rate.measure(2**24 if on_cpu else min(copy_rate.MOST_BYTES, available // 4))


class Programs(NamedTuple):
    """Of one shape and implementation."""

    once: Callable[[Inputs], jax.Array]
    often: Callable[[Inputs], jax.Array]


def prepare(shape: Shape, attention: Attention) -> Programs:
    """Compiles.

    Raises:
        LeftOut: The implementation is not there, or takes too long.
    """
    if attention == "xla" and shape.num_tokens > MOST_XLA_TOKENS:
        raise LeftOut(f"{shape.num_tokens} live tokens take too long in plain XLA")
    abstract = abstract_inputs(shape, attention)
    once, often = (
        jax.jit(function).lower(abstract).compile()
        for function in (one_call(shape, attention), repeated(shape, attention, shape.num_calls))
    )
    return Programs(once, often)


def measure(shape: Shape, attention: Attention, programs: Programs) -> dict[str, object]:
    """Time of a call, bytes per second, their share of a copy's, and how right the result is.

    Raises:
        LeftOut: The keys and values do not fit into memory.
    """
    copied = copy_bytes_per_second()
    # Beside them: one array in float32 while it is made, and some for results.
    needed, available = int(2.2 * shape.num_bytes), memory.available_bytes()
    if needed > available:
        raise LeftOut(f"needs {needed / 2**30:.1f} GiB, {available / 2**30:.1f} are free")
    inputs = fill(shape, attention)
    share = error_share(shape, attention, inputs, programs.once(inputs))
    seconds = copy_rate.seconds_of(lambda: programs.often(inputs), 5) / shape.num_calls
    rate, is_small = shape.num_bytes / seconds, shape.num_bytes < CACHED_BYTES
    return {
        "passed": share <= 1 or attention in BASELINES,
        "row": shape.name,
        "column": attention,
        "cell": f"{rate / copied:.2f}" + "*" * is_small + "!" * (not share <= 1),
        "microseconds": round(seconds * 1e6, 2),
        "num_bytes": shape.num_bytes,
        "bytes_per_second": round(rate),
        "share_of_copy": round(rate / copied, 4),
        "num_calls": shape.num_calls,
        "may_be_cached": is_small,
        "share_of_tolerance": round(share, 4) if math.isfinite(share) else "inf",
    }


def _copy(_: None) -> dict[str, object]:
    rate = copy_bytes_per_second()
    return {"passed": True, "bytes_per_second": round(rate)}


TINY = (Shape(model="tiny", batch=2, context=64, head_dim=16, num_heads=4, num_kv_heads=2),)


def shapes() -> Iterator[Shape]:
    """All shapes; the ones in the middle first."""
    indices = [(i, j) for i in range(len(CONTEXTS)) for j in range(len(BATCHES))]
    for i, j in sorted(indices, key=sum):
        for model, head_dim in MODELS.items():
            yield Shape(model=model, batch=BATCHES[j], context=CONTEXTS[i], head_dim=head_dim)


def cases(*, is_tiny: bool) -> Iterator[Case]:
    """The copy, then every shape by every implementation."""
    on_gpu = jax.default_backend() == "gpu"
    found: list[Attention] = ["triton_interpreted", "xla"]
    if on_gpu:
        found = ["triton", "mosaic", "jax", "cudnn", "xla"]
        if not has_hopper():
            found.remove("mosaic")
    yield Case(name="copy", run=_copy)
    for shape in TINY if is_tiny else shapes():
        for attention in found:
            yield Case(
                name=f"{shape.name} {attention}",
                prepare=functools.partial(prepare, shape, attention),
                run=functools.partial(measure, shape, attention),
                is_ours=attention not in BASELINES,
            )
