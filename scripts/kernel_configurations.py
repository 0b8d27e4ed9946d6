"""Every configuration of the GPU kernels that is vouched for.

One list for whoever compiles them and whoever runs them; it needs nothing but the formats' names.
"""

import dataclasses

from pallas_kernels import KVDType, WeightDType


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """What a kernel's code depends on.

    Attributes:
        query_dtype: Of queries and results.
        kv_dtype: How keys and values are stored.
        head_dim: Numbers of a head.
        num_heads: Query heads.
        num_kv_heads: Key/value heads.
        block_size: Slots of a block.
    """

    query_dtype: str = "bfloat16"
    kv_dtype: KVDType = "bfloat16"
    head_dim: int
    num_heads: int = 32
    num_kv_heads: int = 8
    block_size: int = 16

    @property
    def name(self) -> str:
        """Tells it from all others."""
        heads = f"h{self.num_heads}x{self.num_kv_heads}"
        return f"{self.query_dtype}/{self.kv_dtype}/d{self.head_dim}/{heads}/s{self.block_size}"


_DTYPES: tuple[tuple[str, KVDType], ...] = (
    ("bfloat16", "bfloat16"),
    ("bfloat16", "float16"),
    ("bfloat16", "fp8"),
    ("bfloat16", "int8"),
    ("bfloat16", "int4"),
    ("float32", "float32"),
)

CONFIGURATIONS = (
    *(
        Configuration(query_dtype=query_dtype, kv_dtype=kv_dtype, head_dim=head_dim)
        for query_dtype, kv_dtype in _DTYPES
        for head_dim in (64, 96, 128, 256)
    ),
    Configuration(head_dim=64, num_heads=9, num_kv_heads=3),
    Configuration(head_dim=128, block_size=32),
    Configuration(head_dim=128, block_size=64),
)
"""Of the Triton kernels."""

HOPPER_CONFIGURATIONS = tuple(
    Configuration(
        head_dim=head_dim, num_heads=num_heads, num_kv_heads=num_kv_heads, block_size=block_size
    )
    for head_dim in (128, 64)
    for num_heads, num_kv_heads in ((32, 8), (9, 3))
    for block_size in (16, 32, 64)
)
"""Of the Mosaic GPU kernel."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LinearConfiguration:
    """What the code of a linear map by packed weights depends on.

    Attributes:
        dtype: Of rows and results.
        weight_dtype: How weights are stored.
        num_rows: Rows, which decide the tiles.
    """

    dtype: str = "bfloat16"
    weight_dtype: WeightDType
    num_rows: int

    @property
    def name(self) -> str:
        """Tells it from all others."""
        return f"linear/{self.dtype}/{self.weight_dtype}/r{self.num_rows}"


LINEAR_CONFIGURATIONS = tuple(
    LinearConfiguration(dtype=dtype, weight_dtype=weight_dtype, num_rows=num_rows)
    for dtype in ("bfloat16", "float32")
    for weight_dtype in ("int8", "int4")
    for num_rows in (16, 32, 512)
)
"""Of the linear map by packed weights."""
