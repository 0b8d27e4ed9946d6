"""Paged attention: arrays in, arrays out, and the reference that defines each function.

`paged_attention_ref` and `combine_ref` are the specification; `decode_attention`,
`prefill_attention` and `combine` are the public functions, with one file per backend. `kv_format`
is how keys and values are stored.
Nothing here knows of engines, models or files.
"""

from pallas_kernels.api import (
    NO_WINDOW,
    Implementation,
    PrefillTiles,
    combine,
    decode_attention,
    prefill_attention,
)
from pallas_kernels.kv_format import KVDType, KVRows
from pallas_kernels.linear_map import (
    QuantizedPanels,
    head,
    head_ref,
    linear,
    linear_ref,
    pack,
    pack_quantized,
    quantized_linear,
    zero_panels,
)
from pallas_kernels.memory import untouched
from pallas_kernels.packed_linear import packed_linear
from pallas_kernels.partials import Partials
from pallas_kernels.reference import combine_ref, paged_attention_ref
from pallas_kernels.weight_format import PackedMatrix, WeightDType, packed_linear_ref

__all__ = [
    "NO_WINDOW",
    "Implementation",
    "KVDType",
    "KVRows",
    "PackedMatrix",
    "Partials",
    "PrefillTiles",
    "QuantizedPanels",
    "WeightDType",
    "combine",
    "combine_ref",
    "decode_attention",
    "head",
    "head_ref",
    "linear",
    "linear_ref",
    "pack",
    "pack_quantized",
    "packed_linear",
    "packed_linear_ref",
    "paged_attention_ref",
    "prefill_attention",
    "quantized_linear",
    "untouched",
    "zero_panels",
]
